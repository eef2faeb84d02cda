"""The base class of operations; ``layer_operations.py`` and ``point_operations.py`` define them.

Values have names. A value is a batch: (B, *shape) for features, (B,) for the scalars of samples. Shapes in
this folder are those of one sample, without the batch axis. Features have the dtype of the fold; scalars
and all values behind ``Cast("wide")`` are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar, TypeVar

Shape = tuple[int, ...]  # of one sample
ShapeOf = Callable[[str], Shape]  # the shape of a constant by its name
OPERATIONS: dict[str, type[Operation]] = {}
Class = TypeVar("Class", bound="type[Operation]")


@dataclass(frozen=True)
class Operation:
    """One operation: reads values and constants, writes new values.

    Attributes:
        kind: the name in files, printed recipes and errors.
        inputs: the names of the values that are read, in order.
        outputs: the names of the values that are written.
    """

    kind: ClassVar[str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        """Return the shapes of the outputs; raise ValueError where inputs or constants do not fit."""
        raise TypeError(f"{type(self).__name__} does not say what shapes it gives")

    def scratch(self, inputs: Sequence[Shape], constant: ShapeOf) -> int:
        """Return the number of temporary elements that one sample needs."""
        return 0

    def constants(self) -> Iterator[tuple[str, str]]:
        """Yield the stored name and the array name of every constant; optional ones may be missing."""
        for item in fields(self):
            name = getattr(self, item.name)
            if "constant" in item.metadata and name is not None:
                yield item.metadata["constant"], name

    def settings(self) -> Iterator[tuple[str, Any]]:
        """Yield the stored name and the value of every setting that is not the default."""
        for item in fields(self):
            value = getattr(self, item.name)
            if "setting" in item.metadata and (item.default is MISSING or value != item.default):
                yield item.metadata["setting"], value


def operation(kind: str) -> Callable[[Class], Class]:
    """Register a class of operations under its stored name."""

    def register(cls: Class) -> Class:
        cls.kind = kind
        OPERATIONS[kind] = cls
        return cls

    return register


def read_settings(kind: type[Operation], stored: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an operation from the settings of a file, each of them checked.

    Raises:
        ValueError: a setting is missing, unknown or not what its reader takes.
    """
    known: dict[str, Field[Any]] = {
        item.metadata["setting"]: item for item in fields(kind) if "setting" in item.metadata
    }
    unknown = set(stored) - set(known)
    if unknown:
        raise ValueError(f"{kind.kind} has no setting {sorted(unknown)[0]!r:.60}")
    found = {}
    for name, item in known.items():
        if name in stored:
            found[item.name] = item.metadata["reader"](stored[name])
        elif item.default is MISSING:
            raise ValueError(f"{kind.kind} lacks its setting {name}")
    return found


def expect(condition: object, complaint: str) -> None:
    """Raise ValueError unless a condition holds."""
    if not condition:
        raise ValueError(complaint)


def expect_shape(actual: Shape, expected: Shape, what: str) -> None:
    """Raise ValueError unless two shapes are equal."""
    expect(actual == expected, f"{what} has shape {actual} instead of {expected}")
