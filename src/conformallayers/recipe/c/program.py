"""A C program under construction: statements, arrays, and the memory of values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod

import numpy as np

from .. import layer_operations as layer
from .. import point_operations as point
from ..integer_operations import integer_values
from ..operation import Shape
from ..recipe import INPUT, Recipe
from .constants import SUFFIX, Array, Constant, Stored, as_type
from .memory import Buffer, arrange
from .text import functions, indented

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

    Features are in buffers: the image, the output, or work memory, where buffers of disjoint lifetimes share
    memory; ``finish`` places them. The scalars of a sample are local variables of type double.

    Args:
        recipe: its operations become statements, its constants arrays.
        name: of the functions, which no array may have.
    """

    def __init__(self, recipe: Recipe, name: str) -> None:
        self.recipe = recipe
        self.lines: list[str] = []
        self.constants: list[Constant] = []
        self.rounded: dict[str, Array] = {}  # constants of the recipe as the program has them
        self.multiply_adds = 0
        self.work_size = 0  # in floats
        self.index = 0  # of the operation that is written
        self._shapes, self._wide = recipe.shapes(), frozenset[str]()
        self._int8 = integer_values(recipe.operations)
        self._last_use = {INPUT: 0, recipe.output: len(recipe.operations)}
        for i, names in enumerate(recipe.last_uses()):
            self._last_use.update(dict.fromkeys(names, i))
        self.buffers: list[Buffer] = []  # of work memory
        self._places: dict[str, tuple[Buffer, int]] = {}  # value → buffer, and where in it
        self._stored: dict[tuple[str, str], Stored] = {}
        self._scalars: dict[str, str] = {}
        self._taken: set[str] = set()
        for end in ("predict_with", "self_test"):
            self._take(f"{name}_{end}")
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
        return "int8_t" if name in self._int8 else "double" if name in self._wide else "float"

    def suffix(self, name: str) -> str:
        """Return the suffix of functions that take a value."""
        return "_b" if name in self._int8 else f"_{SUFFIX[self.ctype(name)]}"

    def width(self, name: str) -> int:
        """Return how many floats an entry of a value takes; 1 for integers, whose offsets count bytes."""
        return 2 if name in self._wide else 1

    def read(self, name: str, offset: int = 0) -> str:
        """Return the address of a value, or of its entry ``offset``.

        Addresses in work memory are marks, ``@buffer:offset@``, which ``finish`` replaces.
        """
        buffer, start = self._places[name]
        place = start + offset * self.width(name)
        if name in self._int8:
            return _address(f"(int8_t *)(@{self.buffers.index(buffer)}:0@)", place)
        if buffer.base == WORK:
            return f"@{self.buffers.index(buffer)}:{place}@"
        return _address(buffer.base, place)

    def write(self, name: str, *, over: str | None = None) -> str:
        """Return the address of a new value: that of ``over``, if nothing reads ``over`` later."""
        if over is not None and self._is_free(over, name):
            self._share(name, *self._places[over])
        elif name in self._results:
            self._share(name, Buffer(OUT, self.count(name)), 0)
        else:
            size = self.count(name) * self.width(name)
            size = -(-size // _BYTES) if name in self._int8 else size
            self.buffers.append(Buffer(WORK, size, self.index))
            self._share(name, self.buffers[-1], 0)
        return self.read(name)

    def scratch(self, size: int) -> str:
        """Return the address of bytes that only the current operation needs."""
        self.buffers.append(Buffer(WORK, -(-size // _BYTES), self.index, self.index))
        return f"(int8_t *)(@{len(self.buffers) - 1}:0@)"

    def alias(self, name: str, source: str, offset: int = 0) -> None:
        """Let a new value be part of another one, from its entry ``offset`` on."""
        buffer, start = self._places[source]
        self._share(name, buffer, start + offset * self.width(source))

    def _written_to_output(self) -> set[str]:
        """Return the values in the memory of the output: the result, and values that it overwrites."""
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
        return self._scalars[name]

    def define(self, name: str, expression: str) -> str:
        """Declare the variable of a scalar; return it."""
        variable = self._scalars[name] = self.identifier(f"s_{name}")
        self.emit(f"const double {variable} = {expression};")
        return variable

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
        """Return a constant of the recipe as the program stores it, once for each type and layout.

        Args:
            name: of the constant.
            how: type and layout, a key.
            store: stores it under the name of an array in C.
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
        storage = "double" if self.wide(like) else "float"
        how = f"{store.__name__} {storage}"
        return self.keep(name, how, lambda to: store(to, self.array(name), storage))

    def exact(self, name: str, ctype: str, shape: Shape | None = None) -> str:
        """Return the array of a constant that is stored without a scale, broadcast to ``shape``.

        The constant may have more axes than ``shape``, all of size 1, in front.
        """
        values = as_type(self.array(name), ctype)
        shape = values.shape if shape is None else shape
        extra = max(0, values.ndim - len(shape))
        flat = np.broadcast_to(values.reshape(values.shape[extra:]), shape).ravel()

        def store(to: str) -> Stored:
            return Stored(ctype, False, values, (Constant(to, ctype, flat),), flat.size)

        return self.keep(name, f"{ctype} {shape}", store).arguments

    def integers(self, name: str, values: Sequence[int]) -> str:
        """Append an array of integers; return its name."""
        constant = Constant(self.identifier(f"k_{name}"), "int32_t", np.array(values))
        self.constants.append(constant)
        return constant.name

    def finish(self) -> None:
        """Copy the result to the output if it is elsewhere, mark unused variables, place all buffers."""
        name, source = self.recipe.output, self.read(self.recipe.output)
        if self.wide(name):
            self.emit(f"narrow({source}, {OUT}, {self.count(name)});")
        elif source != OUT:
            self.call("copy", name, source, 0, OUT, 0, 1, self.count(name))
        uses = Counter(re.findall(r"\bs_\w+", "\n".join(self.lines)))
        unread = sorted(name for name in self._scalars.values() if uses[name] == 1)
        self.emit(*(f"(void){variable};" for variable in unread))  # or compilers warn
        self.work_size = arrange(self.buffers)
        self.lines = [re.sub(r"@(\d+):(\d+)@", self._placed, line) for line in self.lines]
        if not self.work_size:
            self.lines.insert(0, f"(void){WORK};")

    @cached_property
    def code(self) -> tuple[str, str]:
        """The functions that a finished program calls, and its statements as the body of a function."""
        sizes = self.count(INPUT), self.count(self.recipe.output)
        guard = [f"if (has_nan({IMAGE}, {sizes[0]}))", f"    return fill_nan({OUT}, {sizes[1]});"]
        body = indented([*([] if self._int8 else guard), *self.lines])  # integers read NaN as 0
        return functions(f"{body} has_nan() fill_nan() largest()"), body

    def _placed(self, found: re.Match[str]) -> str:
        """Return the address of a mark of ``read``."""
        return _address(WORK, self.buffers[int(found[1])].start + int(found[2]))


def _address(base: str, place: int) -> str:
    return f"{base} + {place}" if place else base
