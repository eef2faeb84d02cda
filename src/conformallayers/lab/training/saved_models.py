"""Load models for the command line: folds of cl.save, training runs, and networks of the zoo."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
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
from .config import TrainConfig, make_config
from .own_networks import is_own
from .run_folder import load_checkpoint

CHECKPOINT = "checkpoint.safetensors"
_SPECS = "a file of cl.save, the folder of a run, a training checkpoint, or a name of the zoo"


@dataclass(frozen=True)
class Loaded:
    """A fold, or the network of a training run."""

    module: nn.Module  # a Folded, or a model in evaluation mode
    path: Path
    labels: tuple[str, ...] | None
    about: Mapping[str, Any]  # network, dataset, epoch, white; pictures: the digest of its folder
    config: TrainConfig | None  # of a run

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one stored image, which a fold takes."""
        if self.config is None:
            return self.fold("").input_shape
        if self.config.in_shape is None and not is_own(self.config.network):
            return SHAPES.get(self.config.dataset, self.config.input_shape)
        return self.config.input_shape

    def fold(self, command: str, shape: tuple[int, ...] | None = None, **options: Any) -> Folded:
        """Fold the network of a run for images of a shape, by default the stored ones; keep a fold as it is."""
        if isinstance(self.module, Folded):
            return self.module
        shape, model = shape or self.shape, self.module
        if self.config is not None and not is_own(self.config.network):
            model = from_images(model, shape, self.config.input_shape, command)
        folded = fold(model, shape, **options)
        folded.labels, folded.about = self.labels, dict(self.about)
        return folded


def load_model(model: str | os.PathLike[str], command: str) -> Loaded:
    """Load a file, the checkpoint of a run folder, or else a network of the zoo, in evaluation mode."""
    name, given, shipped = os.fspath(model), Path(model), network_files()
    places = given / CHECKPOINT, given, shipped.get(name)
    path = next((place for place in places if place is not None and place.is_file()), None)
    if path is None:
        got = f"a folder without {CHECKPOINT}" if given.is_dir() else "no such file"
        remedy = f"Check the path; conformallayers zoo lists the names.{suggest(name, shipped)}"
        raise refusal(f"{command} {model}", _SPECS, got, remedy)
    if path.name != CHECKPOINT:
        folded = load(path)
        return Loaded(folded, path, folded.labels, folded.about or {}, None)
    found = load_checkpoint(path)
    config = make_config(**{**found.config, "device": "cpu"})
    module = config.build()
    found.restore(module)
    about: dict[str, Any] = {"network": config.network_name, "dataset": config.dataset}
    about |= {"epoch": len(found.history), "white": 1.0}  # the value of a white pixel
    if config.pictures is not None:
        about["pictures"] = config.pictures
    return Loaded(module.eval(), path, config.class_names, about, config)
