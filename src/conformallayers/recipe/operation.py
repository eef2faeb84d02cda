"""The base class of operations, and the table of operations that a runtime has.

Values have names. A value is a batch: (B, *shape) for features, (B,) for the scalars of samples. Shapes in
this folder are those of one sample, without the batch axis. Features have the dtype of the fold; scalars
are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform

from ..errors import refusal

Shape = tuple[int, ...]  # of one sample
ShapeOf = Callable[[str], Shape]  # the shape of a constant by its name
ArrayOf = Callable[[str], Any]  # a constant by its name
OPERATIONS: dict[str, type[Operation]] = {}
Class = TypeVar("Class", bound="type[Operation]")
Function = TypeVar("Function", bound=Callable[..., Any])
Run = Callable[..., Any]  # (operation, holder of the constants, *input values) → output values
# Type hints of fields are checked when a recipe is read from a file; the number is the least value.
Positive = Annotated[int, 1]
Size = Annotated[int, 0]

TORCH_ONLY = (
    'Inside a ConformalLayers fold with strategy="dense"; elsewhere fold the layers before it alone, '
    "cl.fold(model.part, shape)."
)


def constant(*, optional: bool = False, dtype: str | None = None) -> Any:
    """Declare a field that holds the name of an array; ``dtype`` is that of integers."""
    default = None if optional else MISSING
    return field(default=default, metadata={"constant": True, "dtype": dtype})


@dataclass(frozen=True)
class Operation:
    """One operation: reads values and constants, writes new values.

    Attributes:
        kind: the name in files, printed recipes and errors.
        moves: whether it only moves entries, so that integers stay integers.
        inputs: the names of the values that are read, in order.
        outputs: the names of the values that are written.
    """

    kind: ClassVar[str]
    moves: ClassVar[bool] = False
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        """Return the shapes of the outputs; raise ValueError where inputs or constants do not fit."""
        (x,) = inputs
        return (self.shape_of(x, constant),)

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        """Return the shape of the output, for operations with one input and one output."""
        raise TypeError(f"{type(self).__name__} does not say what shapes it gives")

    @property
    def keeps_integers(self) -> bool:
        """Whether it maps 8-bit features to 8-bit features of the same scale."""
        return self.moves

    def integer_constants(self) -> dict[str, str]:
        """Return "int32" or "int8" for each constant of whole numbers, by name."""
        held = ((getattr(self, item.name), item.metadata.get("dtype")) for item in fields(self))
        return {name: dtype for name, dtype in held if name is not None and dtype is not None}

    def check_values(self, inputs: Sequence[Shape], constant: ArrayOf) -> None:
        """Raise ValueError where values of constants are out of range."""

    def constants(self) -> Iterator[tuple[str, str]]:
        """Yield the field and the array name of every constant that the operation has."""
        for item in fields(self):
            name = getattr(self, item.name)
            if "constant" in item.metadata and name is not None:
                yield item.name, name

    def settings(self, *, defaults: bool = False) -> Iterator[tuple[str, Any]]:
        """Yield the name and the value of every setting, by default only of those that are not the default."""
        for item in fields(self):
            value = getattr(self, item.name)
            if "constant" in item.metadata or item.name in ("inputs", "outputs"):
                continue
            if defaults or item.default is MISSING or value != item.default:
                yield item.name, value


@dataclass_transform(frozen_default=True, kw_only_default=True)
def operation(kind: str) -> Callable[[Class], Class]:
    """Make a class a frozen dataclass, and register it as an operation under its kind."""

    def register(cls: Class) -> Class:
        dataclass(frozen=True, kw_only=True)(cls)
        cls.kind = kind
        OPERATIONS[kind] = cls
        return cls

    return register


class Runtime(dict[type[Operation], Run]):
    """Map each operation that a runtime has to its function; errors contain the name of the runtime."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def runs(self, *kinds: type[Operation]) -> Callable[[Function], Function]:
        """Register the function of one or several operations."""

        def register(function: Function) -> Function:
            self.update(dict.fromkeys(kinds, function))
            return function

        return register

    def step(self, operation: Operation, holder: Any, values: dict[str, Any]) -> None:
        """Run an operation on values by name, and add its outputs to them."""
        inputs = [values[name] for name in operation.inputs]
        result = self[type(operation)](operation, holder, *inputs)
        results = (result,) if len(operation.outputs) == 1 else result
        values.update(zip(operation.outputs, results, strict=True))

    def check(self, operation: Operation, where: str) -> None:
        """Raise ConformalError for an operation that the runtime lacks."""
        if type(operation) not in self:
            got = getattr(operation, "what", operation.kind)
            raise refusal(where, f"operations supported by {self.name}", got, TORCH_ONLY)


def expect(condition: object, complaint: str) -> None:
    """Raise ValueError unless a condition holds."""
    if not condition:
        raise ValueError(complaint)


def expect_shape(actual: Shape, expected: Shape, what: str) -> None:
    """Raise ValueError unless two shapes are equal."""
    expect(actual == expected, f"{what} has shape {actual} instead of {expected}")
