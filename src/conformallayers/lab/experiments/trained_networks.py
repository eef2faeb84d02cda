"""The networks that experiments 5 and 6 compare, and their training runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...networks.stages import PRESETS
from ..checks import require_choice
from ..data.catalogue import CLASSES, LABELS
from ..training.config import TrainConfig, make_config
from ..training.presets import preset_options, resolved

PRESET = "modern"
# The ablation: depths of a stage with the rectifiers that are trained at this depth.
ABLATION = {1: ("norm", "relu"), 2: ("norm", "relu", "abs", "max"), 3: ("norm", "relu")}
# Options of StageNet's preset that every network trains with.
_BUDGET = ("epochs", "batch_size", "flips", "shift")


@dataclass(frozen=True)
class Trained:
    """A network with its options, and its name in tables."""

    name: str
    network: str
    options: Mapping[str, Any] = field(default_factory=dict)
    ablation: bool = False

    def folder(self, runs: Path, dataset: str, seed: int) -> Path:
        """Return the folder of its run."""
        return runs / f"{self.name}-{dataset}-seed{seed}"


def _networks() -> Iterator[Trained]:
    for name in ("MLP", "LeNet", "LeNetCL", "ResNet8"):
        yield Trained(name, name)
    for preset in PRESETS:
        yield Trained(f"StageNet-{preset}", "StageNet", {"preset": preset})
        for pool in ("average", "max"):
            twin = {"preset": preset, "pool": pool}
            yield Trained(f"StageReLUNet-{preset}-{pool}", "StageReLUNet", twin)
    micro: dict[str, Any] = {"preset": "micro"}
    for depth, rectifiers in ABLATION.items():
        for rectifier in rectifiers:
            for respro in (True, False):
                name = f"StageNet-micro-depth{depth}-{rectifier}{'' if respro else '-no-respro'}"
                options = {**micro, "depth": depth, "rectifier": rectifier, "respro": respro}
                yield Trained(name, "StageNet", options, ablation=True)
    options = {**micro, "offset": "none"}
    yield Trained("StageNet-micro-no-offset", "StageNet", options, ablation=True)


NETWORKS = {one.name: one for one in _networks()}


def named(where: str, names: Sequence[str]) -> list[Trained]:
    """Return networks by their names."""
    for name in names:
        require_choice(where, name, NETWORKS, "Name one of them.")
    return [NETWORKS[name] for name in names]


def config_of(
    one: Trained, dataset: str, seed: int, epochs: int | None = None, **runtime: Any
) -> TrainConfig:
    """Return the training options of a network.

    Epochs, batch size and moves of the images are those of StageNet's preset for all; each keeps the learning rate and
    the weight decay of its own preset.

    Examples:
        >>> config = config_of(NETWORKS["ResNet8"], "cifar10", seed=1)
        >>> stage = config_of(NETWORKS["StageNet-micro"], "cifar10", seed=1)
        >>> config.learning_rate == stage.learning_rate, config.epochs == stage.epochs
        (True, True)
    """
    stage = preset_options(PRESET, "StageNet", dataset)
    shared: dict[str, Any] = {name: stage[name] for name in _BUDGET if name in stage}
    shared["training_preset"] = PRESET
    if epochs is not None:
        shared["epochs"] = epochs
    own = {"network": one.network, "dataset": dataset, "seed": seed, **one.options, **runtime}
    classes = len(LABELS.get(dataset, range(CLASSES)))
    return make_config(**resolved({**shared, **own}), classes=classes)
