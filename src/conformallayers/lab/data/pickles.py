"""Read the python form of CIFAR-10 without running it.

A pickle is a program. This interpreter knows the few instructions that build numbers, text, lists,
dicts and arrays of bytes; it imports and calls nothing, and refuses everything else.
"""

from __future__ import annotations

import math
import pickletools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class _Global(NamedTuple):
    """A name that a pickle may use; what it stands for is never imported."""

    module: str
    name: str


_RECONSTRUCT = {
    _Global("numpy.core.multiarray", "_reconstruct"),
    _Global("numpy._core.multiarray", "_reconstruct"),
}
_NDARRAY, _DTYPE = _Global("numpy", "ndarray"), _Global("numpy", "dtype")
_ENCODE = _Global("_codecs", "encode")
_ALLOWED = {*_RECONSTRUCT, _NDARRAY, _DTYPE, _ENCODE}
_VALUES = {"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1"}
_VALUES |= {"BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"}
_LATIN = {"BINSTRING", "SHORT_BINSTRING"}  # Python 2's strings: bytes that genops decodes so
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_CONTAINERS: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = {"BINPUT", "LONG_BINPUT", "PUT"}, {"BINGET", "LONG_BINGET", "GET"}
_IGNORED = {"PROTO", "FRAME"}


class PickleRefused(Exception):
    """Says what in a pickle is not allowed, or broken; the caller names the file."""


@dataclass
class _Array:
    """An array of bytes; empty until its state is set."""

    value: Bytes | None = None


class _Type:
    """The type of unsigned bytes, the only one that is taken."""


class _Mark:
    """Where the items of a container begin on the stack."""


def read_pickle(data: bytes) -> Any:
    """Return the object of a pickle made of dicts, lists, numbers, text and arrays of bytes.

    The keys of dicts are text, whether the pickle has text or Python 2's strings there.

    Raises:
        PickleRefused: if it holds, or calls, anything else.

    Examples:
        >>> import pickle
        >>> read_pickle(pickle.dumps({"labels": [3, 8]}))
        {'labels': [3, 8]}
        >>> read_pickle(pickle.dumps(print))
        Traceback (most recent call last):
        ...
        conformallayers.lab.data.pickles.PickleRefused: it asks for builtins.print
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in text are refused below
            return _run(data)
    # What broken bytes lead to; all of it means the same here.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise PickleRefused(f"it is broken ({error})") from error


def _run(data: bytes) -> Any:
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            return machine.result()
        machine.step(opcode.name, argument)
    raise PickleRefused("it has no end")


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def result(self) -> Any:
        found = self.stack.pop()
        if isinstance(found, dict):
            return {key: _plain(value) for key, value in found.items()}
        return _plain(found)

    def step(self, name: str, argument: Any) -> None:
        """Run one instruction."""
        push, stack = self.stack.append, self.stack
        if name in _VALUES:
            push(argument)
        elif name in _LATIN:
            push(argument.encode("latin-1"))
        elif name in _CONSTANTS:
            push(_CONSTANTS[name])
        elif name in _CONTAINERS:
            push(_CONTAINERS[name]())
        elif name in _PUTS:
            self.memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in _GETS:
            push(self.memo[int(argument)])
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "MARK":
            push(_Mark)
        elif name not in _IGNORED:
            self._build(name, argument)

    def _build(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name == "TUPLE":
            stack.append(tuple(self._items()))
        elif name in ("APPEND", "APPENDS"):
            items = self._items() if name == "APPENDS" else [stack.pop()]
            _expect(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._items() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            keys = [_text(key) for key in items[::2]]
            _expect(stack[-1], dict).update(zip(keys, items[1::2], strict=True))
        elif name == "GLOBAL":
            stack.append(_allowed(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            module, attribute = stack.pop(-2), stack.pop()
            stack.append(_allowed(module, attribute))
        elif name == "REDUCE":
            function, arguments = stack.pop(-2), stack.pop()
            stack.append(_called(function, _expect(arguments, tuple)))
        elif name == "BUILD":
            _set_state(stack[-2], _expect(stack.pop(), tuple))
        else:
            raise PickleRefused(f"it uses the instruction {name}")

    def _items(self) -> list[Any]:
        """Take everything above the last mark, and the mark."""
        start = len(self.stack) - 1
        while self.stack[start] is not _Mark:
            start -= 1
            if start < 0:
                raise PickleRefused("it is broken (no mark)")
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items


def _allowed(module: Any, name: Any) -> _Global:
    asked = _Global(_text(module), _text(name))
    if asked not in _ALLOWED:
        raise PickleRefused(f"it asks for {'.'.join(asked)[:80]}")
    return asked


def _called(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Build what numpy's own functions would; nothing is called."""
    _expect(function, _Global)
    if function in _RECONSTRUCT and isinstance(arguments[0], _Global):
        return _Array()
    if function == _DTYPE:
        if _text(arguments[0]) not in ("u1", "|u1"):
            raise PickleRefused(f"it has an array of type {_text(arguments[0])[:20]}")
        return _Type()
    if function == _ENCODE:  # how Python 3 writes bytes for Python 2
        return _expect(arguments[0], str).encode("latin-1")
    raise PickleRefused("it calls something that is not a function of numpy's arrays")


def _set_state(target: Any, state: tuple[Any, ...]) -> None:
    if isinstance(target, _Type):
        return
    _version, shape, kind, by_columns, data = state
    sizes = [_expect(size, int) for size in _expect(shape, tuple)]
    content = np.frombuffer(_expect(data, bytes), np.uint8)
    if min(sizes, default=0) < 0 or math.prod(sizes) != len(content) or len(sizes) > 8:
        raise PickleRefused(f"it has an array whose {len(content)} bytes do not fit its shape")
    _expect(kind, _Type)
    _expect(target, _Array).value = content.reshape(sizes, order="F" if by_columns else "C")


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise PickleRefused(f"it has a {type(value).__name__} in place of a {kind.__name__}")
    return value


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, _Array) else value


def _text(value: Any) -> str:
    text: str = value.decode("latin-1") if isinstance(value, bytes) else _expect(value, str)
    return text
