"""Check options of commands, write command lines, and set torch's threads and seed; importing it imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import refusal
from ..utils.text import suggest


def flag(option: str) -> str:
    """Return an option as on the command line: ``--max-epochs`` for ``max_epochs``."""
    return f"--{option.replace('_', '-')}"


def require_choice(where: str, value: str, choices: Iterable[str], remedy: str) -> None:
    """Refuse a value that is none of the choices, and suggest the closest one."""
    known = list(choices)
    if value not in known:
        shown = (repr(name) if "," in name else name for name in known)
        expected = f"one of {', '.join(shown)}"
        raise refusal(where, expected, repr(value), remedy + suggest(value, known))


def require_same(
    where: str, before: Mapping[str, Any], options: Mapping[str, Any], remedy: str
) -> None:
    """Refuse the first option whose value is not that of an earlier run."""
    for name, value in options.items():
        if before.get(name) != value:
            expected = f"{before.get(name)!r} as before"
            raise refusal(f"{where} {flag(name)}", expected, repr(value), remedy)


def command_line(words: Sequence[str], options: Mapping[str, Any]) -> str:
    """Return a command line without the options that are None, False or empty.

    Examples:
        >>> command_line(["experiment", "3"], {"depths": (1, 2), "batch": 64, "threads": None})
        'conformallayers experiment 3 --depths 1 2 --batch 64'
    """
    line = ["conformallayers", *words]
    for name, value in options.items():
        if value is None or value is False or value == ():
            continue
        values = value if isinstance(value, (tuple, list)) else [value]
        line += [flag(name), *(str(one) for one in values if one is not True)]
    return shlex.join(line)


@contextmanager
def torch_settings(threads: int | None = None, seed: int | None = None) -> Iterator[None]:
    """Set threads and seed, unless None; restore threads and random state afterwards."""
    import torch

    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        torch.set_num_threads(threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)
