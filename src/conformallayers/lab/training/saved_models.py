"""Load models for the command line: folds of cl.save, training runs, and networks of the zoo."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import refusal
from ...folding.fold import fold
from ...folding.folded import Folded
from ...folding.save import load
from ...utils.text import suggest
from ...zoo.catalogue import network_files
from ..data.batches import from_images
from ..data.catalogue import SHAPES
from .config import TrainConfig
from .run_folder import load_checkpoint

CHECKPOINT = "checkpoint.safetensors"
_SPECS = "a file of cl.save, the folder of a run, a training checkpoint, or a name of the zoo"


@dataclass(frozen=True)
class Loaded:
    """A fold, or the network of a training run."""

    module: nn.Module  # a Folded, or a model in evaluation mode
    path: Path
    labels: tuple[str, ...] | None = None
    about: Mapping[str, Any] = field(
        default_factory=dict
    )  # network, dataset, epoch, white; pictures: the digest of its folder
    config: TrainConfig | None = None  # of a run

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one stored image, which a fold takes."""
        if self.config is None:
            shape: tuple[int, ...] = self.fold("").input_shape
            return shape
        if self.config.in_shape is None and not self.config.is_own:
            return SHAPES.get(self.config.dataset, self.config.input_shape)
        return self.config.input_shape

    def fold(self, command: str, shape: tuple[int, ...] | None = None, **options: Any) -> Folded:
        """Fold the network of a run for images of a shape, by default the stored ones; keep a fold as it is."""
        if isinstance(self.module, Folded):
            if shape is not None or options:
                remedy = "It is folded already: leave --shape, --strategy and --dtype out."
                raise refusal(command, "a training run", f"the fold {self.path}", remedy)
            return self.module
        shape = shape or self.shape
        model = self.module
        if self.config is not None and not self.config.is_own:
            model = from_images(model, shape, self.config.input_shape, command)
        folded = fold(model, shape, **options)
        folded.labels, folded.about = self.labels, dict(self.about)
        return folded


def locate(model: str | os.PathLike[str], command: str) -> Path:
    """Return the file of a model: the checkpoint of a run folder, another path, or else a network of the zoo."""
    name, path, shipped = os.fspath(model), Path(model), network_files()
    for found in (path / CHECKPOINT, path, shipped.get(name)):
        if found is not None and found.is_file():
            return found
    got = f"a folder without {CHECKPOINT}" if path.is_dir() else "no such file"
    remedy = f"Check the path; conformallayers zoo lists the names.{suggest(name, shipped)}"
    raise refusal(f"{command} {model}", _SPECS, got, remedy)


def load_model(model: str | os.PathLike[str], command: str) -> Loaded:
    """Load a fold, or the network of a run, in evaluation mode."""
    path = locate(model, command)
    if path.name == CHECKPOINT:
        return _load_run(path)
    folded = load(path)
    return Loaded(folded, path, folded.labels, folded.about or {})


def _load_run(path: Path) -> Loaded:
    found = load_checkpoint(path)
    config, module = found.network()
    about: dict[str, Any] = {"network": config.network_name, "dataset": config.dataset}
    about |= {"epoch": len(found.history), "white": 1.0}  # the value of a white pixel
    if config.pictures is not None:
        about["pictures"] = config.pictures
    return Loaded(module.eval(), path, config.class_names, about, config)


def chosen_labels(
    file: Path | None, own: tuple[str, ...] | None, outputs: int, where: str
) -> tuple[str, ...] | None:
    """Return the lines of a text file, or else a network's own labels; refuse unless there is one for each output."""
    labels = own if file is None else tuple(file.read_text("utf-8", errors="replace").splitlines())
    if labels is not None and len(labels) != outputs:
        remedy = "Give one name for every output, in their order."
        where = str(file or where)
        raise refusal(where, f"{outputs} labels", f"{len(labels)}", remedy)
    return labels
