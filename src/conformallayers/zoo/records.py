"""Records of the shipped networks: a table of all, a model card of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import shape_text
from ..utils.html import Block, Printed, Table
from ..utils.text import count, markdown, size

_HEADER = ("name", "data set", "accuracy", "multiply-adds", "parameters", "file")


@dataclass(frozen=True)
class Record:
    """The facts about a shipped network; ``print(record.card)`` shows them all.

    Args:
        name: for :func:`conformallayers.zoo.load`.
        dataset: it was trained on.
        accuracy: the share of the test images that the fold classifies correctly.
        multiply_adds: of the fold, for one image; as weights, by the strategies for typical machines.
        parameters: of the model.
        bytes: of the file.
        weights: constants of the fold.
        network: the class in :mod:`conformallayers.networks`, with its preset.
        input_shape: of one image; pixels are in [0, 1].
        labels: the name of every output.
        images: the number of test images.
        command, commit: of the training; the commit is None where it was not recorded.
        licence: of the weights.
        limits: which images the network is for.
    """

    name: str
    dataset: str
    accuracy: float
    multiply_adds: int
    parameters: int
    bytes: int
    weights: int
    network: str
    input_shape: tuple[int, ...]
    labels: tuple[str, ...]
    images: int
    command: str
    commit: str | None
    licence: str
    limits: str

    @property
    def card(self) -> str:
        """The model card, in Markdown."""
        facts = {
            "Network": self.network,
            "Data set": self.dataset,
            "Input": f"{shape_text(self.input_shape)}, pixels in [0, 1]",
            "Classes": ", ".join(self.labels),
            "Accuracy": f"{100 * self.accuracy:.2f} % of {self.images:,} test images",
            "Multiply-adds": f"{self.multiply_adds:,} for one image, folded",
            "Weights": f"{self.weights:,} folded, from {self.parameters:,} trained parameters",
            "File": f"{self.bytes:,} bytes",
            "Training": f"`{self.command}`",
            "Commit": self.commit or "not recorded",
            "Licence of the weights": self.licence,
            "Limits": self.limits,
        }
        rows = [[key, value.replace("|", "\\|")] for key, value in facts.items()]
        return f"# {self.name}\n\n{markdown(['', ''], rows)}"


class Records(Printed, list[Record]):
    """A list of records; prints as a table."""

    def _blocks(self) -> Iterator[Block]:
        rows = [
            [
                *(one.name, one.dataset, f"{100 * one.accuracy:.2f} %"),
                *(count(one.multiply_adds), count(one.parameters), size(one.bytes)),
            ]
            for one in self
        ]
        yield Table(_HEADER, rows)
