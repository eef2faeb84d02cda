"""Load models for the command line: folds of cl.save, run folders, checkpoints, and shipped networks.

Importing this file does not import torch, so that predictions by the numpy runtime start fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import checked_shape, refusal
from ...recipe.archive import open_archive
from ...recipe.file import read_notes
from ...utils.text import suggest
from ...zoo.catalogue import network_files
from ..data.catalogue import LABELS, SHAPES
from .own_networks import is_own

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ...folding.folded import Folded
    from ..data.sources import TrainingData
    from .config import TrainConfig

CHECKPOINT = "checkpoint.safetensors"
WHITE = 1.0  # the value of a white pixel, unless the file of a network has another
GREY = (1, 28, 28)  # the image shape, if the data set is unknown
_SPECS = "a file of cl.save, the folder of a run, a training checkpoint, or a name of the zoo"


@dataclass(frozen=True)
class Loaded:
    """A network and the notes in its file.

    Args:
        module: a :class:`Folded`, or a model in evaluation mode.
        path: of its file.
        labels: a name for every output, or None.
        about: notes of the file: network, dataset, epoch, white; of a network with an input of its own in_shape;
            of one that was trained on a folder of pictures its digest, pictures.
        config: of the training, if the network is that of a run.
    """

    module: nn.Module
    path: Path
    labels: tuple[str, ...] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    config: TrainConfig | None = None

    @property
    def dataset(self) -> str | None:
        """The data set of the training, if it is a known one."""
        name = self.about.get("dataset")
        return name if name in SHAPES or self.pictures is not None else None

    @property
    def pictures(self) -> str | None:
        """The digest of the folder of pictures that it was trained on, if it was."""
        digest = self.about.get("pictures")
        return digest if isinstance(digest, str) else None

    @property
    def native_shape(self) -> tuple[int, ...] | None:
        """The shape of one image as the network itself takes it; None if it is unknown."""
        from ...folding.folded import Folded
        from ..data.image_adapter import native_shape

        if isinstance(self.module, Folded):
            return self.module.input_shape
        noted = self.about.get("in_shape")
        if noted is None:
            return native_shape(self.module)
        return checked_shape(noted, f"{self.path}, in_shape")

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of one stored image; None if it is unknown."""
        from ..data.image_adapter import native_shape

        # Only networks of the package take stored images by way of from_images.
        if native_shape(self.module) is not None and self.dataset in SHAPES:
            return SHAPES[self.dataset]
        return self.native_shape

    @property
    def training(self) -> TrainingData:
        """The data set of the training, to find images to test the network on."""
        from ...networks import IMAGE_SHAPE
        from ..data.sources import TrainingData

        shape = self.native_shape or IMAGE_SHAPE
        return TrainingData(self.dataset, self.labels, self.pictures, shape)

    @property
    def white(self) -> float:
        """The value of a white pixel."""
        return white_of(self.about, self.path)

    @property
    def folds(self) -> bool:
        """Whether the module has ConformalLayers to fold."""
        from ...container import ConformalLayers
        from ...folding.folded import Folded

        parts = self.module.modules()
        folded = isinstance(self.module, Folded)
        return not folded and any(isinstance(part, ConformalLayers) for part in parts)


def locate(model: str | os.PathLike[str], command: str) -> Path:
    """Return the file of a model: the checkpoint of a run folder, another path, or else a network of the zoo."""
    name, path, shipped = os.fspath(model), Path(model), network_files()
    if path.is_dir():
        path = path / CHECKPOINT
    if path.is_file():
        if name in shipped:
            note = f"{command}: took {path}, not the network {name} of the zoo"
            print(f"conformallayers: {note}", file=sys.stderr)
        return path
    if name in shipped:
        return shipped[name]
    if os.path.isdir(model):
        got = f"a folder without {CHECKPOINT}"
        raise refusal(f"{command} {model}", _SPECS, got, "Name the file itself.")
    remedy = f"Check the path; conformallayers zoo lists the names.{suggest(name, shipped)}"
    raise refusal(f"{command} {model}", _SPECS, "no such file", remedy)


def load_model(model: str | os.PathLike[str], command: str, device: str = "cpu") -> Loaded:
    """Load a fold, or the network of a run, in evaluation mode."""
    path = locate(model, command)
    if path.name == CHECKPOINT:
        return _load_run(path, device)
    from ...folding.files import read_network

    archive = open_archive(path)
    module = read_network(archive).eval().to(device)
    labels, notes = read_notes(archive.document, None)
    return Loaded(module, path, labels, notes or {})


def _load_run(path: Path, device: str) -> Loaded:
    from . import checkpoint

    found = checkpoint.load(path)
    config, module = checkpoint.trained(found, device)
    about: dict[str, Any] = {"network": config.network_name, "dataset": config.dataset}
    about |= {"epoch": found.state.epoch, "white": WHITE}
    if is_own(config.network) or config.in_shape is not None:
        about["in_shape"] = list(config.input_shape)
    if config.pictures is not None:
        about["pictures"] = config.pictures
    labels = tuple(config.labels) if config.labels else LABELS.get(config.dataset)
    if labels is not None and len(labels) != config.classes:  # of another set of this name
        labels = None
    return Loaded(module.eval(), path, labels, about, config)


def ready(model: Loaded, command: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a fold, or a model with nothing to fold, and the shape of its images, as they are stored."""
    from ..data.image_adapter import from_images

    shape = _required_shape(model.shape, command)
    if model.folds:
        return fold_model(model, command), shape
    return from_images(model.module, shape, command), shape


def input_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype that a module computes in: a fold's own, or that of its first tensor of floats."""
    import torch

    from ...folding.folded import Folded

    if isinstance(module, Folded):
        return module.dtype
    tensors = (*module.parameters(), *module.buffers())
    return next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)


def fold_model(
    model: Loaded, command: str, shape: tuple[int, ...] | None = None, **options: Any
) -> Folded:
    """Fold a model for images of a shape, by default that of the training images; the fold has its notes."""
    from ...folding.fold import fold
    from ..data.image_adapter import from_images

    if not model.folds:
        got = f"{type(model.module).__name__} in {model.path}"
        remedy = "A fold cannot be folded again: --input-shape, --strategy and the like need the network itself. Layers alone have nothing to fold."
        raise refusal(command, "a network with ConformalLayers", got, remedy)
    shape = _required_shape(shape or model.shape, command)
    folded = fold(from_images(model.module, shape, command), shape, **options)
    folded.labels, folded.about = model.labels, dict(model.about) or None
    return folded


def _required_shape(shape: tuple[int, ...] | None, command: str) -> tuple[int, ...]:
    if shape is None:
        got, remedy = "none", "Give it to conformallayers fold: --input-shape 1 28 28."
        raise refusal(f"{command} --input-shape", "the shape of one sample", got, remedy)
    return shape


def white_of(about: Mapping[str, Any] | None, path: str | os.PathLike[str]) -> float:
    """Return the value of a white pixel from the notes of a file."""
    white = (about or {}).get("white", WHITE)
    if isinstance(white, bool) or not isinstance(white, (int, float)) or not white:
        raise refusal(f"{path}", "a number for white", repr(white), "Save it again.")
    return float(white)


def chosen_labels(
    file: Path | None, own: tuple[str, ...] | None, outputs: int, command: str, where: str
) -> tuple[str, ...] | None:
    """Return the lines of a text file, or else a network's own labels; refuse unless there is one for each output."""
    labels = own
    if file is not None:
        where = f"{command} --labels {file}"
        try:
            labels = tuple(file.read_text("utf-8").rstrip("\n").split("\n"))
        except UnicodeDecodeError as error:
            expected, remedy = "a text file, one label a line", "Save it as UTF-8."
            raise refusal(where, expected, "bytes that are no UTF-8", remedy) from error
    if labels is not None and len(labels) != outputs:
        remedy = "Give one name for every output, in their order."
        raise refusal(where, f"{outputs} labels", f"{len(labels)}", remedy)
    return labels
