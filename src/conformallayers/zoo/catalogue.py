"""List and load the shipped networks: one model file each, whose header has its record.

Importing this file does not import torch, so that commands find networks by name without it.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from ..errors import refusal
from ..recipe.archive import open_archive
from ..recipe.file import read_notes
from ..utils.text import suggest
from .records import Record, Records

if TYPE_CHECKING:
    from torch import nn

    from ..folding.folded import Folded

FOLDER = Path(__file__).with_name("networks")
ENDING = ".safetensors"


def list_records() -> Records:
    """Return the records of all shipped networks, sorted by name; they print as a table.

    Examples:
        >>> import conformallayers as cl
        >>> [record.name for record in cl.zoo.list() if record.dataset == "digits"]
        ['digits-lenetcl', 'digits-micro']
        >>> cl.zoo.list()[0].input_shape
        (3, 32, 32)
    """
    return Records(read_record(path) for _, path in sorted(network_files().items()))


@overload
def load(name: str, *, folded: Literal[True] = True) -> Folded: ...


@overload
def load(name: str, *, folded: Literal[False]) -> nn.Module: ...


def load(name: str, *, folded: bool = True) -> nn.Module:
    """Load a trained network that ships with the package.

    It takes images of the data set's own shape, with pixels in [0, 1]. Subtracting the mean image,
    enlarging, padding and repeating channels are layers of the network and part of its fold.

    Args:
        name: of :func:`conformallayers.zoo.list`.
        folded: False returns the model before folding, in evaluation mode, to train it further.

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
    from ..folding.files import read_network
    from ..folding.fold import fold
    from ..folding.folded import Folded

    path = require(name, "zoo.load")
    archive = open_archive(path)
    model = read_network(archive)
    if not folded or isinstance(model, Folded):
        return model
    result = fold(model, read_record(path).input_shape)
    result.labels, result.about = read_notes(archive.document, result.output_shape)
    return result


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
    """Return the record in the header of a network's file."""
    labels, about = read_notes(open_archive(path).document, None)
    known = {**(about or {}), "labels": labels, "name": path.stem, "bytes": path.stat().st_size}
    known["input_shape"] = tuple(known["input_shape"])
    return Record(**{field.name: known[field.name] for field in fields(Record)})
