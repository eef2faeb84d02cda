"""Checks of option values that several commands share; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import refusal
from ..utils.text import suggest


def require_choice(where: str, value: str, choices: Iterable[str], remedy: str) -> None:
    """Refuse a value that is none of the choices, and suggest the closest one.

    Examples:
        >>> require_choice("predict --engine", "nunpy", ("torch", "numpy"), "Leave it out.")
        Traceback (most recent call last):
        ...
        conformallayers.errors.ConformalError: predict --engine: expected one of torch, numpy, got 'nunpy'. Leave it out. Did you mean "numpy"?
    """
    known = list(choices)
    if value not in known:
        expected = f"one of {', '.join(known)}"
        raise refusal(where, expected, repr(value), remedy + suggest(value, known))


def require_positive(command: str, **values: float | Sequence[float] | None) -> None:
    """Refuse the first option that has a value of 0 or below; None stands for its default.

    Examples:
        >>> require_positive("sweep", trials=2, timeout=None, max_epochs=0)
        Traceback (most recent call last):
        ...
        conformallayers.errors.ConformalError: sweep --max-epochs: expected a value greater than 0, got 0. See conformallayers sweep --help.
    """
    for name, value in values.items():
        for number in value if isinstance(value, Sequence) else [value]:
            if number is not None and number <= 0:
                where = f"{command} --{name.replace('_', '-')}"
                remedy = f"See conformallayers {command} --help."
                raise refusal(where, "a value greater than 0", str(number), remedy)
