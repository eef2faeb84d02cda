"""The report of ``cl.quantize``: errors and sizes of a fold in int8 against the fold in floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
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
        float_operations: names of operations that still compute with floats, without the last product.
    """

    images: int
    mean_error: float
    largest_error: float
    agreement: float
    float_bytes: int
    int8_bytes: int
    float_operations: tuple[str, ...] = ()

    def _blocks(self) -> Iterator[Block]:
        rows = [
            ["float", size(self.float_bytes), "0", "0", "100.00 %"],
            [
                "int8",
                size(self.int8_bytes),
                f"{self.mean_error:.2g}",
                f"{self.largest_error:.2g}",
                f"{100 * self.agreement:.2f} %",
            ],
        ]
        yield Table(["fold", "constants", "mean error", "largest error", "same class"], rows)
        yield f"relative errors of the outputs of the {self.images} images that set the scales"
        if self.float_operations:
            yield f"in floats: {', '.join(self.float_operations)}"

    def stored(self) -> dict[str, Any]:
        """Return the report as JSON values for the notes of a file."""
        return asdict(self) | {"float_operations": list(self.float_operations)}


def read_quantization(about: Mapping[str, Any] | None) -> Quantization | None:
    """Return the report in the notes of a file; None if there is none or it is malformed."""
    stored = (about or {}).get("quantization")
    if not isinstance(stored, Mapping) or set(stored) != {f.name for f in fields(Quantization)}:
        return None
    words = stored["float_operations"]
    numbers = [stored[name] for name in stored if name != "float_operations"]
    if not isinstance(words, (list, tuple)) or not all(
        isinstance(n, (int, float)) for n in numbers
    ):
        return None
    return Quantization(**{**stored, "float_operations": tuple(map(str, words))})
