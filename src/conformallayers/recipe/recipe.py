"""Recipes: the short lists of operations that folds run, with their constants, and the base class of operations.

Recipes are immutable, know every shape, and print. Values have names. A value is a batch: (B, *shape) for features, (B,)
for the scalars of samples. Shapes in this folder are those of one sample, without the batch axis. Features have the dtype of
the fold; scalars are float64. Nothing here needs torch: constants may be torch tensors or numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from math import prod
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform

from ..errors import SEVERAL, ConformalError, refusal, shape_text
from ..utils.text import Block, Printed

INPUT = "x"  # the name of the input value
CHUNK_BYTES = 16 * 2**20  # intermediate values of one chunk of a large batch
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

TORCH_ONLY = "Fold only the layers before it: cl.fold(model.part, shape)."


def constant(*, optional: bool = False, dtype: str | None = None) -> Any:
    """Declare a field that holds the name of an array; without a ``dtype`` the array has that of the fold."""
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
    def by_sample(self) -> bool:
        """Whether it treats every sample by itself."""
        return True

    @property
    def keeps_integers(self) -> bool:
        """Whether it maps 8-bit features to 8-bit features of the same scale."""
        return self.moves

    def fixed_dtypes(self) -> dict[str, str]:
        """Return the dtype of each constant that does not have that of the fold, by name."""
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
            raise unsupported(operation, where, f"operations supported by {self.name}")


def unsupported(operation: Operation, where: str, expected: str) -> ConformalError:
    """Build the error of an operation that only torch has."""
    got = getattr(operation, "what", operation.kind)
    if not got.startswith(SEVERAL):
        return refusal(where, expected, got, TORCH_ONLY)
    got = got.removeprefix(SEVERAL)
    return refusal(where, "a network with one output", got, "Return one tensor.")


def expect(condition: object, complaint: str) -> None:
    """Raise ValueError unless a condition holds."""
    if not condition:
        raise ValueError(complaint)


def expect_shape(actual: Shape, expected: Shape, what: str) -> None:
    """Raise ValueError unless two shapes are equal."""
    expect(actual == expected, f"{what} has shape {actual} instead of {expected}")


@dataclass(frozen=True, eq=False, repr=False)
class Recipe(Printed):
    """The operations of a fold in the order they run.

    Attributes:
        input_shape, output_shape: of one sample.
        operations: each reads values written before it and writes new ones.
        output: the name of the result.
        constants: arrays by name.
        modules: torch modules by name, for the operation ``call`` and for activations of the user.
    """

    input_shape: Shape
    output_shape: Shape
    operations: tuple[Operation, ...]
    output: str
    constants: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, Any] = field(default_factory=dict)

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every value, checking that all operations fit.

        Raises:
            ValueError: a value or a constant is missing, written twice, or of another shape.
        """
        found: dict[str, Shape] = {INPUT: self.input_shape}
        for operation in self.operations:
            kind = operation.kind
            for name in operation.inputs:
                expect(name in found, f"{kind} reads {name!r:.60}, which is not there yet")
            for _, name in operation.constants():
                expect(name in self.constants, f"{kind} has no constant {name!r:.60}")
            try:
                given = [found[name] for name in operation.inputs]
                shapes = operation.shapes(given, self.constant_shape)
            except (TypeError, IndexError) as error:
                raise ValueError(f"{kind} with other inputs") from error
            expect(len(shapes) == len(operation.outputs), f"{kind} writes {len(shapes)} values")
            for name, shape in zip(operation.outputs, shapes, strict=True):
                expect(name not in found, f"{name!r:.60} is written twice")
                found[name] = shape
        output = found.get(self.output)
        expect(output == self.output_shape, f"the output is {output}, not {self.output_shape}")
        return found

    def constant_shape(self, name: str) -> Shape:
        """Return the shape of a constant."""
        return tuple(int(n) for n in self.constants[name].shape)

    def fixed_dtypes(self) -> dict[str, str]:
        """Return the dtype of each constant that has it whatever the dtype of the fold, by name."""
        held = (operation.fixed_dtypes().items() for operation in self.operations)
        return {name: dtype for items in held for name, dtype in items}

    def constant_dtypes(self, dtype: str) -> dict[str, str]:
        """Return the name of the dtype of every constant, given that of the fold."""
        fixed = self.fixed_dtypes()
        return {name: fixed.get(name, dtype) for name in self.constants}

    def check_values(self) -> None:
        """Raise ValueError where values of constants are out of range; runtimes do not check them."""
        shapes = self.shapes()
        for operation in self.operations:
            given = [shapes[name] for name in operation.inputs]
            operation.check_values(given, self.constants.__getitem__)

    def last_uses(self) -> list[tuple[str, ...]]:
        """Return, for each operation, the values that no later one reads."""
        last = {INPUT: -1}
        for index, operation in enumerate(self.operations):
            last.update(dict.fromkeys((*operation.inputs, *operation.outputs), index))
        last.pop(self.output, None)
        dropped: list[list[str]] = [[] for _ in self.operations]
        for name, index in last.items():
            if index >= 0:
                dropped[index].append(name)
        return [tuple(names) for names in dropped]

    def peak_elements(self) -> int:
        """Return the largest number of elements that one sample needs at a time."""
        shapes = self.shapes()
        alive = peak = prod(self.input_shape)
        for operation, dropped in zip(self.operations, self.last_uses(), strict=True):
            alive += sum(prod(shapes[name]) for name in operation.outputs)
            peak = max(peak, alive)
            alive -= sum(prod(shapes[name]) for name in dropped)
        return peak

    @property
    def by_sample(self) -> bool:
        """Whether every operation treats each sample by itself."""
        return all(operation.by_sample for operation in self.operations)

    def with_constants(self, convert: Callable[[str, Any], Any]) -> Recipe:
        """Return the same recipe with converted constants; ``convert`` takes a name and an array."""
        converted = {name: convert(name, array) for name, array in self.constants.items()}
        return replace(self, constants=converted)

    def pruned(self) -> Recipe:
        """Return the same recipe without operations and constants that its output does not need."""
        needed, kept = {self.output}, []
        for operation in reversed(self.operations):
            if not needed.isdisjoint(operation.outputs):
                needed.update(operation.inputs)
                kept.append(operation)
        used = {name for operation in kept for _, name in operation.constants()}
        constants = {name: array for name, array in self.constants.items() if name in used}
        operations = tuple(reversed(kept))
        return replace(self, operations=operations, constants=constants)

    def _blocks(self) -> Iterator[Block]:
        shapes = self.shapes()
        arrow = f"{shape_text(self.input_shape)} → {shape_text(self.output_shape)}"
        left = [", ".join(operation.outputs) for operation in self.operations]
        calls = [self._call(operation) for operation in self.operations]
        width, middle = max(map(len, left), default=0), max(map(len, calls), default=0)
        lines = []
        for operation, name, call in zip(self.operations, left, calls, strict=True):
            features = [shapes[out] for out in operation.outputs if shapes[out]]
            shown = f"  {shape_text(features[0])}" if features else ""
            lines.append(f"  {name:<{width}} = {call:<{middle}}{shown}".rstrip())
        yield "\n".join([f"{INPUT}: {arrow}", *lines, f"return {self.output}"])

    def _call(self, operation: Operation) -> str:
        details = [
            f"{stored} {shape_text(self.constant_shape(name)) if name in self.constants else name}"
            for stored, name in operation.constants()
        ]
        details += [f"{stored} {_text(value)}" for stored, value in operation.settings()]
        return f"{operation.kind}({', '.join(operation.inputs)}{'; ' if details else ''}{', '.join(details)})"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' * (len(value) == 1)})"
    return str(value)


class RecipeBuilder:
    """Collect operations; every value and constant gets a unique name.

    Args:
        input_shape: of one sample.

    Attributes:
        operations: the operations added so far.

    Examples:
        >>> import numpy as np
        >>> from conformallayers.recipe import layer_operations
        >>> builder = RecipeBuilder((3,))
        >>> weight = builder.constant("weight", np.ones((2, 3)))
        >>> y = builder.add(layer_operations.Matmul, INPUT, name="y", weight=weight)
        >>> print(builder.recipe(y))
        x: (3,) → (2,)
          y = matmul(x; weight (2, 3))  (2,)
        return y
    """

    def __init__(self, input_shape: Shape) -> None:
        self.input_shape = input_shape
        self.operations: list[Operation] = []
        self._shapes: dict[str, Shape] = {INPUT: input_shape}
        self._constants: dict[str, Any] = {}
        self._modules: dict[str, Any] = {}
        self._numbers: dict[str, int] = {}  # the last number appended to a name

    def shape(self, value: str) -> Shape:
        """Return the shape of a value."""
        return self._shapes[value]

    def constant(self, name: str, array: Any) -> str:
        """Add an array; return its name."""
        name = self._fresh(name, self._constants)
        self._constants[name] = array
        return name

    def module(self, name: str, module: Any) -> str:
        """Add a torch module; return its name."""
        name = self._fresh(name, self._modules)
        self._modules[name] = module
        return name

    def add(self, kind: type[Operation], *inputs: str, name: str = "z", **settings: Any) -> str:
        """Append an operation with one output; return the name of the value."""
        return self.add_many(kind, *inputs, names=(name,), **settings)[0]

    def add_many(
        self, kind: type[Operation], *inputs: str, names: tuple[str, ...], **settings: Any
    ) -> tuple[str, ...]:
        """Append an operation with several outputs; return the names of the values."""
        outputs = tuple(self._fresh(name, self._shapes) for name in names)
        self._append(kind(inputs=inputs, outputs=outputs, **settings))
        return outputs

    def _fresh(self, name: str, taken: Mapping[str, Any]) -> str:
        """Return a free name: the name itself, or the name with a number appended."""
        found = name
        while found in taken:
            number = self._numbers[name] = self._numbers.get(name, 1) + 1
            found = f"{name}_{number}"
        return found

    def _append(self, operation: Operation) -> None:
        given = [self._shapes[value] for value in operation.inputs]
        shapes = operation.shapes(given, lambda name: tuple(self._constants[name].shape))
        self._shapes.update(zip(operation.outputs, shapes, strict=True))
        self.operations.append(operation)

    def splice(self, recipe: Recipe, value: str) -> str:
        """Append all operations of a recipe, with a value as its input; return its output."""
        values, names = {INPUT: value}, dict[str, str]()
        for operation in recipe.operations:
            inputs = [values[name] for name in operation.inputs]
            outputs = self.copy(operation, inputs, recipe, names)
            values.update(zip(operation.outputs, outputs, strict=True))
        return values[recipe.output]

    def copy(
        self, operation: Operation, inputs: Iterable[str], recipe: Recipe, names: dict[str, str]
    ) -> tuple[str, ...]:
        """Append an operation of another recipe that reads other values; return its outputs.

        ``names`` collects the new names of the constants of that recipe.
        """
        changes: dict[str, Any] = {}
        for item, name in operation.constants():
            if name not in names:
                names[name] = self.constant(name, recipe.constants[name])
            changes[item] = names[name]
        called = getattr(operation, "module", None)
        if called is not None:
            changes["module"] = self.module(called, recipe.modules[called])
        outputs = tuple(self._fresh(name, self._shapes) for name in operation.outputs)
        self._append(replace(operation, inputs=tuple(inputs), outputs=outputs, **changes))
        return outputs

    def recipe(self, output: str) -> Recipe:
        """Return the recipe with a value as its result."""
        return Recipe(
            self.input_shape,
            self._shapes[output],
            tuple(self.operations),
            output,
            dict(self._constants),
            dict(self._modules),
        )
