"""A C program under construction: statements, functions, arrays, and the memory of values.

Maps (C, ...) lie in memory with their channels last, which is what vectors and integer products read; the image
comes with its channels first. Products and constants of flattened maps are reordered when they are written.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from ..integer_operations import Quantize, QuantizePoint, integer_values
from ..places import Array
from ..recipe import INPUT, Operation, Recipe, Shape
from .constants import Constant, as_type
from .memory import Buffer, arrange
from .text import functions, helpers, indented

IMAGE, OUT, WORK, BYTES = "image", "out", "work", "bytes"  # arrays of the function in C
_FLOAT = 4  # bytes
SLACK = 7  # floats that loops over blocks of channels may read behind a map


@dataclass(frozen=True)
class Place:
    """Where a value lies.

    Args:
        buffer, start: its first entry.
        pitch: entries from one position to the next: the number of channels, or more for a slice of them.
        map: the (C, ...) whose channels come last in memory; None: entries lie in the order of the recipe.
    """

    buffer: Buffer
    start: int
    pitch: int
    map: Shape | None


class Program:
    """Collect the statements of a recipe.

    Features are in buffers: the image, the output, or work memory, where buffers of disjoint lifetimes share
    memory; ``finish`` places them. The scalars of a sample are local variables of type double.

    Args:
        recipe: its operations become statements, its constants arrays.
        name: of the functions, which no array may have.
        speed: whether functions are written for one shape each, or shared by all.
    """

    def __init__(self, recipe: Recipe, name: str, speed: bool = True) -> None:
        self.recipe, self.speed = recipe, speed
        self.lines: list[str] = []
        self.constants: list[Constant] = []
        self.functions: dict[str, str] = {}  # text → name
        self.multiply_adds = 0
        self.work_size = 0  # in floats
        self.index = 0  # of the operation that is written
        self.done: set[int] = set()  # operations that an earlier one has written along with itself
        self._shapes = recipe.shapes()
        self._int8 = set(integer_values(recipe.operations))
        self._last_use = {INPUT: 0, recipe.output: len(recipe.operations)}
        for i, names in enumerate(recipe.last_uses()):
            self._last_use.update(dict.fromkeys(names, i))
        self.readers: dict[str, list[int]] = {}
        for i, op in enumerate(recipe.operations):
            for value in op.inputs:
                self.readers.setdefault(value, []).append(i)
        self.buffers: list[Buffer] = []  # of work memory
        self._places: dict[str, Place] = {}
        self._parts: dict[str, tuple[str, int]] = {}  # value → whole map that has it, first channel
        self._arrays: dict[tuple[str, str, bytes], str] = {}
        self._scalars: dict[str, str] = {}
        ends = "predict", "predict_with", "predict_u8", "predict_u8_with", "self_test"
        self._taken = {f"{name}_{end}" for end in ends}
        image = Buffer(IMAGE, self.count(INPUT))
        self._put(INPUT, Place(image, 0, self.shape(INPUT)[0], None))

    # -- values ---------------------------------------------------------------------------------

    def shape(self, name: str) -> Shape:
        """Return the shape of a value."""
        return self._shapes[name]

    def count(self, name: str) -> int:
        """Return the number of entries of a value."""
        return prod(self._shapes[name])

    def is_int8(self, name: str) -> bool:
        """Tell whether the entries of a value are int8_t."""
        return name in self._int8

    def ctype(self, name: str) -> str:
        """Return the type of the entries of a value."""
        return "int8_t" if name in self._int8 else "float"

    @property
    def operation(self) -> Operation:
        """The operation that is written."""
        return self.recipe.operations[self.index]

    def available(self, name: str) -> bool:
        """Tell whether a value or a scalar has been written."""
        return name in self._places or name in self._scalars

    def place(self, name: str) -> Place:
        """Return where a value lies."""
        return self._places[name]

    def is_last(self, name: str) -> bool:
        """Tell whether the channels of a map come last; with one channel or position any order does."""
        shape = self.shape(name)
        any_order = 1 in (shape[0], prod(shape[1:])) and self.is_first(name)
        return any_order or self._places[name].map == shape

    def is_first(self, name: str) -> bool:
        """Tell whether a value lies in the order of the recipe."""
        place = self._places[name]
        return place.map is None or 1 in (place.map[0], prod(place.map[1:]))

    def is_dense(self, name: str) -> bool:
        """Tell whether the entries of a value lie side by side."""
        place = self._places[name]
        return place.map is None or place.pitch == place.map[0]

    def in_memory(self, name: str, array: Array) -> Array:
        """Bring an array that broadcasts to a value into the order of its memory; axes of size 1 stay."""
        shape, found = self.shape(name), self._places[name].map
        array = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
        if found is None:
            return array
        if len(shape) != len(found):  # a flattened map
            array = np.broadcast_to(array, shape).reshape(found)
        return np.moveaxis(array, 0, -1)

    def read(self, name: str, offset: int = 0) -> str:
        """Return the address of a value, or of its entry ``offset``."""
        base, index = self._entry(name, offset)
        return f"{base} + {index}"

    def entry(self, name: str, index: str) -> str:
        """Return an entry of a value; marks ``@buffer:offset@`` are replaced by ``finish``."""
        base, start = self._entry(name, 0)
        return f"{base}[{start} + {index}]"

    def _entry(self, name: str, offset: int) -> tuple[str, str]:
        place = self._places[name]
        if place.buffer.base != WORK:
            return place.buffer.base, str(place.start + offset)
        unit, base = (_FLOAT, BYTES) if name in self._int8 else (1, WORK)
        return base, f"@{self.buffers.index(place.buffer)}:{place.start + offset}:{unit}@"

    def write(self, name: str, *, over: str | None = None, last: bool = False) -> str:
        """Return the address of a new value: that of ``over``, if nothing reads ``over`` later.

        Args:
            name: of the value.
            over: a value of the same shape, whose order in memory it gets.
            last: whether its channels come last, if there is no ``over``.
        """
        shape = self.shape(name)
        order = self._places[over].map if over is not None else shape if last else None
        if over is not None and self._is_free(over, name):
            place = self._places[over]
            self._put(name, replace(place, map=order))
        elif name in self._parts and last:
            whole, channel = self._parts[name]
            if whole not in self._places:
                self.write(whole, last=True)
            found = self._places[whole]
            self._put(name, replace(found, start=found.start + channel, map=shape))
        else:
            self._put(name, Place(self._buffer(name, order), 0, (order or shape)[0], order))
        return self.read(name)

    def _buffer(self, name: str, order: Shape | None) -> Buffer:
        flat = order is None or 1 in (order[0], prod(order[1:]))
        if name == self.recipe.output and flat and name not in self._int8:
            return Buffer(OUT, self.count(name))
        size = self.count(name)
        size = -(-size // _FLOAT) if name in self._int8 else size
        self.buffers.append(Buffer(WORK, size, self.index))
        return self.buffers[-1]

    def scratch(self, size: int) -> str:
        """Return the address of floats that only the current operation needs."""
        self.buffers.append(Buffer(WORK, size, self.index, self.index))
        return f"{WORK} + @{len(self.buffers) - 1}:0:1@"

    def temporary(self, like: str) -> str:
        """Name a value of the same type and shape that only the current operation reads."""
        name = f"{like}.{len(self._shapes)}"
        self._shapes[name], self._last_use[name] = self.shape(like), self.index
        if like in self._int8:
            self._int8.add(name)
        return name

    def alias(self, name: str, source: str, start: int = 0) -> None:
        """Let a new value be part of another one, from an entry of its memory on."""
        place, shape = self._places[source], self.shape(name)
        order = place.map if place.map is None or len(shape) == 1 else shape
        pitch = shape[0] if order is None else place.pitch
        self._put(name, Place(place.buffer, place.start + start, pitch, order))

    def reshape(self, name: str, source: str) -> None:
        """Let a new value be another one, whose entries lie in the order of the recipe, in another shape."""
        place = self._places[source]
        self._put(name, replace(place, pitch=self.shape(name)[0], map=None))

    def part(self, name: str, whole: str, channel: int) -> None:
        """Let the operation that writes a value write it into a larger map, from a channel on."""
        self._parts[name] = whole, channel

    def _put(self, name: str, place: Place) -> None:
        place.buffer.values.append(name)
        place.buffer.last = max(place.buffer.last, self._last_use[name])
        self._places[name] = place

    def _is_free(self, name: str, other: str) -> bool:
        """Tell whether a value may be overwritten by another one while it is read."""
        buffer = self._places[name].buffer
        same = self.ctype(name) == self.ctype(other) and self.count(name) == self.count(other)
        later = [
            i for value in buffer.values for i in self.readers.get(value, ()) if i > self.index
        ]
        reads = [x for x in self.operation.inputs if x in buffer.values]
        unread = not (set(later) - self.done) and self.recipe.output not in buffer.values
        return same and unread and len(reads) <= 1 and buffer.base != IMAGE and self.is_dense(name)

    @property
    def reads_bytes(self) -> bool:
        """Whether only quantization reads the image, so that it may consist of bytes."""
        readers = [self.recipe.operations[i] for i in self.readers.get(INPUT, ())]
        kinds = Quantize, QuantizePoint
        return bool(readers) and all(isinstance(op, kinds) for op in readers)

    # -- scalars --------------------------------------------------------------------------------

    def scalar(self, name: str) -> str:
        """Return the variable of a scalar."""
        return self._scalars[name]

    def define(self, name: str, expression: str) -> str:
        """Declare the variable of a scalar; return it."""
        variable = self._scalars[name] = self.identifier(f"s_{name}")
        self.emit(f"const double {variable} = {expression};")
        return variable

    # -- statements, functions and arrays -------------------------------------------------------

    def emit(self, *lines: str) -> None:
        """Append statements."""
        self.lines += lines

    def function(self, name: str, text: str) -> str:
        """Return the name of a function, which is $name in its text; write it once."""
        if text not in self.functions:
            self.functions[text] = self.identifier(name)
        return self.functions[text]

    def template(self, template: str, name: str, words: dict[str, str]) -> str:
        """Return the name of a function of ``templates`` with its words replaced."""
        text = helpers()[template]
        for mark, word in words.items():
            text = text.replace(mark, word)
        return self.function(name, text)

    def identifier(self, name: str) -> str:
        """Return a C identifier that is not taken."""
        base = found = re.sub(r"\W", "_", name, flags=re.ASCII)
        count = 1
        while found in self._taken:
            count += 1
            found = f"{base}_{count}"
        self._taken.add(found)
        return found

    def constant(self, name: str) -> Array:
        """Return a constant of the recipe in float64."""
        return np.asarray(self.recipe.constants[name], np.float64)

    def array(self, name: str, values: Array, ctype: str = "float", *, quads: bool = False) -> str:
        """Append an array, once for equal ones; return its name. For ``quads`` see :class:`Constant`."""
        typed = as_type(np.ascontiguousarray(values).ravel(), ctype)
        key = name, ctype, typed.tobytes()
        if key not in self._arrays:
            self._arrays[key] = self.identifier(f"k_{name}")
            self.constants.append(Constant(self._arrays[key], ctype, typed, quads))
        return self._arrays[key]

    def finish(self) -> None:
        """Mark unused variables and place all buffers."""
        uses = Counter(re.findall(r"\bs_\w+", "\n".join(self.lines)))
        unread = sorted(name for name in self._scalars.values() if uses[name] == 1)
        self.emit(*(f"(void){variable};" for variable in unread))  # or compilers warn
        self.work_size = arrange(self.buffers) + SLACK
        lines = [re.sub(r"@(\d+):(\d+):(\d)@", self._placed, line) for line in self.lines]
        zeros = r"(\[)0 \+ |(?<=\w) \+ 0(?![\w.])"
        self.lines = [re.sub(zeros, lambda found: found[1] or "", line) for line in lines]

    def _placed(self, found: re.Match[str]) -> str:
        buffer, offset, unit = map(int, found.groups())
        return str(self.buffers[buffer].start * unit + offset)

    @cached_property
    def code(self) -> tuple[str, str]:
        """The functions that a finished program calls, and its statements as the body of a function."""
        text = "\n".join(self.lines)
        own = "\n".join(one.replace("$name", name) for one, name in self.functions.items())
        variables = sorted(set(re.findall(r"for \((\w) = ", text)))
        head = [f"int32_t {', '.join(variables)};"] if variables else []
        if re.search(rf"\b{BYTES}\b", text):
            head.insert(0, f"int8_t *const {BYTES} = (int8_t *){WORK};")
        elif not re.search(rf"\b{WORK}\b", text):
            head.append(f"(void){WORK};")
        sizes = self.count(INPUT), self.count(self.recipe.output)
        guard = [f"if (has_nan({IMAGE}, {sizes[0]}))", f"    return fill_nan({OUT}, {sizes[1]});"]
        body = indented([*head, *([] if self._int8 else guard), *self.lines])
        return f"{functions(f'{own} {body} has_nan() fill_nan() largest()')}\n{own}", body
