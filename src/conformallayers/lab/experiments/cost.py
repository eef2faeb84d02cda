"""Experiment 5: accuracy against cost, of networks with stages, their ReLU twins and others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn

from ...errors import refusal
from ...folding.fold import fold
from ...folding.save import save
from ...networks import IMAGE_SHAPE
from ...networks.stages import PRESETS
from ...nn.extra_layers import Centre
from ...session import Session
from ...testing import fold_error
from ...utils.text import count
from ..checks import require_choice, torch_settings
from ..data.catalogue import CLASSES, LABELS
from ..measure import interleave
from ..options import CostOptions
from ..report import figures
from ..training.config import TrainConfig, make_config, preset_options, resolved
from ..training.run_folder import RESULT
from ..training.saved_models import Loaded, load_model
from ..training.train import train
from .bench import (
    Engine,
    deployed_relu,
    has_conformal_layers,
    multiply_adds,
    relu_engines,
    weights,
)
from .records import Cells, Records, Row, grouped, mean_and_spread

PRESET = "modern"
_BUDGET = ("epochs", "batch_size", "flips", "shift")  # of StageNet's preset, for every network
BATCHES = (1, 64)
OPPONENT = "LeNet"  # times are relative to its
_EXECUTIONS = 60  # timed calls of each network
_WHERE = "experiment 5"


def _networks() -> dict[str, Row]:
    found: dict[str, Row] = {
        name: {"network": name} for name in ("MLP", "LeNet", "LeNetCL", "ResNet8")
    }
    for preset in PRESETS:
        found[f"StageNet-{preset}"] = {"network": "StageNet", "preset": preset}
        for pool in ("average", "max"):
            twin = {"network": "StageReLUNet", "preset": preset, "pool": pool}
            found[f"StageReLUNet-{preset}-{pool}"] = twin
    return found


def _ablation() -> dict[str, Row]:
    micro = {"network": "StageNet", "preset": "micro"}
    found: dict[str, Row] = {"StageNet-micro-no-offset": {**micro, "offset": "none"}}
    for depth, rectifiers in {
        1: ("norm", "relu"),
        2: ("norm", "relu", "abs", "max"),
        3: ("norm", "relu"),
    }.items():
        for rectifier, respro in product(rectifiers, (True, False)):
            name = f"StageNet-micro-depth{depth}-{rectifier}{'' if respro else '-no-respro'}"
            found[name] = {**micro, "depth": depth, "rectifier": rectifier, "respro": respro}
    return found


NETWORKS, ABLATION = _networks(), _ablation()  # options of train by name


def run_folder(name: str, dataset: str, seed: int) -> Path:
    """Return the folder of a network's run."""
    return Path("runs") / f"{name}-{dataset}-seed{seed}"


def load_runs(names: Sequence[str], dataset: str, seed: int, where: str) -> dict[str, Loaded]:
    """Load the finished runs of networks, or refuse the first that is missing."""
    _require_known(names, where)
    for name in names:
        folder = run_folder(name, dataset, seed)
        if not (folder / RESULT).is_file():
            remedy = f"Train it: conformallayers {_WHERE} --only {name} --seeds {seed}."
            raise refusal(where, f"a finished run in {folder}", "none", remedy)
    return {name: load_model(run_folder(name, dataset, seed), where) for name in names}


def _require_known(names: Sequence[str], where: str) -> None:
    for name in names:
        require_choice(f"{where} --only", name, {**NETWORKS, **ABLATION}, "Name one of them.")


def config_of(
    name: str, dataset: str, seed: int, epochs: int | None = None, threads: int | None = None
) -> TrainConfig:
    """Return the training options of a network.

    Epochs, batch size and moves of the images are those of StageNet's preset for all; each keeps the learning rate and
    the weight decay of its own preset.
    """
    stage = preset_options("StageNet", dataset)
    shared: dict[str, Any] = {key: stage[key] for key in _BUDGET if key in stage}
    if epochs is not None:
        shared["epochs"] = epochs
    own = {"training_preset": PRESET, "dataset": dataset, "seed": seed, "threads": threads}
    classes = len(LABELS.get(dataset, range(CLASSES)))
    options = {**shared, **own, **{**NETWORKS, **ABLATION}[name]}
    return make_config(**resolved(options), classes=classes)


def run_cost(options: CostOptions, console: Console | None = None) -> Row:
    """Train the missing networks, or time those that are trained; return the record."""
    _require_known(options.only, _WHERE)
    names = options.only or tuple(ABLATION if options.ablation else NETWORKS)
    if options.measure:
        return _measure_times(names, options)
    records = Records(
        *(_WHERE, options, options.dataset, ("name", "seed"), cells, front_figure),
        settings=("dataset", "epochs"),
    )
    with records:
        for seed, name in product(options.seeds, names):
            measure = partial(train_and_measure, name, seed, options, console)
            records.row(name, seed, measure=measure)
    return records.record


def train_and_measure(name: str, seed: int, chosen: CostOptions, console: Console | None) -> Row:
    """Return the row of a run; train it if it is not finished. Save the fold of seed 0."""
    folder = run_folder(name, chosen.dataset, seed)
    if not (folder / RESULT).is_file():
        config = config_of(name, chosen.dataset, seed, chosen.epochs, chosen.threads)
        places: Any = {"data_root": chosen.data_root, "verify": chosen.verify}
        train(out=folder, resume=True, console=console, **places, **config.model_dump())
    result = json.loads((folder / RESULT).read_text("utf-8"))
    loaded = load_model(folder, _WHERE)
    network = _without_centre(loaded.module)
    folded = fold(network, IMAGE_SHAPE)
    if has_conformal_layers(network) and seed == 0 and name in NETWORKS:
        path = chosen.out / f"{name}-{chosen.dataset}.safetensors"
        save(loaded.fold(_WHERE, IMAGE_SHAPE), path)
    kept = ("accuracy", "parameters", "seconds", "commit", "command")
    return {
        "name": name,
        "seed": seed,
        "multiply_adds": multiply_adds(folded),
        "weights": weights(folded),
        "error": fold_error(network, folded, _images(8, seed=0)),
        "strategy": folded.strategy,
        **{key: result[key] for key in kept},
    }


def _measure_times(names: Sequence[str], chosen: CostOptions) -> Row:
    """Time trained networks in ONNX Runtime with one thread, in turns."""
    names = list(dict.fromkeys([OPPONENT, *names]))
    runs = load_runs(names, chosen.dataset, chosen.seeds[0], _WHERE)
    records = Records(
        *(_WHERE, replace(chosen, threads=1), f"{chosen.dataset}-times", ("name", "batch")),
        cells=time_cells,
        settings=("dataset", "epochs"),
    )
    with torch_settings(1), records:
        for batch in BATCHES:
            x = _images(batch, seed=batch)
            engines = {name: _engine(name, loaded.module, x) for name, loaded in runs.items()}
            times = interleave(engines, _EXECUTIONS)
            for name, timing in times.items():
                row = {"name": name, "batch": batch, "milliseconds": timing}
                records.add(
                    {**row, "ratio": round(timing["median"] / times[OPPONENT]["median"], 3)}
                )
    return records.record


def _without_centre(model: nn.Module) -> nn.Module:
    """Return a network without the subtraction of the mean image, which all networks have in common."""
    if isinstance(model, nn.Sequential) and isinstance(model[0], Centre):
        return model[1]
    return model


def _images(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, *IMAGE_SHAPE, generator=generator) - 0.5


def _engine(name: str, model: nn.Module, x: Tensor) -> Engine:
    """Return a network in ONNX Runtime: our export of a fold, or torch's of a plain network."""
    network = _without_centre(model)
    if has_conformal_layers(network):
        folded = fold(network, IMAGE_SHAPE)
        return partial(Session(folded, engine="onnxruntime", threads=1), x.numpy())
    engines, notes = relu_engines(deployed_relu(network), x, ["onnx"])
    if not engines:
        raise refusal(_WHERE, f"{name} in ONNX Runtime", notes["onnx"], "Report it.")
    return engines["onnx"]


def time_cells(rows: Sequence[Row]) -> Cells:
    """Return a table of the times of each network and batch size."""
    lines = [
        [row["name"], str(row["batch"]), f"{row['milliseconds']['median']:.4f}", str(row["ratio"])]
        for row in rows
    ]
    return ["network", "batch", "ms", f"time / {OPPONENT}'s"], lines


def cells(rows: Sequence[Row]) -> Cells:
    """Return the header of a table, and one line for all seeds of a network."""
    lines = []
    for name, found in grouped(rows, "name").items():
        shares = [row["accuracy"] for row in found]
        line = [name, mean_and_spread(shares), ", ".join(f"{100 * one:.2f}" for one in shares)]
        line += [count(found[0]["multiply_adds"]), count(found[0]["weights"])]
        lines.append([*line, f"{max(row['error'] for row in found):.1e}"])
    return ["network", "accuracy", "each seed", "multiply-adds", "weights", "error"], lines


def front_figure(rows: Sequence[Row]) -> Figure:
    """Plot accuracy against multiply-adds; ReLU twins are at the place of their StageNet."""
    kinds: dict[str, list[tuple[str, float, float]]] = {}
    for name, found in grouped(rows, "name").items():
        word, _, preset = name.partition("-")
        kind = {"StageNet": "StageNet", "StageReLUNet": "ReLU twin"}.get(word, "others")
        share = 100 * fmean(row["accuracy"] for row in found)
        if name not in ABLATION:
            kinds.setdefault(kind, []).append((preset or name, found[0]["multiply_adds"], share))
    with figures.styled(7.2, 5.0) as (figure, axes):
        for kind, points in kinds.items():
            _, costs, shares = zip(*points, strict=True)
            axes.scatter(costs, shares, s=28, label=kind)
            for label, cost, share in points if kind != "ReLU twin" else ():
                place = {"xytext": (6, 3), "textcoords": "offset points"}
                axes.annotate(label, (cost, share), size=8, **place)
        axes.set(xlabel="multiply-adds for one image", ylabel="test accuracy (%)", xscale="log")
        axes.grid(alpha=0.3)
        figures.legend_below(figure, axes, 3)
    return figure
