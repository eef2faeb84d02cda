"""Read CIFAR-10's python version, whose files are pickles, without executing anything in them."""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import refusal

# Other instructions are not needed, and some allocate memory that the file does not fill.
_INSTRUCTIONS = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("INT", "LONG", "LONG1", "BININT", "BININT1", "BININT2"),
    *("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"),
    *("BINUNICODE", "SHORT_BINUNICODE"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
}
# A batch has one tuple for each file name at most. Hashing deeply nested ones overflows C's stack.
_MOST_TUPLES = 20_000
# numpy's arrays, and the call by which Python 3 writes bytes for Python 2.
_CALLABLE = {
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
}


class _Call:
    """Record a call that a pickle makes, and the state that it sets, instead of making the call.

    A pickle cannot change the class: where it sets state, ``__setstate__`` is called and not setattr.
    """

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Call]:
        """Return the class that records calls; nothing is imported."""
        if f"{module}.{name}" not in _CALLABLE:
            raise ValueError(f"it asks for {module}.{name}"[:100])
        return _Call


def read_pickle(data: bytes, where: str) -> dict[str, Any]:
    """Return the dict in a pickle; its values are arrays of bytes, lists, numbers and text.

    A pickle that holds or calls anything else, or is damaged, is refused.

    Examples:
        >>> read_pickle(pickle.dumps({"labels": [3, 8]}), "batch")
        {'labels': [3, 8]}
        >>> read_pickle(pickle.dumps(print), "batch")
        Traceback (most recent call last):
        ...
        conformallayers.errors.ConformalError: batch: expected a pickle of arrays, lists and text, got one that fails (it asks for builtins.print). Get the file again.
    """
    try:
        _check_instructions(data)
        found = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        entries = found.items() if isinstance(found, dict) else ()
        return {_text(key): _array(v) if isinstance(v, _Call) else v for key, v in entries}
    except Exception as error:  # damaged bytes lead to nearly any exception
        expected, got = "a pickle of arrays, lists and text", f"one that fails ({error!s:.200})"
        raise refusal(where, expected, got, "Get the file again.") from error


def _check_instructions(data: bytes) -> None:
    """Refuse instructions that the unpickler would follow without asking find_class."""
    tuples = 0
    for instruction, argument, _ in pickletools.genops(data):
        name = instruction.name
        tuples += name.startswith("TUPLE")
        if name not in _INSTRUCTIONS:
            raise ValueError(f"it uses the instruction {name}")
        if name in ("PUT", "LONG_BINPUT") and int(str(argument)) > len(data):
            raise ValueError("it numbers more objects than it can hold")
        if tuples > _MOST_TUPLES:
            raise ValueError(f"it has more than {_MOST_TUPLES} tuples")


def _array(call: _Call) -> npt.NDArray[np.uint8]:
    """Build the array of bytes that numpy would have built."""
    _version, shape, dtype, by_columns, data = call.state
    code = _text(dtype.arguments[0])
    if code not in ("u1", "|u1"):
        raise ValueError(f"it has an array of type {code[:20]}")
    content = np.frombuffer(_text(data).encode("latin-1"), np.uint8)
    return content.reshape(shape, order="F" if by_columns else "C")


def _text(value: Any) -> str:
    """Return text that Python 2 or 3 has written as text, as bytes, or as encoded text."""
    if isinstance(value, _Call):
        value = value.arguments[0]
    text: str = value if isinstance(value, str) else value.decode("latin-1")
    return text
