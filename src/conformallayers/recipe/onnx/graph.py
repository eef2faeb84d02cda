"""A builder of ONNX graphs: values that know their shape and dtype, nodes, initializers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..integer_operations import integer_values
from ..operation import Operation, Shape
from ..places import Array, Table
from ..point_operations import Combine, Divide, Normalize
from ..recipe import INPUT, Recipe

OUTPUT, BATCH = "y", "batch"
WIDE = np.dtype(np.float64)


@dataclass(frozen=True)
class Value:
    """A value of the graph, (batch, *shape)."""

    name: str
    shape: Shape
    dtype: np.dtype[Any]


class OnnxGraph:
    """Collect the nodes of a recipe; equal nodes and equal initializers are kept once.

    Scalars of samples are (batch, 1, …) in float64, of the rank of the features that most of them meet,
    so that few have to be reshaped.

    Args:
        recipe: its constants are arrays of numpy, or tensors of torch.
        dtype: of the fold.
        opset: version of the operators.
        divided: whether every point is divided by a τ that is NaN where the sample is.
    """

    def __init__(
        self, recipe: Recipe, dtype: np.dtype[Any], opset: int, *, divided: bool = True
    ) -> None:
        self.recipe, self.dtype, self.opset = recipe, dtype, opset
        self._shapes = recipe.shapes()
        self.scalar_shape = (1,) * _common_rank(recipe, self._shapes)
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._known: dict[Any, Any] = {}
        self._sources: dict[str, Value] = {}  # reshaped value → what it was
        self._undivided = between(recipe) if divided else frozenset[str]()
        # Samples with NaN are marked where they become whole numbers.
        self._undivided |= integer_values(recipe.operations)
        self._marks: list[Value] = []  # not 0 for samples with NaN

    @property
    def input(self) -> Value:
        """The input of the graph."""
        return Value(INPUT, self.recipe.input_shape, self.dtype)

    def result_shape(self, operation: Operation) -> Shape:
        """Return the shape of the first output of an operation of the recipe."""
        return self._shapes[operation.outputs[0]]

    def loses_nan(self, operation: Operation) -> bool:
        """Tell whether an operation may lose a NaN: its result is divided by τ, which is NaN as well."""
        return operation.inputs[0] in self._undivided

    def writes(self, value: Value) -> str | None:
        """Return the operator that gives a value; None for the input."""
        found = (node.op_type for node in self.nodes if value.name in node.output)
        return next(found, None)

    def constant(self, name: str) -> Array:
        """Return a constant of the recipe as an array."""
        array = self.recipe.constants[name]
        return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)

    def optional(self, name: str | None) -> list[Array]:
        """Return a constant, or nothing where the operation has none."""
        return [] if name is None else [self.constant(name)]

    def add(
        self,
        kind: str,
        *inputs: Value | Array | float,
        shape: Shape | None = None,
        dtype: Any = None,
        **attributes: Any,
    ) -> Value:
        """Append a node; return its output.

        Args:
            kind: the ONNX operator.
            inputs: values; arrays and numbers become initializers, in the dtype of the first value of floats.
            shape: of the output without the batch axis; None: that of the first value of floats.
            dtype: of the output; None: that of the first value of floats.
            attributes: of the operator.
        """
        from onnx import helper

        values = [item for item in inputs if isinstance(item, Value)]
        like = next((value for value in values if value.dtype.kind == "f"), values[0])
        names = [
            item.name if isinstance(item, Value) else self._initializer(np.asarray(item), like)
            for item in inputs
        ]
        key = kind, *names, repr(sorted(attributes.items()))
        if key not in self._known:
            name = f"{kind.lower()}_{len(self.nodes)}"
            self.nodes.append(helper.make_node(kind, names, [name], name, **attributes))
            self._known[key] = Value(
                name,
                like.shape if shape is None else shape,
                np.dtype(like.dtype if dtype is None else dtype),
            )
        found: Value = self._known[key]
        return found

    def _initializer(self, array: Array, like: Value) -> str:
        from onnx import numpy_helper

        usual = like.dtype if array.dtype.kind == "f" else np.int64
        dtype = np.int8 if array.dtype == np.int8 else usual
        array = np.ascontiguousarray(array, dtype).reshape(array.shape)
        digest = hashlib.sha256(array.tobytes()).digest()
        key = array.dtype.str, array.shape, digest
        if key not in self._known:
            name = f"constant_{len(self.initializers)}"
            self.initializers.append(numpy_helper.from_array(array, name))
            self._known[key] = name
        found: str = self._known[key]
        return found

    def unpacked(self, array: Array, dtype: Any) -> Value:
        """Keep whole numbers as bytes, and append their conversion, which ONNX Runtime does once."""
        name = self._initializer(array.astype(np.int8), self.input)
        return self.cast(Value(name, array.shape, np.dtype(np.int8)), dtype)

    def cast(self, x: Value, dtype: Any) -> Value:
        """Convert a value, unless it is of that dtype."""
        from onnx import helper

        if x.dtype == dtype:
            return x
        return self.add("Cast", x, dtype=dtype, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def reshape(self, x: Value, shape: Shape) -> Value:
        """Give samples another shape, unless they have it; only the last of several reshapes is kept."""
        source = self._sources.get(x.name, x)
        if source.shape == shape:
            return source
        result = self.add("Reshape", source, np.array([0, *shape]), shape=shape)
        self._sources[result.name] = source
        return result

    def transpose(self, x: Value, *order: int, shape: Shape) -> Value:
        """Reorder all axes, the batch axis among them; ``shape`` leaves one of them out."""
        return self.add("Transpose", x, perm=list(order), shape=shape)

    def pad(self, x: Value, pads: Sequence[tuple[int, int]], value: float = 0.0) -> Value:
        """Put a value around the last axes, (before, after); a negative number crops."""
        ends = [(0, 0)] * (len(x.shape) - len(pads)) + list(pads)
        whole = np.array([(0, 0), *ends]).T.flatten()
        shape = tuple(n + a + b for n, (a, b) in zip(x.shape, ends, strict=True))
        return self.add("Pad", x, whole, *([value] if value else []), shape=shape)

    def gather(self, x: Value, axis: int, table: Table) -> Value:
        """Take entries along an axis; the axes of the table take its place."""
        shape = (*x.shape[: axis - 1], *table.shape, *x.shape[axis:])
        return self.add("Gather", x, table, shape=shape, axis=axis)

    def slice(self, x: Value, axis: int, start: int, stop: int) -> Value:
        """Take the entries from ``start`` to before ``stop`` along an axis, unless these are all."""
        if stop - start == x.shape[axis - 1]:
            return x
        shape = (*x.shape[: axis - 1], stop - start, *x.shape[axis:])
        ends = (np.array([end]) for end in (start, stop, axis))
        return self.add("Slice", x, *ends, shape=shape)

    def total(self, values: Sequence[Value]) -> Value:
        """Add values of one shape."""
        kind = {1: None, 2: "Add"}.get(len(values), "Sum")
        return values[0] if kind is None else self.add(kind, *values)

    def reduce(
        self, kind: str, x: Value, axes: list[int], *, keepdims: bool, shape: Shape
    ) -> Value:
        """Reduce some axes."""
        return self.add(kind, x, np.array(axes), shape=shape, keepdims=int(keepdims))

    def reduce_sample(self, kind: str, x: Value) -> Value:
        """Reduce all axes but that of the batch, which leaves axes of length 1."""
        rank = len(x.shape)
        axes = list(range(1, rank + 1))
        return self.reduce(kind, x, axes, keepdims=True, shape=(1,) * rank)

    def scalar(self, x: Value) -> Value:
        """Return a value of one number a sample as a scalar of samples."""
        return self.reshape(self.cast(x, WIDE), self.scalar_shape)

    def scale(self, x: Value, factor: Value) -> Value:
        """Multiply each sample by a scalar, in the dtype of x."""
        factor = self.cast(factor, x.dtype)
        return self.add("Mul", x, self.reshape(factor, (1,) * len(x.shape)))

    def mark(self, flags: Value) -> None:
        """Let samples whose flag, a number of each sample, is not 0 have NaN as their outputs."""
        self._marks.append(flags)

    def marked(self, y: Value) -> Value:
        """Return a value with NaN in samples that are marked."""
        for flags in self._marks:
            flags = self.reshape(flags, (1,) * len(y.shape))
            odd = self.add("Greater", flags, 0.0, dtype=bool)
            y = self.add("Where", odd, np.full((), np.nan), y)
        return y

    def finish(self, result: Value) -> Value:
        """Name the result "y", drop what it does not need, and return it."""
        from onnx import helper

        result = self.reshape(result, self.recipe.output_shape)
        if result.name == INPUT:
            result = Value("identity", result.shape, result.dtype)
            self.nodes.append(helper.make_node("Identity", [INPUT], [result.name], result.name))
        needed = {result.name}
        for node in reversed(self.nodes):
            if not needed.isdisjoint(node.output):
                needed.update(node.input)
        self.nodes = [node for node in self.nodes if not needed.isdisjoint(node.output)]
        self.initializers = [array for array in self.initializers if array.name in needed]
        for node in self.nodes:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    names[index] = OUTPUT if name == result.name else name
        return Value(OUTPUT, result.shape, result.dtype)


def between(recipe: Recipe) -> frozenset[str]:
    """Return the values between an embedding and its division."""
    found: set[str] = set()
    for operation in recipe.operations:
        inside = not found.isdisjoint(operation.inputs)
        if isinstance(operation, Normalize) or (
            inside and not isinstance(operation, (Combine, Divide))
        ):
            found.update(operation.outputs)
    return frozenset(found)


def _common_rank(recipe: Recipe, shapes: dict[str, Shape]) -> int:
    """Return the rank that most features have where they meet scalars, at least 1."""
    ranks: Counter[int] = Counter()
    for operation in recipe.operations:
        found = [len(shapes[name]) for name in (*operation.inputs, *operation.outputs)]
        if 0 in found:
            ranks.update(rank for rank in found if rank)
    return ranks.most_common(1)[0][0] if ranks else 1
