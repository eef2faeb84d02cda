"""A C program while it is written: statements, arrays, and where values stand in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from ..layer_operations import WIDE, Cast
from ..operation import Shape
from ..recipe import INPUT, Recipe
from .constants import SUFFIX, Array, Constant, Stored, as_type, kernel, plain
from .prune import Proofs

IMAGE, OUT = "image", "out"  # the arguments of the function in C


@dataclass(eq=False)
class Buffer:
    """Memory of one value, or of several that share it; ``size`` in floats."""

    number: int
    size: int
    first: int  # operation that writes it
    last: int  # operation that needs it for the last time
    values: list[str] = field(default_factory=list)
    place: str | None = None


def wide_values(recipe: Recipe) -> frozenset[str]:
    """Return the features that are double: those behind ``Cast("wide")``."""
    found: set[str] = set()
    shapes = recipe.shapes()
    for operation in recipe.operations:
        if isinstance(operation, Cast):
            wide = operation.to == WIDE
        else:
            wide = any(name in found for name in operation.inputs)
        if wide:
            found.update(name for name in operation.outputs if shapes[name])
    return frozenset(found)


class Program:
    """Collect the statements of a recipe.

    Features stand in buffers: the image, the output, or work memory. The scalars of a sample are local
    variables of type double.

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
        self.index = 0  # of the operation that is written
        self._shapes, self._wide = recipe.shapes(), wide_values(recipe)
        self._last_use = {
            name: i for i, op in enumerate(recipe.operations) for name in (*op.inputs, *op.outputs)
        }
        self._last_use[recipe.output] = len(recipe.operations)
        self._buffers: list[Buffer] = []
        self._values: dict[str, tuple[Buffer, int]] = {}
        self._stored: dict[tuple[str, str], Stored] = {}
        self._scalars: dict[str, str] = {}
        self._unread: set[str] = set()
        self._taken = set(reserved)
        self._new(INPUT).place = IMAGE

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
        return "double" if name in self._wide else "float"

    def suffix(self, name: str) -> str:
        """Return how the functions end that take a value."""
        return f"_{SUFFIX[self.ctype(name)]}"

    def width(self, name: str) -> int:
        """Return how many floats an entry of a value takes."""
        return 2 if name in self._wide else 1

    def read(self, name: str, offset: int = 0) -> str:
        """Return where a value, or its entry ``offset``, stands."""
        buffer, start = self._values[name]
        buffer.last = self.index
        return f"@{buffer.number}:{start + offset * self.width(name)}@"

    def write(self, name: str, *, over: str | None = None) -> str:
        """Return where a new value is to be written: over another one, if nobody needs that later."""
        if over is not None and self._is_free(over, name):
            self._share(name, *self._values[over])
        else:
            self._new(name)
        return self.read(name)

    def alias(self, name: str, source: str, offset: int = 0) -> None:
        """Let a new value stand where another one does, from its entry ``offset`` on."""
        self.read(source)
        buffer, start = self._values[source]
        self._share(name, buffer, start + offset * self.width(source))

    def _new(self, name: str) -> Buffer:
        size = self.count(name) * self.width(name)
        buffer = Buffer(len(self._buffers), size, self.index, self.index)
        self._buffers.append(buffer)
        self._share(name, buffer, 0)
        return buffer

    def _share(self, name: str, buffer: Buffer, start: int) -> None:
        buffer.values.append(name)
        self._values[name] = buffer, start

    def _is_free(self, name: str, other: str) -> bool:
        buffer, _ = self._values[name]
        later = any(self._last_use.get(value, -1) > self.index for value in buffer.values)
        reads = [x for x in self.recipe.operations[self.index].inputs if x in buffer.values]
        same = self.width(name) == self.width(other) and self.count(name) == self.count(other)
        return same and not later and len(reads) == 1 and buffer.place != IMAGE

    # -- scalars --------------------------------------------------------------------------------

    def scalar(self, name: str) -> str:
        """Return the variable of a scalar."""
        self._unread.discard(self._scalars[name])
        return self._scalars[name]

    def define(self, name: str, expression: str) -> str:
        """Declare the variable of a scalar; return it."""
        variable = self._scalars[name] = self.identifier(f"s_{name}")
        self._unread.add(variable)
        self.say(f"const double {variable} = {expression};")
        return variable

    def factor(self, expression: str, name: str) -> str:
        """Return a variable or a call as a factor of a value."""
        return expression if self.wide(name) else f"(float){expression}"

    # -- statements and arrays ------------------------------------------------------------------

    def say(self, *lines: str) -> None:
        """Append statements."""
        self.lines += lines

    def call(self, function: str, like: str, *arguments: str | int) -> None:
        """Append the call of a function that takes a value like ``like``."""
        self.say(f"{function}{self.suffix(like)}({', '.join(map(str, arguments))});")

    def identifier(self, name: str) -> str:
        """Return a name that C takes and that neither is taken nor begins one that is."""
        base = found = re.sub(r"\W", "_", name, flags=re.ASCII)
        count = 1
        while any(f"{taken}_".startswith(f"{found}_") for taken in self._taken):
            count += 1
            found = f"{base}_{count}"
        self._taken.add(found)
        return found

    def array(self, name: str) -> Array:
        """Return a constant of the recipe in float64."""
        return np.asarray(self.recipe.constants[name], np.float64)

    def keep(self, name: str, what: str, store: Callable[[str], Stored]) -> Stored:
        """Return a constant of the recipe as it is stored, once for every ``what``.

        Args:
            name: of the constant.
            what: how it is stored.
            store: takes the name of the array in C.
        """
        if (name, what) not in self._stored:
            self._stored[name, what] = stored = store(self.identifier(f"k_{name}"))
            self.constants += stored.constants
            self.rounded[name] = stored.values
        return self._stored[name, what]

    def weights(self, name: str, store: Callable[[str, Array, str], Stored], like: str) -> Stored:
        """Return weights that a value like ``like`` is multiplied with."""
        storage = "double" if self.wide(like) else self.proofs.storage
        what = f"{store.__name__} {storage}"
        return self.keep(name, what, lambda to: store(to, self.array(name), storage))

    def exact(self, name: str, ctype: str, shape: Shape | None = None) -> str:
        """Return the array of a constant that is not rounded further; ``shape``: write it out to that."""
        values = self.array(name)
        if shape is None or values.size == prod(shape):
            return self.keep(name, ctype, lambda to: kernel(to, values, ctype)).arguments
        written = plain(self.identifier(f"k_{name}"), np.broadcast_to(values, shape), ctype)
        self.constants.append(written)
        self.rounded[name] = as_type(values, ctype)
        return written.name

    def numbers(self, name: str, values: Sequence[int]) -> str:
        """Write whole numbers as an array; return its name."""
        constant = Constant(self.identifier(f"k_{name}"), "int32_t", np.array(values))
        self.constants.append(constant)
        return constant.name

    # -- the end --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Bring the result to the output, and mention the scalars that nobody reads."""
        self.index = len(self.recipe.operations)
        name = self.recipe.output
        buffer, start = self._values[name]
        count = self.count(name)
        if self.wide(name) or start or buffer.size != count or buffer.place == IMAGE:
            source = self.read(name)
            buffer = Buffer(len(self._buffers), count, self.index, self.index)
            self._buffers.append(buffer)
            call = "narrow({}, {}, {})" if self.wide(name) else "copy({}, 0, {}, 0, 1, {})"
            self.say(call.format(source, f"@{buffer.number}:0@", count) + ";")
        buffer.place = OUT
        self.say(*(f"(void){variable};" for variable in sorted(self._unread)))

    def placed(self) -> tuple[list[str], int]:
        """Return the statements with all places, and the floats of work memory.

        Buffers that are never needed at the same time share a place.
        """
        ends: dict[int, tuple[int, int]] = {}
        for buffer in self._buffers:
            if buffer.place is not None:
                continue
            taken = sorted(
                ends[other.number]
                for other in self._buffers[: buffer.number]
                if other.number in ends
                and other.first <= buffer.last
                and buffer.first <= other.last
            )
            start = 0
            for begin, end in taken:
                if start + buffer.size <= begin:
                    break
                start = max(start, end)
            ends[buffer.number] = start, start + buffer.size

        def place(match: re.Match[str]) -> str:
            buffer, offset = self._buffers[int(match[1])], int(match[2])
            if buffer.place is None:
                offset += ends[buffer.number][0]
            base = buffer.place or "work"
            return f"{base} + {offset}" if offset else base

        lines = [re.sub(r"@(\d+):(\d+)@", place, line) for line in self.lines]
        if not ends:
            lines.insert(0, "(void)work;")
        return lines, max([1, *(end for _, end in ends.values())])
