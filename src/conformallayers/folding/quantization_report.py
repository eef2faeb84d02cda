"""The report of ``cl.quantize``: errors and sizes of a fold in int8 against the fold in floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..utils.html import Block, Printed, Table
from ..utils.text import size


@dataclass(frozen=True, repr=False)
class Quantization(Printed):
    """Errors and sizes of a fold in int8; prints as a table.

    Attributes:
        images: the number of images for calibration and measurement.
        mean_error, largest_error: relative errors of the outputs against those of the fold in floats.
        agreement: share of images with the same largest output.
        float_bytes, int8_bytes: of all constants.
    """

    images: int
    mean_error: float
    largest_error: float
    agreement: float
    float_bytes: int
    int8_bytes: int

    def _blocks(self) -> Iterator[Block]:
        errors = f"{self.mean_error:.2g}", f"{self.largest_error:.2g}"
        rows = [
            ["float", size(self.float_bytes), "0", "0", "100.00 %"],
            ["int8", size(self.int8_bytes), *errors, f"{100 * self.agreement:.2f} %"],
        ]
        yield Table(["fold", "constants", "mean error", "largest error", "same class"], rows)
        yield f"relative errors of the outputs of the {self.images} images that set the scales"


def read_quantization(about: Mapping[str, Any] | None) -> Quantization | None:
    """Return the report in the notes of a file; None if there is none or it is malformed."""
    stored = (about or {}).get("quantization")
    names = {item.name for item in fields(Quantization)}
    if not isinstance(stored, Mapping) or set(stored) != names:
        return None
    numbers = all(isinstance(value, (int, float)) for value in stored.values())
    return Quantization(**stored) if numbers else None
