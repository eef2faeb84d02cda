"""Networks of the benchmark, by name or from files, with their known accuracies."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from torch import nn

from ... import networks
from ...errors import checked_shape, refusal, shape_text
from ...folding.folded import Folded
from ...networks.stages import PRESETS
from ...zoo.catalogue import network_files
from ..checks import require_choice
from ..data.image_adapter import from_images
from ..training.runs import RESULT
from ..training.saved_models import CHECKPOINT, Loaded, load_model
from .contestants import CONTESTANTS, RECIPE
from .deployed import merged
from .records import grouped, read_record, read_rows

DATASET = "cifar10"  # of the accuracies
FOLD, RELU = "fold", "relu"  # keys of accuracies
_FILE = ".safetensors"
Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Subject:
    """A network to measure.

    Args:
        name: in the table, and on the command line.
        conformal: builds the conformal network; None if there is none, or only its fold.
        relu: builds its ReLU counterpart, or a plain network on its own, as it is deployed.
        folded: the fold of a file.
        shape: of one sample.
        accuracy: of the trained networks, by FOLD and RELU; empty: untrained, None: not known.
    """

    name: str
    conformal: Build | None = None
    relu: Build | None = None
    folded: Folded | None = None
    shape: tuple[int, ...] = networks.IMAGE_SHAPE
    accuracy: Mapping[str, float] | None = None


def chosen_subjects(
    names: Sequence[str], depths: Sequence[int], results: Path, shape: tuple[int, ...] = ()
) -> list[Subject]:
    """Return networks and files by their names; all networks if there are none.

    Args:
        names: such as ``"LeNet"``, ``"DkNet 9"``, ``"StageNet-micro"``, the path of a file, or a name of the zoo.
        depths: of DkNet.
        results: folder of the experiments, where accuracies are found.
        shape: of one sample of the files, if they are to be measured for another shape than their own.
    """
    known = {one.name: one for one in _networks(depths, _accuracies(results))}
    shipped = network_files()
    found = []
    for name in names or known:
        is_file = name.endswith(_FILE) or name in shipped or os.path.exists(name)
        if name not in known and is_file:
            found.append(_read_file(name, shape))
            continue
        if shape:
            remedy = "Name files and run folders alone beside it."
            raise refusal("bench --input-shape", "it for model files", name, remedy)
        choices = (*known, *sorted(shipped))
        require_choice("bench", name, choices, "Name a network; --depths adds depths of DkNet.")
        found.append(known[name])
    return found


def _networks(depths: Sequence[int], accuracies: Mapping[str, float]) -> list[Subject]:
    """Return the networks of the paper, StageNets beside their ReLU twins, and ResNet-8."""

    def subject(
        name: str, conformal: Build | None, relu: Build, trained: Sequence[str] = ()
    ) -> Subject:
        keys = zip((RELU, FOLD), trained, strict=False)
        accuracy = {key: accuracies[one] for key, one in keys if one in accuracies}
        return Subject(name, conformal, relu, accuracy=accuracy)

    base = ("BaseReLUNet", "BaseReSProNet")
    found = [
        subject("Base", networks.BaseReSProNet, networks.BaseReLUNet, base),
        subject("LeNet", networks.LeNetCL, networks.LeNet, ("LeNet", "LeNetCL")),
        subject("D3ModNet", networks.D3ModNetCL, networks.D3ModNet),
    ]
    for mode in ("zeros", "circular"):
        for k in depths:
            deep = partial(networks.DkNetCL, k, padding_mode=mode)
            name = f"DkNet {k}" + (" circular" if mode == "circular" else "")
            found.append(subject(name, deep, partial(networks.DkNet, k)))
    for preset in PRESETS:
        name, twin = f"StageNet-{preset}", f"StageReLUNet-{preset}-average"
        staged = partial(networks.StageNet, preset)
        plain = partial(lambda preset: merged(networks.StageReLUNet(preset)), preset)
        found.append(subject(name, staged, plain, (twin, name)))
    found.append(subject("ResNet8", None, lambda: merged(networks.ResNet8()), ("ResNet8",)))
    return found


def _accuracies(results: Path) -> dict[str, float]:
    """Return the accuracies on CIFAR-10 by the recipe of experiment 5, whose networks come first."""
    rows = read_rows(results / "experiment5" / f"{DATASET}.json", "bench")
    found = {
        name: fmean(row["accuracy"] for row in same) for name, same in grouped(rows, "name").items()
    }
    ending = f"-{DATASET}-{RECIPE}"
    for path in (results / "accuracy").glob(f"*{ending}.json"):
        record = read_record(path, "bench", "accuracy")
        found.setdefault(path.stem.removesuffix(ending), record["accuracy"])
    return found


def _read_file(name: str, shape: tuple[int, ...] = ()) -> Subject:
    """Return the fold or the model of a file, or of a run folder."""
    loaded = load_model(name, "bench")
    share = _file_accuracy(loaded)
    plain = not loaded.folds and not isinstance(loaded.module, Folded)
    accuracy = None if share is None else {RELU if plain else FOLD: share}
    if isinstance(loaded.module, Folded):
        own = loaded.module.input_shape
        if shape not in ((), own):
            remedy = "A fold has one shape: fold the model again."
            raise refusal("bench --input-shape", shape_text(own), shape_text(shape), remedy)
        return Subject(name, folded=loaded.module, shape=own, accuracy=accuracy)
    if shape:
        checked_shape(shape, "bench --input-shape")
    elif loaded.shape is None:
        remedy = "Give it: --input-shape 1 28 28."
        raise refusal(f"bench {name}", "a model with an input shape", "none", remedy)
    shape = shape or loaded.shape or ()
    model = from_images(loaded.module, shape, "bench")
    if plain:
        return Subject(name, relu=lambda: merged(model), shape=shape, accuracy=accuracy)
    return Subject(name, conformal=lambda: model, shape=shape, accuracy=accuracy)


def _file_accuracy(loaded: Loaded) -> float | None:
    """Return the accuracy of a file: from its notes, the result of its run, or the table of experiment 5 beside it."""
    path = loaded.path
    found = [loaded.about.get("accuracy")]
    if path.name == CHECKPOINT and path.with_name(RESULT).exists():
        found.append(read_record(path.with_name(RESULT), "bench", "accuracy")["accuracy"])
    for table in sorted(path.parent.glob("*.json")):
        name = path.stem.removesuffix(f"-{table.stem}")
        if name in CONTESTANTS:  # the folds that experiment 5 saves have its first seed
            rows = read_rows(table, "bench")
            found += [row["accuracy"] for row in rows if (row["name"], row["seed"]) == (name, 0)]
    shares = (one for one in found if isinstance(one, (int, float)) and not isinstance(one, bool))
    return next((float(share) for share in shares if 0 <= share <= 1), None)
