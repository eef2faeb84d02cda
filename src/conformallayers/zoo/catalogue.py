"""The shipped networks: one file of a fold each, whose notes are its record, a table of all, a card of each.

Importing this file does not import torch, so that commands find networks by name without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import refusal, shape_text
from ..recipe.file import read_file
from ..utils.text import Block, Printed, Table, count, markdown, size, suggest

if TYPE_CHECKING:
    from ..folding.folded import Folded

FOLDER = Path(__file__).with_name("networks")
ENDING = ".safetensors"
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


class RecordList(Printed, list[Record]):
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


def list_records() -> RecordList:
    """Return the records of all shipped networks, sorted by name; they print as a table.

    Examples:
        >>> import conformallayers as cl
        >>> [record.name for record in cl.zoo.list() if record.dataset == "digits"]
        ['digits-lenetcl', 'digits-micro']
        >>> cl.zoo.list()[0].input_shape
        (3, 32, 32)
    """
    return RecordList(read_record(path) for _, path in sorted(network_files().items()))


def load(name: str) -> Folded:
    """Load a trained network that ships with the package.

    It takes images of the data set's own shape, with pixels in [0, 1]. Subtracting the mean image,
    enlarging, padding and repeating channels are part of its fold.

    Args:
        name: of :func:`conformallayers.zoo.list`.

    Shape:
        (B, C, H, W) → (B, classes)

    Examples:
        >>> import conformallayers as cl, torch
        >>> net = cl.zoo.load("digits-micro")
        >>> net(torch.rand(5, 1, 8, 8)).shape
        torch.Size([5, 10])
        >>> cl.zoo.load("digits-mikro")
        Traceback (most recent call last):
        ...
        conformallayers.errors.ConformalError: zoo.load: expected one of ..., got 'digits-mikro'. cl.zoo.list() describes them. Did you mean "digits-micro"?
    """
    from ..folding.save import load as load_file

    return load_file(require(name, "zoo.load"))


def network_files() -> dict[str, Path]:
    """Return the files of all shipped networks by name."""
    return {path.stem: path for path in FOLDER.glob(f"*{ENDING}")}


def require(name: str, where: str, listing: str = "cl.zoo.list()") -> Path:
    """Return the file of a shipped network, or refuse a name that none has."""
    known = network_files()
    if name not in known:
        names = sorted(known)
        remedy = f"{listing} describes them.{suggest(str(name), names)}"
        raise refusal(where, f"one of {', '.join(names)}", repr(name), remedy)
    return known[name]


def read_record(path: Path) -> Record:
    """Return the record in the notes of a network's file."""
    stored = read_file(path)
    own = {"labels": stored.labels, "name": path.stem, "bytes": path.stat().st_size}
    known = {**(stored.about or {}), **own, "input_shape": stored.recipe.input_shape}
    return Record(**{field.name: known[field.name] for field in fields(Record)})
