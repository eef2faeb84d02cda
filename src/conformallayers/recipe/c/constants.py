"""The constants of a C program: arrays, and matrices of which only nonzero stretches are stored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..places import Array

ITEM_BYTES = {"float": 4, "double": 8, "int8_t": 1, "uint8_t": 1, "uint16_t": 2, "int32_t": 4}
_WIDTH = 94  # of lines without their margin

QUAD = """/* Four weights: sxtb16 widens the first and the third byte of a word, then the others. */
#ifdef __ARM_FEATURE_DSP
#define QUAD(a, b, c, d) a, c, b, d
#else
#define QUAD(a, b, c, d) a, b, c, d
#endif

"""


@dataclass(frozen=True, eq=False)
class Constant:
    """One array of a program.

    Args:
        name, ctype, values: its name, its type in C, and its numbers, flat.
        quads: whether it is written in groups of four, which the macro QUAD orders for the processor.
    """

    name: str
    ctype: str
    values: Array
    quads: bool = False

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        return ITEM_BYTES[self.ctype] * max(1, self.values.size)

    def text(self) -> str:
        """Return the definition in C; floats are hexadecimal, so no digit and no locale matters."""
        items = self.values.tolist() or [0]  # C has no empty arrays
        exact = self.ctype in ("float", "double")
        words = [f"{number(item, self.ctype) if exact else item}," for item in items]
        if self.quads:
            fours = [words[i : i + 4] for i in range(0, len(words), 4)]
            words = [f"QUAD({' '.join(four)[:-1]})," for four in fours]
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


def as_type(values: Array, ctype: str) -> Array:
    """Return values in the dtype of a type in C."""
    return values.astype({"float": np.float32, "double": np.float64}.get(ctype, np.int64))


def runs_of(matrix: Array) -> tuple[Array, Array, Array] | None:
    """Return the nonzero stretches of all rows, or None if they take more memory than the matrix.

    Returns:
        Their entries in one array, the number of stretches of each row, and start and length of each.
    """
    entries, counts, runs = [np.zeros(0)], [], []
    for row in matrix:
        places = np.flatnonzero(row)
        # One zero between two entries costs no more than a new run.
        stretches = np.split(places, np.flatnonzero(np.diff(places) > 2) + 1) if len(places) else []
        entries += [row[one[0] : one[-1] + 1] for one in stretches]
        counts.append(len(stretches))
        runs += [(one[0], one[-1] + 1 - one[0]) for one in stretches]
    values = np.concatenate(entries)
    taken = 4 * len(values) + 4 * len(runs) + 2 * len(counts)
    if taken >= 4 * matrix.size or matrix.shape[1] >= 2**16:
        return None
    return values, np.array(counts), np.array(runs, int).reshape(-1)
