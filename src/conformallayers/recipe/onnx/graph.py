"""ONNX graphs: values that compute like tensors, and the graph that collects their nodes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ..integer_operations import KINDS as INTEGER
from ..integer_operations import integer_values, unsigned_values
from ..places import Array, Table
from ..point_operations import BandedForm, Normalize, Rebase
from ..recipe import INPUT, Operation, Recipe, Shape

OUTPUT, BATCH = "y", "batch"
SINGLE, WIDE = np.dtype(np.float32), np.dtype(np.float64)
_MODERATE = 1e12  # scalars of samples with larger factors could overflow
_RMS_OPSET = 23  # the first with RMSNormalization
_CONDITIONS = "Equal", "Greater", "IsNaN", "Less", "Or"  # operators that give bool


def _operator(kind: str, *, reflected: bool = False) -> Callable[[Value, Operand], Value]:
    def run(x: Value, other: Operand) -> Value:
        if not isinstance(other, (Value, np.ndarray, np.floating, float)):
            return NotImplemented
        return x.graph.add(kind, *((other, x) if reflected else (x, other)))

    return run


_reflected = partial(_operator, reflected=True)


@dataclass(frozen=True)
class Value:
    """A value of a graph, (batch, *shape); operators and methods append nodes and return new values.

    Arrays and numbers among operands become initializers. Axes count the batch axis, which is 0.
    """

    graph: OnnxGraph = field(repr=False, compare=False)
    name: str
    shape: Shape
    dtype: np.dtype[Any]
    __array_ufunc__ = None  # so that numpy leaves ``array * value`` to this class

    def node(self, kind: str, *others: Operand, **options: Any) -> Value:
        """Append a node whose first input is this value; see :meth:`OnnxGraph.add`."""
        return self.graph.add(kind, self, *others, **options)

    __add__, __sub__, __mul__ = _operator("Add"), _operator("Sub"), _operator("Mul")
    __truediv__, __gt__, __lt__ = _operator("Div"), _operator("Greater"), _operator("Less")
    __rsub__, __rtruediv__ = _reflected("Sub"), _reflected("Div")
    __radd__, __rmul__ = _reflected("Add"), _reflected("Mul")

    def __matmul__(self, matrix: Array) -> Value:
        return self.node("MatMul", matrix, shape=(*self.shape[:-1], matrix.shape[-1]))

    def __rmatmul__(self, matrix: Array) -> Value:
        shape = (*self.shape[:-2], matrix.shape[-2], self.shape[-1])
        return self.graph.add("MatMul", matrix, self, shape=shape)

    def __abs__(self) -> Value:
        return self.node("Abs")

    def weighted(self, weight: float) -> Value:
        """Multiply by a number, unless it is 1."""
        return self if weight == 1.0 else self * weight

    def cast(self, dtype: Any) -> Value:
        """Convert to a dtype, unless the value has it or was converted from it."""
        from onnx import helper

        source = self.graph.casts.get(self.name, self)
        if dtype in (self.dtype, source.dtype):
            return self if self.dtype == dtype else source
        to = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        result = self.node("Cast", dtype=dtype, to=to)
        if self.dtype == np.uint8:
            self.graph.casts[result.name] = self
        return result

    def reshape(self, shape: Shape) -> Value:
        """Give samples another shape, unless they have it; only the last of several reshapes is kept."""
        source = self.graph.sources.get(self.name, self)
        if source.shape == shape:
            return source
        result = source.node("Reshape", np.array([0, *shape]), shape=shape)
        self.graph.sources[result.name] = source
        return result

    def pad(self, pads: Sequence[tuple[int, int]], value: float = 0.0) -> Value:
        """Put a value around the last axes, (before, after); a negative number crops."""
        ends = [(0, 0)] * (len(self.shape) - len(pads)) + list(pads)
        flat = np.array([(0, 0), *ends]).T.flatten()  # the batch axis is not padded
        shape = tuple(n + a + b for n, (a, b) in zip(self.shape, ends, strict=True))
        return self.node("Pad", flat, *([value] if value else []), shape=shape)

    def gather(self, axis: int, table: Table) -> Value:
        """Take entries along an axis; the axes of the table take its place."""
        shape = (*self.shape[: axis - 1], *table.shape, *self.shape[axis:])
        return self.node("Gather", table, shape=shape, axis=axis)

    def slice(self, axis: int, start: int, stop: int) -> Value:
        """Take the entries from ``start`` to before ``stop`` along an axis, unless these are all."""
        if stop - start == self.shape[axis - 1]:
            return self
        shape = (*self.shape[: axis - 1], stop - start, *self.shape[axis:])
        return self.node("Slice", *(np.array([end]) for end in (start, stop, axis)), shape=shape)

    def reduce(self, kind: str, axes: Sequence[int], *, keepdims: bool = True) -> Value:
        """Reduce some axes other than that of the batch."""
        kept = [1 if axis in axes else n for axis, n in enumerate(self.shape, 1)]
        left = [n for axis, n in enumerate(self.shape, 1) if axis not in axes]
        shape = tuple(kept if keepdims else left)
        return self.node(kind, np.array(axes), shape=shape, keepdims=int(keepdims))

    def reduce_sample(self, kind: str) -> Value:
        """Reduce all axes but that of the batch, which leaves axes of length 1."""
        return self.reduce(kind, range(1, len(self.shape) + 1))

    def scalar(self) -> Value:
        """Return one number a sample as a scalar of samples."""
        return self.cast(self.graph.scalar_dtype).reshape(self.graph.scalar_shape)

    def column(self, x: Value) -> Value:
        """Return one number a sample in a shape that broadcasts against x."""
        return self.reshape((1,) * len(x.shape))

    def scale(self, factor: Value) -> Value:
        """Multiply each sample by a scalar, in the dtype of the samples."""
        return self * factor.cast(self.dtype).column(self)


Operand = Value | Array | float


class OnnxGraph:
    """Collect the nodes of a recipe; equal nodes and equal initializers are kept once.

    Scalars of samples are (batch, 1, …) in float64, of the rank of the features that most of them meet,
    so that few have to be reshaped.

    Args:
        recipe: its constants are arrays of numpy.
        opset: version of the operators.
        reads_m: whether an activation depends on the scale of points, and so on m, before m = 1 is left out.
    """

    def __init__(self, recipe: Recipe, opset: int, *, reads_m: bool = True) -> None:
        self.recipe, self.opset, self.dtype = recipe, opset, SINGLE
        self._shapes = recipe.shapes()
        self.scalar_shape = (1,) * _common_rank(recipe, self._shapes)
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.sources: dict[str, Value] = {}  # reshaped value → the value before
        self.casts: dict[str, Value] = {}  # converted value → the bytes before
        # Rounded features → before, the first channel with a sign and the first behind those.
        self.signed: dict[str, tuple[Value, int, int]] = {}
        self._known: dict[Any, Any] = {}
        self._reads_m = reads_m
        self.scalar_dtype = WIDE if self._may_overflow() else SINGLE
        self.integers = integer_values(recipe.operations)
        self.unsigned = unsigned_values(recipe.operations)  # features of 0 to 127

    @property
    def input(self) -> Value:
        """The input of the graph."""
        return Value(self, INPUT, self.recipe.input_shape, SINGLE)

    def normalizes(self, op: Normalize) -> bool:
        """Tell whether one node divides samples by t: with an offset, and where no activation reads t."""
        usual = 0 < op.offset**2 / prod(self._shapes[op.inputs[0]]) < 1e30
        return self.opset >= _RMS_OPSET and usual and not self._reads_m

    def _may_overflow(self) -> bool:
        """Tell whether scalars of samples could leave the range of float32, or lose digits in it."""
        factors = [1.0]
        if not self._shapes[self.recipe.output]:
            return True
        for op in self.recipe.operations:
            if isinstance(op, (BandedForm, *INTEGER)):
                return True
            if isinstance(op, Rebase) and self._reads_m:
                return True
            factors += [
                n
                for n in (getattr(op, "weight", 1.0), getattr(op, "scale", 1.0))
                if isinstance(n, float)
            ]
        return not all(1 / _MODERATE < abs(factor) < _MODERATE for factor in factors)

    def result_shape(self, operation: Operation) -> Shape:
        """Return the shape of the first output of an operation of the recipe."""
        return self._shapes[operation.outputs[0]]

    def is_padded(self, x: Value) -> bool:
        """Tell whether a Pad gives a value; ONNX Runtime merges it into a pooling behind it."""
        return any(node.op_type == "Pad" and x.name in node.output for node in self.nodes)

    def constant(self, name: str) -> Array:
        """Return a constant of the recipe as an array."""
        return np.asarray(self.recipe.constants[name])

    def optional(self, name: str | None) -> list[Array]:
        """Return a constant, or nothing where the operation has none."""
        return [] if name is None else [self.constant(name)]

    def add(
        self,
        kind: str,
        *inputs: Operand,
        shape: Shape | None = None,
        dtype: Any = None,
        **attributes: Any,
    ) -> Value:
        """Append a node; return its output.

        Args:
            kind: the ONNX operator.
            inputs: values; arrays and numbers become initializers, in the dtype of the first value of floats.
            shape: of the output without the batch axis; None: that of the first value of floats.
            dtype: of the output; None: bool for conditions, else that of the first value of floats.
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
            found_dtype = dtype or (bool if kind in _CONDITIONS else like.dtype)
            found_shape = like.shape if shape is None else shape
            self._known[key] = Value(self, name, found_shape, np.dtype(found_dtype))
        found: Value = self._known[key]
        return found

    def _initializer(self, array: Array, like: Value) -> str:
        from onnx import numpy_helper

        dtype = like.dtype if array.dtype.kind == like.dtype.kind == "f" else array.dtype
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
        """Store integers as bytes, and append their conversion, which ONNX Runtime folds when it opens a file."""
        name = self._initializer(array.astype(np.int8), self.input)
        return Value(self, name, array.shape, np.dtype(np.int8)).cast(dtype)

    def total(self, values: Sequence[Value]) -> Value:
        """Add values of one shape."""
        kind = {1: None, 2: "Add"}.get(len(values), "Sum")
        return values[0] if kind is None else self.add(kind, *values)

    def concatenate(self, values: Sequence[Value], axis: int = 1) -> Value:
        """Join values along an axis."""
        if len(values) == 1:
            return values[0]
        before, after = values[0].shape[: axis - 1], values[0].shape[axis:]
        shape = (*before, sum(value.shape[axis - 1] for value in values), *after)
        return self.add("Concat", *values, shape=shape, axis=axis)

    def finish(self, result: Value) -> Value:
        """Name the result "y", drop nodes and initializers that it does not need, and return it."""
        from onnx import helper

        result = result.reshape(self.recipe.output_shape)
        if result.name == INPUT:
            result = Value(self, "identity", result.shape, result.dtype)
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
        return Value(self, OUTPUT, result.shape, result.dtype)


def _common_rank(recipe: Recipe, shapes: dict[str, Shape]) -> int:
    """Return the rank that most features have where they meet scalars, at least 1."""
    ranks: Counter[int] = Counter()
    for operation in recipe.operations:
        found = [len(shapes[name]) for name in (*operation.inputs, *operation.outputs)]
        if 0 in found:
            ranks.update(rank for rank in found if rank)
    return ranks.most_common(1)[0][0] if ranks else 1
