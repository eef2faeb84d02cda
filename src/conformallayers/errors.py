"""The error family: every refusal says what was expected, what came, where, and what to do.

This file imports only Python's own modules, so that the numpy runtime can use it without torch.
"""

from __future__ import annotations

import textwrap
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

SEVERAL = "return of "  # begins the name of a call that returns several outputs; refusals drop it
_FILTERS = threading.RLock()  # warning filters are global to the process


class ConformalError(ValueError):
    """Raised for every misuse of the library.

    The message has one form: ``where: expected ..., got .... What to do.``

    Examples:
        >>> import conformallayers as cl
        >>> try:
        ...     cl.ReSPro(alpha=-1.0)
        ... except cl.ConformalError as error:
        ...     print(error)
        ReSPro(alpha=...): expected None, "young", "spectral", "learned" or a number in [1e-150, 1e+150], got -1.0. Leave alpha out to use the bound of the layers before it.
    """


class MissingExtra(ConformalError, ImportError):
    """Raised when an optional dependency is not installed; names the extra that brings it."""


class ClosedPipe(Exception):
    """Raised by a command whose reader has closed the pipe; not an error."""


def refusal(where: str, expected: str, got: str, remedy: str) -> ConformalError:
    """Build the error in the library's one form."""
    return ConformalError(f"{where}: expected {expected}, got {got}. {remedy}")


def refusal_at(path: str, module: object, expected: str, got: str, remedy: str) -> ConformalError:
    """Build the error of a module at its position in a network."""
    return refusal(f"{type(module).__name__} at position {path}", expected, got, remedy)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened, or the name of its type."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return textwrap.shorten(lines[0], 200, placeholder=" …").rstrip(".")


def cause_line(error: BaseException) -> str:
    """Return the type and the first line of the innermost cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


def refuse_bytes(where: str, dtype: str, about: Mapping[str, Any] | None) -> None:
    """Refuse bytes for a network whose notes do not say that white is 255."""
    white = (about or {}).get("white")
    if dtype == "uint8" and white != 255:
        expected = f"pixels from 0 to {white:g}" if is_real(white) else "floating-point numbers"
        remedy = (
            "Divide them by 255." if white == 1 else "Scale them to floats as in training: x / 255."
        )
        raise refusal(where, expected, "bytes", remedy)


def channels_last(shape: Sequence[int], expected: Sequence[int]) -> bool:
    """Check whether a sample has the expected shape with its channels after the other axes."""
    first, rest = tuple(expected[:1]), tuple(expected[1:])
    return bool(rest) and tuple(shape) == (*rest, *first) != tuple(expected)


def wrong_shape(
    where: str, got: Sequence[int], expected: Sequence[int], remedy: str, kind: str = "input"
) -> ConformalError:
    """Build the error of a batch whose samples do not have the expected shape."""
    add, move = ("x[None]", "x.transpose") if kind == "array" else ("x.unsqueeze(0)", "x.permute")
    found = f"an {kind}"
    if tuple(got) == tuple(expected):
        found, remedy = f"an unbatched {kind}", f"Add the batch axis with {add}."
    elif channels_last(got[1:], expected):
        order = (0, len(expected), *range(1, len(expected)))
        found, remedy = "channels last", f"Move the channels first with {move}{order}."
    batch = f"a batch of shape (B, {', '.join(map(str, expected))})"
    return refusal(where, batch, f"{found} of shape {tuple(got)}", remedy)


def is_real(value: object) -> TypeGuard[float]:
    """Check for an int or a float; a bool does not count."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    """Check for an int; a bool does not count."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_count(where: str, value: object, remedy: str) -> None:
    """Refuse a value that is not an integer > 0."""
    if not is_whole(value) or value < 1:
        raise refusal(where, "an integer > 0", repr(value), remedy)


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtra:
    """Build the one-line error for an optional dependency that is not installed."""
    return MissingExtra(f"{purpose} needs {package}: pip install 'conformallayers[{extra}]'")


def shape_text(shape: Sequence[int]) -> str:
    """Write a shape the way the messages do: ``(3, 32, 32)``."""
    return "(" + ", ".join(str(int(n)) for n in shape) + ("," if len(shape) == 1 else "") + ")"


def checked_shape(shape: object, where: str) -> tuple[int, ...]:
    """Return ``input_shape`` (no batch axis) as a tuple of positive ints, or refuse it."""
    remedy = "Give the shape of one sample without the batch axis, for example (3, 32, 32)."
    expected = "a non-empty tuple of positive integers"
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Sequence):
        shown = f"a {type(shape).__name__}" if hasattr(shape, "shape") else repr(shape)
        raise refusal(where, expected, shown, remedy)
    sizes = tuple(shape)
    if not sizes or not all(is_whole(n) and n > 0 for n in sizes):
        raise refusal(where, expected, repr(shape), remedy)
    return sizes


@contextmanager
def ignored_warnings(*errors: type[Warning]) -> Iterator[None]:
    """Ignore warnings, one thread at a time; raise those of the given types."""
    with _FILTERS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in errors:
            warnings.simplefilter("error", kind)
        yield
