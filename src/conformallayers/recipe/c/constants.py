"""The constants of a C program: numbers, matrices with many zeros, symmetric forms; exact or rounded.

A matrix is stored row by row or, where that is shorter, as runs: the stretches of each row that are not
zero. Of a symmetric form the diagonal and the rows right of it are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
ITEM_BYTES = {
    "float": 4,
    "double": 8,
    "int8_t": 1,
    "int16_t": 2,
    "uint8_t": 1,
    "uint16_t": 2,
    "int32_t": 4,
}
SUFFIX = {"float": "f", "double": "d", "int8_t": "i", "int16_t": "s"}  # of functions in C
LEVELS = {"int8_t": 127, "int16_t": 32767}  # the largest whole number of a row
LARGEST_PLACE = 2**16 - 1  # that a run can start at or end before
_RUN_BYTES = 4  # start and length
_WIDTH = 94  # of lines without their margin


@dataclass(frozen=True, eq=False)
class Constant:
    """One array of a program: its name, the type in C, and the numbers, flat."""

    name: str
    ctype: str
    values: Array

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return ITEM_BYTES[self.ctype] * max(1, self.values.size)

    def text(self) -> str:
        """Return the definition in C; floats are hexadecimal, so no digit and no locale matters."""
        items = self.values.tolist() or [0]  # C has no empty arrays
        exact = self.ctype in ("float", "double")
        words = [f"{number(item, self.ctype) if exact else item}," for item in items]
        count = _WIDTH // (max(map(len, words)) + 1)  # in a line
        lines = [" ".join(words[i : i + count]) for i in range(0, len(words), count)]
        body = "\n".join(f"    {line}" for line in lines)
        return f"static const {self.ctype} {self.name}[{len(items)}] = {{\n{body}\n}};\n"


def number(value: float, ctype: str = "double") -> str:
    """Return an exact literal.

    Examples:
        >>> number(0.75, "float"), number(-3.0), number(0.0)
        ('0x1.8p-1f', '-0x1.8p+1', '0x0p+0')
    """
    digits, power = float(value).hex().split("p")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return f"{digits}p{power}" + ("f" if ctype == "float" else "")


@dataclass(frozen=True, eq=False)
class Stored:
    """A matrix, a kernel or a symmetric form as a program has it.

    Args:
        storage: the type of its numbers: "float", "double", or "int8_t" and "int16_t" with a scale
            for each row.
        runs: whether only stretches that are not zero are there.
        values: what the program computes with, in the shape of the constant; float64 where it is
            double.
        constants: its arrays.
        entries: how many numbers are stored.
    """

    storage: str
    runs: bool
    values: Array
    constants: tuple[Constant, ...]
    entries: int

    @property
    def arguments(self) -> str:
        """The arrays, as a function takes them."""
        return ", ".join(constant.name for constant in self.constants)

    @property
    def suffix(self) -> str:
        """How the name of a function ends that takes them."""
        return ("_runs_" if self.runs else "_") + SUFFIX[self.storage]


def quantised(rows: Array, storage: str = "int8_t") -> tuple[Array, Array]:
    """Return whole numbers, from −127 to 127 in int8, and what each row of them is multiplied with.

    Examples:
        >>> whole, scale = quantised(np.array([[0.5, -1.0, 0.0], [0.0, 0.0, 0.0]]))
        >>> whole.tolist(), bool(np.isclose(scale[0], 1 / 127)), float(scale[1])
        ([[64, -127, 0], [0, 0, 0]], True, 0.0)
    """
    flat = rows.reshape(len(rows), -1)
    levels = LEVELS[storage]
    scale = (np.abs(flat).max(1, initial=0) / levels).astype(np.float32)
    inverse = np.divide(1.0, scale, where=scale > 0, out=np.zeros(len(rows)))
    whole = np.clip(np.rint(flat * inverse[:, None]), -levels, levels)
    typed = whole.astype(np.int8 if storage == "int8_t" else np.int16)
    return typed.reshape(rows.shape), scale


def as_type(values: Array, ctype: str) -> Array:
    """Return values in the type that C has them in."""
    return values.astype(np.float32 if ctype == "float" else np.float64)


def kernel(name: str, values: Array, storage: str) -> Stored:
    """Return a kernel (channels, …) with all of its entries."""
    rounded, constants = _rounded(name, values, storage, None)
    return Stored(storage, False, rounded, constants, values.size)


def matrix(name: str, values: Array, storage: str) -> Stored:
    """Store a matrix (rows, columns) whole or as runs, whichever is shorter."""
    kept, index = _chosen(name, values != 0, np.ones(values.shape, bool), storage)
    rounded, constants = _rounded(name, values, storage, kept)
    return Stored(storage, bool(index), rounded, (*constants, *index), int(kept.sum()))


def form(name: str, values: Array, storage: str, mask: Array | None = None) -> Stored:
    """Store a symmetric matrix whole or as runs, whichever is shorter; its diagonal is never int8.

    Args:
        name: of its arrays.
        values: (n, n), symmetric.
        storage: of what is right of the diagonal.
        mask: (n, n), what may not be left out; None: whatever is not zero.
    """
    n = len(values)
    ctype = "double" if storage == "double" else "float"
    diagonal = Constant(f"{name}_diagonal", ctype, as_type(values.diagonal(), ctype))
    right = np.triu(np.ones((n, n), bool), 1)
    kept, index = _chosen(name, right & (values != 0 if mask is None else mask), right, storage)
    upper, constants = _rounded(name, np.where(kept, values, 0), storage, kept)
    whole = upper + upper.T
    np.fill_diagonal(whole, diagonal.values)
    constants = (diagonal, *constants, *index)
    return Stored(storage, bool(index), whole, constants, int(kept.sum()) + n)


def _chosen(
    name: str, mask: Array, every: Array, storage: str
) -> tuple[Array, tuple[Constant, ...]]:
    """Return the entries to store, and where their runs are if that is shorter than ``every`` entry."""
    kept, counts, pairs = _runs(mask, storage)
    item = ITEM_BYTES[storage]
    bytes_of_runs = item * int(kept.sum()) + _RUN_BYTES * len(pairs) + 2 * len(mask)
    if bytes_of_runs >= item * int(every.sum()) or mask.shape[1] > LARGEST_PLACE:
        return every, ()
    return kept, (
        Constant(f"{name}_runs", "uint16_t", counts),
        Constant(f"{name}_places", "uint16_t", pairs.reshape(-1)),
    )


def _rounded(
    name: str, values: Array, storage: str, kept: Array | None
) -> tuple[Array, tuple[Constant, ...]]:
    """Return the numbers as they are after rounding, and their arrays."""
    more: tuple[Constant, ...] = ()
    if storage in LEVELS:
        whole, scale = quantised(values, storage)
        rounded = whole.astype(np.float32) * scale.reshape(-1, *[1] * (values.ndim - 1))
        more = (Constant(f"{name}_scale", "float", scale),)
    else:
        whole = rounded = as_type(values, storage)
    items = whole.reshape(-1) if kept is None else whole[kept]
    return rounded, (Constant(name, storage, items), *more)


def _runs(mask: Array, storage: str) -> tuple[Array, Array, Array]:
    """Close gaps that cost less than a new run; return what is kept, runs per row, and the runs."""
    gap = _RUN_BYTES // ITEM_BYTES[storage]
    kept, counts, runs = mask.copy(), [], []
    for row in kept:
        places = np.flatnonzero(row)
        # A run begins at the first place and behind every gap that is too long to close.
        stretches = np.split(places, np.flatnonzero(np.diff(places) > gap + 1) + 1)
        found = [(line[0], line[-1] + 1 - line[0]) for line in stretches if len(line)]
        for start, length in found:
            row[start : start + length] = True
        counts.append(len(found))
        runs += found
    return kept, np.array(counts), np.array(runs, int).reshape(-1, 2)
