"""The networks that experiments 5 and 6 compare, and their training runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import ConformalError
from ...networks.stages import PRESETS
from ..checks import require_choice
from ..data.catalogue import CLASSES, LABELS
from ..training.config import NETWORK_OPTIONS, TrainConfig, make_config
from ..training.recipes import recipe, resolved
from ..training.runs import CONFIG, RESULT

RECIPE = "modern"
# The ablation: depths of a stage with the rectifiers that are trained at this depth.
ABLATION = {1: ("norm", "relu"), 2: ("norm", "relu", "abs", "max"), 3: ("norm", "relu")}
# Options of StageNet's recipe that every network trains with.
_BUDGET = ("epochs", "batch_size", "flips", "shift")


@dataclass(frozen=True)
class Contestant:
    """A network with its options, and its name in tables."""

    name: str
    network: str
    options: Mapping[str, Any] = field(default_factory=dict)
    ablation: bool = False


def _front() -> Iterator[Contestant]:
    for name in ("MLP", "LeNet", "LeNetCL", "ResNet8"):
        yield Contestant(name, name)
    for preset in PRESETS:
        yield Contestant(f"StageNet-{preset}", "StageNet", {"preset": preset})
        for pool in ("average", "max"):
            twin = f"StageReLUNet-{preset}-{pool}"
            options = {"preset": preset, "pool": pool}
            yield Contestant(twin, "StageReLUNet", options)
            yield Contestant(f"{twin}-depth1", "StageReLUNet", {**options, "depth": 1})


def _ablation() -> Iterator[Contestant]:
    micro = {"preset": "micro"}
    for depth, rectifiers in ABLATION.items():
        for rectifier in rectifiers:
            for respro in (True, False):
                name = f"StageNet-micro-depth{depth}-{rectifier}{'' if respro else '-no-respro'}"
                options = {**micro, "depth": depth, "rectifier": rectifier, "respro": respro}
                yield Contestant(name, "StageNet", options, ablation=True)
    name, options = "StageNet-micro-no-offset", {**micro, "offset": "none"}
    yield Contestant(name, "StageNet", options, ablation=True)


CONTESTANTS = {one.name: one for one in (*_front(), *_ablation())}


def named(where: str, names: Sequence[str]) -> list[Contestant]:
    """Return contestants by their names."""
    for name in names:
        require_choice(where, name, CONTESTANTS, "Name one of them.")
    return [CONTESTANTS[name] for name in names]


def config_of(
    contestant: Contestant, dataset: str, seed: int, epochs: int | None = None, **runtime: Any
) -> TrainConfig:
    """Return the training options of a contestant.

    Epochs, batch size and moves of the images are those of StageNet's recipe for all; each keeps the learning rate and
    the weight decay of its own recipe.

    Examples:
        >>> config = config_of(CONTESTANTS["ResNet8"], "cifar10", seed=1)
        >>> stage = config_of(CONTESTANTS["StageNet-micro"], "cifar10", seed=1)
        >>> config.learning_rate == stage.learning_rate, config.epochs == stage.epochs
        (True, True)
    """
    network = contestant.network
    stage = recipe(RECIPE, "StageNet", dataset)
    shared: dict[str, Any] = {name: stage[name] for name in _BUDGET if name in stage}
    shared["recipe"] = RECIPE
    if epochs is not None:
        shared["epochs"] = epochs
    own = {"network": network, "dataset": dataset, "seed": seed, **contestant.options, **runtime}
    classes = len(LABELS.get(dataset, range(CLASSES)))
    return make_config(**resolved({**shared, **own}), classes=classes)


def identity(config: TrainConfig) -> str:
    """Return the options that determine the result of a run, as JSON with every default spelt out."""
    # The network itself knows its defaults; on the meta device it has no weights to draw.
    with torch.device("meta"):
        model: Any = config.build()
    network = model.network if config.centre else model
    options = config.model_dump(exclude={*NETWORK_OPTIONS, "recipe", "threads", "device"})
    return json.dumps([network.arguments, options], sort_keys=True)


class Runs:
    """The finished training runs in a folder, found by their options."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[str, Path] = {}
        for path in sorted(folder.glob(f"*/{RESULT}")):
            try:
                config = make_config(**json.loads((path.parent / CONFIG).read_text("utf-8")))
            except (ConformalError, OSError, ValueError, TypeError):
                continue  # a run of another version
            self._found.setdefault(identity(config), path.parent)

    def find(self, config: TrainConfig) -> Path | None:
        """Return the folder of the finished run with these options."""
        return self._found.get(identity(config))
