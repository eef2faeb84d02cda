"""The constants of a C program: numbers, sparse matrices, symmetric forms.

A matrix is stored row by row or, where that is shorter, as runs: the nonzero stretches of each row. Of a
symmetric form the diagonal and the rows right of it are stored.
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
    "uint8_t": 1,
    "uint16_t": 2,
    "int32_t": 4,
}
SUFFIX = {"float": "f", "double": "d"}  # of functions in C
LARGEST_PLACE = 2**16 - 1  # of the columns that a run can start at or end before
_RUN_BYTES = 4  # start and length
_WIDTH = 94  # of lines without their margin


@dataclass(frozen=True, eq=False)
class Constant:
    """One array of a program: its name, its type in C, and its numbers, flat."""

    name: str
    ctype: str
    values: Array

    @property
    def bytes(self) -> int:
        """Its size in memory."""
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
        storage: the type of its numbers, "float" or "double".
        runs: whether only nonzero stretches are stored.
        values: the rounded numbers that the program computes with, in the shape of the constant.
        constants: its arrays.
        entries: the number of stored numbers.
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
        """The end of the name of functions that take them."""
        return ("_runs_" if self.runs else "_") + SUFFIX[self.storage]


def as_type(values: Array, ctype: str) -> Array:
    """Return values in the dtype of a type in C."""
    return values.astype({"float": np.float32, "double": np.float64}.get(ctype, np.int64))


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
        storage: of the entries right of the diagonal.
        mask: (n, n), the entries to keep; None: those that are not zero.
    """
    n = len(values)
    ctype = "double" if storage == "double" else "float"
    diagonal = Constant(f"{name}_diagonal", ctype, as_type(values.diagonal(), ctype))
    right = np.triu(np.ones((n, n), bool), 1)
    kept, index = _chosen(name, right & (values != 0 if mask is None else mask), right, storage)
    upper, constants = _rounded(name, np.where(kept, values, 0), storage, kept)
    symmetric = upper + upper.T
    np.fill_diagonal(symmetric, diagonal.values)
    constants = (diagonal, *constants, *index)
    return Stored(storage, bool(index), symmetric, constants, int(kept.sum()) + n)


def _chosen(
    name: str, mask: Array, every: Array, storage: str
) -> tuple[Array, tuple[Constant, ...]]:
    """Return a mask of the entries to store, and their runs if these are shorter than ``every`` entry."""
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
    """Return the rounded numbers, and the array of those that are kept."""
    numbers = as_type(values, storage)
    items = numbers.reshape(-1) if kept is None else numbers[kept]
    return numbers, (Constant(name, storage, items),)


def _runs(mask: Array, storage: str) -> tuple[Array, Array, Array]:
    """Close gaps that cost less than a new run; return the mask, runs per row, and (start, length) of runs."""
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
