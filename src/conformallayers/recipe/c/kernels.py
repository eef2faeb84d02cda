"""Convolutions and products with matrices, written for speed: one function for each shape.

A tile of sums, some positions by blocks of eight channels, stays in registers while its windows are read. The
inner loops run over the channels of a block, which compilers turn into vectors without reordering a sum. Sizes are
literals. Rows of padded maps are copied with their zeros, so that no loop over a window has a branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod

import numpy as np

from ..places import Array
from ..recipe import Shape

LANES = 8  # channels of a block
_SUMS = 12  # vectors of sums in a tile; most machines have 16 registers
Axis = tuple[
    int, int, int, int, int, int
]  # sizes of input, output, kernel; stride, padding, dilation


@dataclass(frozen=True)
class Windows:
    """The windows that a convolution reads from a map with channels last, over three axes.

    Args:
        axes: see :data:`Axis`; a negative padding crops.
        channels: of a window.
        pitch: entries from one position of the input to the next.
        groups: of channels.
        outputs: of each group.
        to: entries from one position of the result to the next, along each axis.
    """

    axes: tuple[Axis, Axis, Axis]
    channels: int
    pitch: int
    groups: int
    outputs: int
    to: tuple[int, int, int]

    @property
    def depthwise(self) -> bool:
        """Whether every channel has one kernel of its own."""
        return self.groups > 1 and self.channels == self.outputs == 1

    @property
    def steps(self) -> tuple[int, int, int]:
        """The entries from one position of the input to the next, along each axis."""
        _, (rows, *_), (columns, *_) = self.axes
        return rows * columns * self.pitch, columns * self.pitch, self.pitch

    @property
    def positions(self) -> Shape:
        """The sizes of the result."""
        return tuple(axis[1] for axis in self.axes)

    @property
    def taps(self) -> int:
        """The products of each sum."""
        return prod(axis[2] for axis in self.axes) * self.channels

    @property
    def is_padded(self) -> bool:
        """Whether some window reaches beyond the map."""
        return any(map(is_padded, self.axes))

    @property
    def row(self) -> int:
        """The entries that the windows of a row of results cover."""
        return reach(self.axes[2]) * self.pitch

    def loops(self) -> tuple[list[tuple[int, int]], int]:
        """Return loops over a window as (count, step), and how many entries lie side by side in them."""
        (_, _, a, _, _, over), (_, _, b, _, _, down), (_, _, c, _, _, across) = self.axes
        outer = [(a, over * self.steps[0]), (b, down * self.steps[1])]
        if self.is_padded:
            outer = [(a * b, self.row)]
        if self.groups == 1 and (c == 1 or (across == 1 and self.pitch == self.channels)):
            return outer, c * self.channels
        return [*outer, (c, across * self.pitch)], self.channels


def reach(axis: Axis) -> int:
    """Return how many positions the windows along an axis cover."""
    _, m, k, stride, _, dilation = axis
    return (m - 1) * stride + dilation * (k - 1) + 1


def is_padded(axis: Axis) -> bool:
    """Tell whether some window along an axis reaches beyond the map."""
    return axis[4] > 0 or reach(axis) - axis[4] > axis[0]


@dataclass
class Epilogue:
    """What happens to a sum v before it is written: statements of v, and the parameters that they read."""

    statements: list[str] = field(default_factory=list)  # {c}: the channel, {i}: the entry of y
    parameters: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)


def tile(columns: int, blocks: int, most: int = _SUMS) -> tuple[int, int]:
    """Return the positions and the blocks of a tile: the fastest of those that registers hold.

    Examples:
        >>> tile(32, 2), tile(5, 6), tile(1, 10)
        ((4, 2), (5, 2), (1, 10))
    """

    def cycles(p: int, c: int) -> float:  # for one tap: arithmetic, loads, and the latency of a sum
        return max(p * c / 2, (p + c) / 2, 4)

    def time(choice: tuple[int, int]) -> tuple[float, int]:
        p, c = choice
        whole, rest = divmod(columns, p)
        return (whole * cycles(p, c) + (1.1 * cycles(rest, c) if rest else 0)) / c, p * c

    sizes = range(1, most + 1)
    fitting = [(p, c) for p in sizes for c in sizes if p * c <= most and p <= min(columns, 8)]
    return min((one for one in fitting if blocks % one[1] == 0), key=time)


def in_blocks(weight: Array) -> Array:
    """Order a kernel (groups, outputs, taps) by blocks of outputs, each block tap by tap.

    The last block has four outputs if those suffice; zeros fill it.
    """
    groups, outputs, _ = weight.shape
    parts = [np.zeros((groups, 0))]
    for start in range(0, outputs, LANES):
        block = weight[:, start : start + LANES].swapaxes(1, 2)
        missing = _lanes(block.shape[2]) - block.shape[2]
        parts.append(np.pad(block, ((0, 0), (0, 0), (0, missing))).reshape(groups, -1))
    return np.concatenate(parts, axis=1)


def _lanes(count: int) -> int:
    return 4 if count <= 4 else LANES


class Lines:
    """The lines of a function with nested loops."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.variables = {"n"}

    @contextmanager
    def loop(self, variable: str, count: int, step: int = 1) -> Iterator[str]:
        """Write a loop; yield its variable, or 0 without a loop if there is one step."""
        if count <= step:
            yield "0"
            return
        self.variables.add(variable)
        more = f"{variable}++" if step == 1 else f"{variable} += {step}"
        with self.block(f"for ({variable} = 0; {variable} < {count}; {more}) "):
            yield variable

    @contextmanager
    def nest(self, variables: str, counts: Sequence[int]) -> Iterator[list[str]]:
        """Write nested loops; yield their variables."""
        with ExitStack() as stack:
            yield [
                stack.enter_context(self.loop(*one)) for one in zip(variables, counts, strict=True)
            ]

    @contextmanager
    def block(self, head: str = "") -> Iterator[None]:
        """Write braces."""
        self.lines.append(head + "{")
        yield
        self.lines.append("}")


def total(*terms: str | int | tuple[str, int]) -> str:
    """Return a sum in C of expressions, numbers, and products (expression, step), without zeros.

    Examples:
        >>> total("x", ("r", 16), ("0", 4), "c", 2, -3)
        'x + r * 16 + c - 1'
        >>> total(("r - 1", 16), ("c", 0))
        '(r - 1) * 16'
    """
    found, number = [], 0
    for term in terms:
        name, step = term if isinstance(term, tuple) else (term, 1)
        if isinstance(name, int) or name.lstrip("-").isdigit():
            number += int(name) * step
        elif step == 1:
            found.append(name)
        elif step:
            found.append(f"({name}) * {step}" if " " in name else f"{name} * {step}")
    if not found:
        return str(number)
    return " + ".join(found) + (f" + {number}" if number > 0 else f" - {-number}" if number else "")


def conv_lines(windows: Windows, epilogue: Epilogue, title: str, speed: bool) -> list[str]:
    """Return a function (x, w, b, y, ...) of sums of products over windows."""
    text = Lines()
    (depth, rows, columns), source = windows.positions, "x"
    groups, outputs = windows.groups, windows.outputs
    if windows.depthwise:  # all channels side by side
        groups, outputs = 1, groups
    with text.loop("z", depth) as z, text.loop("r", rows) as r:
        if windows.is_padded:
            source = "rows"
            text.lines.append(_copy_rows(windows, z, r))
        else:
            steps = [axis[3] * step for axis, step in zip(windows.axes, windows.steps, strict=True)]
            cropped = sum(
                -axis[4] * step for axis, step in zip(windows.axes, windows.steps, strict=True)
            )
            source = total("x", (z, steps[0]), (r, steps[1]), cropped)
        with text.loop("g", groups) as g:
            source = total(source, (g, windows.channels))
            to = total((z, windows.to[0]), (r, windows.to[1]), (g, outputs))
            for first, blocks, lanes, count in _blocks(outputs):
                size, width = tile(columns, blocks, _SUMS if speed else 1)
                weights = total("w", (g, windows.taps * _stored(outputs)), first * windows.taps)
                part = _Tile(windows, width, lanes, count, epilogue)
                with text.loop("o", blocks * lanes, width * lanes) as o:
                    for start, stop, positions in _strips(columns, size):
                        with text.loop("c", stop - start, positions) as c, text.block():
                            column, channel = total(c, start), total(o, first)
                            k = total(weights, (o, windows.taps))
                            part.write(text, positions, k, source, column, channel, to, g)
    parameters = ["const float *x", "const float *w", "const float *b", "float *y"]
    parameters += ["float *rows"] * windows.is_padded + epilogue.parameters
    head = [f"/* {title} */", f"static void $name({', '.join(parameters)})", "{"]
    return [*head, f"int32_t {', '.join(sorted(text.variables))};", *text.lines, "}"]


def _blocks(outputs: int) -> list[tuple[int, int, int, int]]:
    """Return the first output, the number of blocks, their lanes, and the lanes that are written."""
    whole, rest = divmod(outputs, LANES)
    found = [(0, whole, LANES, LANES)] if whole else []
    return [*found, (whole * LANES, 1, _lanes(rest), rest)] if rest else found


def _stored(outputs: int) -> int:
    """Return the outputs of all blocks, with those that are not written."""
    return sum(blocks * lanes for _, blocks, lanes, _ in _blocks(outputs))


def _strips(columns: int, size: int) -> list[tuple[int, int, int]]:
    """Return the first column, the end, and the positions of tiles."""
    whole, rest = columns - columns % size, columns % size
    return [(0, whole, size), (whole, columns, rest)] if rest else [(0, whole, size)]


def _copy_rows(windows: Windows, z: str, r: str) -> str:
    """Return the call that copies the rows which the windows of a row of results read."""
    (n, _, a, s, p, d), (m, _, b, t, q, e), (width, *_, across, _) = windows.axes
    before, skipped = max(across, 0) * windows.pitch, max(-across, 0) * windows.pitch
    other = windows.pitch - windows.groups * windows.channels  # behind those of the last position
    kept = max(0, min(width * windows.pitch - other - skipped, windows.row - before))
    planes = f"{total((z, s), -p)}, {a}, {d}, {n}, {windows.steps[0]}"
    rows = f"{total((r, t), -q)}, {b}, {e}, {m}, {windows.steps[1]}"
    ends = f"{before}, {kept}, {windows.row - before - kept}"
    return f"copy_rows({total('x', skipped)}, rows, {planes}, {rows}, {ends});"


@dataclass(frozen=True)
class _Tile:
    """Sums of some positions and blocks of channels.

    Args:
        windows: that are read.
        blocks: of channels.
        lanes: channels of a block.
        count: channels of a block that are written.
        epilogue: of each sum.
    """

    windows: Windows
    blocks: int
    lanes: int
    count: int
    epilogue: Epilogue

    def write(
        self,
        text: Lines,
        positions: int,
        weights: str,
        source: str,
        column: str,
        channel: str,
        to: str,
        group: str,
    ) -> None:
        """Append zeros, the loops over a window, and the results; all but ``positions`` are expressions."""
        windows, lanes = self.windows, self.lanes
        step = windows.axes[2][3] * windows.pitch
        sums = [(p, b) for p in range(positions) for b in range(self.blocks)]
        own = channel if windows.depthwise else "0"
        text.lines += [
            f"const float *k = {weights}, *line = {total(source, (column, step), own)};",
            f"float {', '.join(f'a{p}{b}[{lanes}]' for p, b in sums)};",
            *(f"EACH({lanes}) a{p}{b}[n] = 0;" for p, b in sums),
        ]
        with self._window(text) as offset:
            for p, b in sums:
                near = total(offset, p * step + (b * lanes if windows.depthwise else 0))
                weight = total("k", b * lanes * windows.taps)
                count = self.count if windows.depthwise else lanes
                text.lines.append(f"ADD({count}, a{p}{b}, {weight}, line[{near}]);")
            text.lines.append(f"k += {lanes};")
        place = total(to, channel, (column, windows.to[2]))
        text.lines.append(f"float *const to = y + {place};")
        for p, b in sums:
            c = total((group, windows.outputs), channel, b * lanes, "n")
            i = total(place, p * windows.to[2] + b * lanes, "n")
            near = total("n", p * windows.to[2] + b * lanes)
            found = f"a{p}{b}[n] + b[{c}]"
            if not self.epilogue.statements:
                text.lines.append(f"EACH({self.count}) to[{near}] = {found};")
                continue
            words = [word.format(c=c, i=i) for word in self.epilogue.statements]
            with text.block(f"EACH({self.count}) "):
                text.lines += [f"float v = {found};", *words, f"to[{near}] = v;"]

    @contextmanager
    def _window(self, text: Lines) -> Iterator[str]:
        """Write the loops over a window; yield the offset of an entry."""
        nested, run = self.windows.loops()
        nested = [(1, 0)] * (3 - len(nested)) + nested
        (a, over), (b, down), (c, across) = nested
        run = 1 if self.windows.depthwise else run
        with text.nest("hije", (a, b, c, run)) as (h, i, j, e):
            entry = "n" if self.windows.depthwise else e
            yield total((h, over), (i, down), (j, across), entry)
