"""The error family: every refusal says what was expected, what came, where, and what to do.

This file imports nothing, so that the numpy runtime can use it without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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
    """Raised by a command when nobody reads its output any more; no error of anyone."""


def refusal(where: str, expected: str, got: str, remedy: str) -> ConformalError:
    """Build the error in the library's one form."""
    return ConformalError(f"{where}: expected {expected}, got {got}. {remedy}")


def refusal_at(path: str, module: object, expected: str, got: str, remedy: str) -> ConformalError:
    """Build the error of a module at its position in a network."""
    return refusal(f"{type(module).__name__} at position {path}", expected, got, remedy)


def refuse_bytes(where: str, dtype: str, about: Mapping[str, Any] | None) -> None:
    """Refuse bytes for a network whose notes say that white is another number than 255."""
    white = (about or {}).get("white")
    if dtype == "uint8" and isinstance(white, (int, float)) and white != 255:
        expected, remedy = f"pixels from 0 to {white:g}", "Divide them by 255."
        raise refusal(where, expected, "bytes", remedy if white == 1 else "Scale them first.")


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtra:
    """Build the one-line error for an optional dependency that is not installed."""
    return MissingExtra(f"{purpose} needs {package}: pip install 'conformallayers[{extra}]'")


def shape_text(shape: Sequence[int]) -> str:
    """Write a shape the way the messages do: ``(3, 32, 32)``."""
    return "(" + ", ".join(str(int(n)) for n in shape) + ("," if len(shape) == 1 else "") + ")"


def checked_shape(shape: object, where: str) -> tuple[int, ...]:
    """Return ``input_shape`` (no batch axis) as a tuple of positive ints, or refuse it."""
    remedy = "Give the shape of one sample without the batch axis, for example (3, 32, 32)."
    expected = "a non-empty tuple of positive whole numbers"
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Sequence):
        shown = f"a {type(shape).__name__}" if hasattr(shape, "shape") else repr(shape)
        raise refusal(where, expected, shown, remedy)
    sizes = tuple(shape)
    if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise refusal(where, expected, repr(shape), remedy)
    return sizes
