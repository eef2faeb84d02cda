"""A C program while it is written: statements, arrays, and where values are in memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from .. import layer_operations as layer
from .. import point_operations as point
from ..integer_operations import integer_values
from ..operation import Shape
from ..recipe import INPUT, Recipe
from .constants import SUFFIX, Array, Constant, Stored, as_type, kernel
from .memory import Buffer, arrange
from .prune import Proofs

IMAGE, OUT, WORK = "image", "out", "work"  # the arguments of the function in C
_BYTES = 4  # of a float: whole numbers that its memory has room for
_IN_PLACE = (
    layer.AddConstant,
    point.Divide,
    layer.Elementwise,
    layer.Multiply,
    layer.PRelu,
    layer.Reshape,
)


class Program:
    """Collect the statements of a recipe.

    Features are in buffers: the image, the output, or work memory, where buffers that are never needed at
    the same time share a place; ``finish`` finds these places. The scalars of a sample are local variables
    of type double.

    Args:
        recipe: what to write.
        proofs: store its forms, and know the type of weights.
        reserved: names that no array may have.
    """

    def __init__(self, recipe: Recipe, proofs: Proofs, reserved: Sequence[str] = ()) -> None:
        self.recipe, self.proofs = recipe, proofs
        self.lines: list[str] = []
        self.constants: list[Constant] = []
        self.rounded: dict[str, Array] = {}  # constants of the recipe as the program has them
        self.multiply_adds = 0
        self.work_size = 0  # in floats
        self.index = 0  # of the operation that is written
        self._shapes, self._wide = recipe.shapes(), recipe.wide_values()
        self._whole = integer_values(recipe.operations)
        self._last_use = {INPUT: 0}
        for i, op in enumerate(recipe.operations):
            self._last_use.update(dict.fromkeys((*op.inputs, *op.outputs), i))
        self._last_use[recipe.output] = len(recipe.operations)
        self.buffers: list[Buffer] = []  # of work memory
        self._places: dict[str, tuple[Buffer, int]] = {}  # value → buffer, and where in it
        self._stored: dict[tuple[str, str], Stored] = {}
        self._scalars: dict[str, str] = {}
        self._unread: set[str] = set()
        self._taken: set[str] = set()
        for name in reserved:
            self._take(name)
        self._share(INPUT, Buffer(IMAGE, self.count(INPUT)), 0)
        self._results = self._written_to_output()

    # -- values ---------------------------------------------------------------------------------

    def shape(self, name: str) -> Shape:
        """Return the shape of a value."""
        return self._shapes[name]

    def count(self, name: str) -> int:
        """Return the number of entries of a value."""
        return prod(self._shapes[name])

    def wide(self, name: str) -> bool:
        """Tell whether a value is double."""
        return name in self._wide

    def ctype(self, name: str) -> str:
        """Return the type of the entries of a value."""
        return "int8_t" if name in self._whole else "double" if name in self._wide else "float"

    def suffix(self, name: str) -> str:
        """Return the suffix of functions that take a value."""
        return "_b" if name in self._whole else f"_{SUFFIX[self.ctype(name)]}"

    def width(self, name: str) -> int:
        """Return how many floats an entry of a value takes; one for whole numbers, whose places are bytes."""
        return 2 if name in self._wide else 1

    def copy(self, name: str) -> str:
        """Return the function that copies rows of a value."""
        return "copy_whole" if name in self._whole else "copy"

    def read(self, name: str, offset: int = 0) -> str:
        """Return the address of a value, or of its entry ``offset``; ``finish`` fills in those of work memory."""
        buffer, start = self._places[name]
        place = start + offset * self.width(name)
        if name in self._whole:
            return _address(f"(int8_t *)(@{self.buffers.index(buffer)}:0@)", place)
        if buffer.base == WORK:
            return f"@{self.buffers.index(buffer)}:{place}@"
        return _address(buffer.base, place)

    def write(self, name: str, *, over: str | None = None) -> str:
        """Return the address of a new value: that of another one, if nothing reads that later."""
        if over is not None and self._is_free(over, name):
            self._share(name, *self._places[over])
        elif name in self._results:
            self._share(name, Buffer(OUT, self.count(name)), 0)
        else:
            size = self.count(name) * self.width(name)
            size = -(-size // _BYTES) if name in self._whole else size
            self.buffers.append(Buffer(WORK, size, self.index))
            self._share(name, self.buffers[-1], 0)
        return self.read(name)

    def scratch(self, size: int) -> str:
        """Return the address of bytes that the operation that is written needs for itself."""
        self.buffers.append(Buffer(WORK, -(-size // _BYTES), self.index, self.index))
        return f"(int8_t *)(@{len(self.buffers) - 1}:0@)"

    def alias(self, name: str, source: str, offset: int = 0) -> None:
        """Let a new value be part of another one, from its entry ``offset`` on."""
        buffer, start = self._places[source]
        self._share(name, buffer, start + offset * self.width(source))

    def _written_to_output(self) -> set[str]:
        """Return the values that are computed where the output is: its own, and those it overwrites."""
        writer = {name: op for op in self.recipe.operations for name in op.outputs}
        reads = Counter(name for op in self.recipe.operations for name in op.inputs)
        name, found = self.recipe.output, set()
        while name in writer and not self.wide(name):
            found.add(name)
            operation, (name, *_) = writer[name], writer[name].inputs
            if not isinstance(operation, _IN_PLACE) or reads[name] > 1:
                break
        return found

    def _share(self, name: str, buffer: Buffer, start: int) -> None:
        buffer.values.append(name)
        buffer.last = max(buffer.last, self._last_use[name])
        self._places[name] = buffer, start

    def _is_free(self, name: str, other: str) -> bool:
        buffer, _ = self._places[name]
        reads = [x for x in self.recipe.operations[self.index].inputs if x in buffer.values]
        same = self.ctype(name) == self.ctype(other) and self.count(name) == self.count(other)
        return same and buffer.last <= self.index and len(reads) == 1 and buffer.base != IMAGE

    # -- scalars --------------------------------------------------------------------------------

    def scalar(self, name: str) -> str:
        """Return the variable of a scalar."""
        self._unread.discard(self._scalars[name])
        return self._scalars[name]

    def define(self, name: str, expression: str) -> str:
        """Declare the variable of a scalar; return it."""
        variable = self._scalars[name] = self.identifier(f"s_{name}")
        self._unread.add(variable)
        self.emit(f"const double {variable} = {expression};")
        return variable

    def factor(self, expression: str, name: str) -> str:
        """Return a double as a factor of a value."""
        return expression if self.wide(name) else f"(float){expression}"

    # -- statements and arrays ------------------------------------------------------------------

    def emit(self, *lines: str) -> None:
        """Append statements."""
        self.lines += lines

    def call(self, function: str, like: str, *arguments: str | int) -> None:
        """Append the call of a function for the type of the value ``like``."""
        self.emit(f"{function}{self.suffix(like)}({', '.join(map(str, arguments))});")

    def identifier(self, name: str) -> str:
        """Return a C identifier that is neither taken nor the beginning of one that is."""
        base = found = re.sub(r"\W", "_", name, flags=re.ASCII)
        count = 1
        while found in self._taken:
            count += 1
            found = f"{base}_{count}"
        self._take(found)
        return found

    def _take(self, name: str) -> None:
        words = name.split("_")
        self._taken.update("_".join(words[:n]) for n in range(1, len(words) + 1))

    def array(self, name: str) -> Array:
        """Return a constant of the recipe in float64."""
        return np.asarray(self.recipe.constants[name], np.float64)

    def keep(self, name: str, how: str, store: Callable[[str], Stored]) -> Stored:
        """Return a constant of the recipe as the program stores it, once for every ``how``.

        Args:
            name: of the constant.
            how: type and layout.
            store: takes the name of the array in C.
        """
        if (name, how) not in self._stored:
            self._stored[name, how] = stored = store(self.identifier(f"k_{name}"))
            self.constants += stored.constants
            for constant in stored.constants:
                self._take(constant.name)
            self.rounded[name] = stored.values
        return self._stored[name, how]

    def weights(self, name: str, store: Callable[[str, Array, str], Stored], like: str) -> Stored:
        """Return the weights that the value ``like`` is multiplied with."""
        storage = "double" if self.wide(like) else self.proofs.storage
        how = f"{store.__name__} {storage}"
        return self.keep(name, how, lambda to: store(to, self.array(name), storage))

    def exact(self, name: str, ctype: str, shape: Shape | None = None) -> str:
        """Return the array of a constant that is never int8, broadcast to ``shape``.

        The constant may have more axes than ``shape``, all of size 1, in front.
        """
        values = self.array(name)
        written = values if shape is None else _broadcast(values, shape)
        stored = self.keep(name, f"{ctype} {shape}", lambda to: kernel(to, written, ctype))
        self.rounded[name] = as_type(values, ctype)
        return stored.arguments

    def whole_array(self, name: str, ctype: str, shape: Shape | None = None) -> str:
        """Return the array of a constant that is stored as it is, broadcast to ``shape``."""
        values = self.array(name)
        written = values if shape is None else _broadcast(values, shape)
        flat = written.reshape(-1).astype(np.float64 if ctype == "double" else np.int64)

        def store(to: str) -> Stored:
            return Stored(ctype, False, values, (Constant(to, ctype, flat),), flat.size)

        return self.keep(name, f"{ctype} {shape}", store).arguments

    def integers(self, name: str, values: Sequence[int]) -> str:
        """Append an array of integers; return its name."""
        constant = Constant(self.identifier(f"k_{name}"), "int32_t", np.array(values))
        self.constants.append(constant)
        return constant.name

    def finish(self) -> None:
        """Copy the result to the output if it is elsewhere, mention what no statement reads, plan the memory."""
        name, source = self.recipe.output, self.read(self.recipe.output)
        if self.wide(name):
            self.emit(f"narrow({source}, {OUT}, {self.count(name)});")
        elif source != OUT:
            self.emit(f"copy({source}, 0, {OUT}, 0, 1, {self.count(name)});")
        self.emit(*(f"(void){variable};" for variable in sorted(self._unread)))
        self.work_size = arrange(self.buffers)
        self.lines = [re.sub(r"@(\d+):(\d+)@", self._placed, line) for line in self.lines]
        if not self.work_size:
            self.lines.insert(0, f"(void){WORK};")

    def _placed(self, found: re.Match[str]) -> str:
        """Write the address that ``read`` left open."""
        return _address(WORK, self.buffers[int(found[1])].start + int(found[2]))


def _broadcast(values: Array, shape: Shape) -> Array:
    axes = max(0, values.ndim - len(shape))
    return np.broadcast_to(values.reshape(values.shape[axes:]), shape)


def _address(base: str, place: int) -> str:
    return f"{base} + {place}" if place else base
