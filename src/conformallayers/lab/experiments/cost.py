"""Experiment 5: accuracy against cost, of the same deployed networks trained plain and expanded."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
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
from ...folding.folded import Folded
from ...networks import IMAGE_SHAPE
from ...nn.layers import Centre
from ...quantization.quantize import quantize
from ...recipe.c.export import export_c
from ...session import Session
from ...testing import fold_error
from ...utils.text import count
from ..checks import command_line, require_choice, torch_settings
from ..data.catalogue import CLASSES, LABELS
from ..data.catalogue import NAMES as DATASETS
from ..devices.emulator import missing_tools, run_on_device
from ..measure import interleave
from ..options import CostOptions
from ..report import figures
from ..training.config import TrainConfig, make_config, preset_options, resolved
from ..training.run_folder import RESULT
from ..training.saved_models import Loaded, load_model
from ..training.train import train
from .bench import multiply_adds, weights
from .records import Cells, Records, Row, grouped, mean_and_spread, read_record

PRESET = "modern"
_BUDGET = ("epochs", "batch_size", "flips", "shift")  # of StageNet's preset, for every network
BATCHES = (1, 64)
OPPONENT = "LeNet"  # times are relative to its
_EXECUTIONS = 60  # timed calls of each network
_CALIBRATION = 32  # images for the scales of int8
_WHERE = "experiment 5"
EXPANDED = "-expanded"


def _networks() -> dict[str, Row]:
    """Return the options of train by name; a network that is trained expanded has a name of its own."""
    pairs: dict[str, Row] = {
        name: {"network": name} for name in ("LeNet", "DepthwiseNet", "ResNet8")
    }
    for preset in ("micro", "small", "base", "compact", "large"):
        pairs[f"StageReLUNet-{preset}"] = {"network": "StageReLUNet", "preset": preset}
        pairs[f"StageNet-{preset}"] = {"network": "StageNet", "preset": preset}
    stage, twin = pairs["StageNet-micro"], pairs["StageReLUNet-micro"]
    # Where the gain of StageNet comes from: its pooling without t, and its parts left out.
    pairs["StageReLUNet-micro-norm"] = {**twin, "pool": "norm"}
    pairs["StageNet-micro-no-respro"] = {**stage, "respro": False}
    pairs["StageNet-micro-no-offset"] = {**stage, "offset": "none"}
    pairs["StageReLUNet-micro-wide"] = {**twin, "width": 1.5}
    found: dict[str, Row] = {name: {"network": name} for name in ("MLP", "LeNetCL")}
    for name, options in pairs.items():
        found[name] = options
        found[f"{name}{EXPANDED}"] = {**options, "expand": True}
    return found


NETWORKS = _networks()


def run_folder(name: str, dataset: str, seed: int) -> Path:
    """Return the folder of a network's run."""
    return Path("runs") / f"{name}-{dataset}-seed{seed}"


def load_runs(names: Sequence[str], dataset: str, seed: int, where: str) -> dict[str, Loaded]:
    """Load the finished runs of networks, or refuse the first that is missing."""
    for name in names:
        require_choice(f"{where} --only", name, NETWORKS, "Name one of them.")
        folder = run_folder(name, dataset, seed)
        if not (folder / RESULT).is_file():
            line = command_line(
                _WHERE.split(), {"dataset": dataset, "only": (name,), "seeds": (seed,)}
            )
            remedy = f"Train it: {line}."
            raise refusal(where, f"a finished run in {folder}", "none", remedy)
    return {name: load_model(run_folder(name, dataset, seed), where) for name in names}


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
    options = {**shared, **own, **NETWORKS[name]}
    return make_config(**resolved(options), classes=classes)


def run_cost(options: CostOptions, console: Console | None = None) -> Row:
    """Train the missing networks, or measure what all cost; return the record."""
    for name in options.only:
        require_choice(f"{_WHERE} --only", name, NETWORKS, "Name one of them.")
    require_choice(f"{_WHERE} --dataset", options.dataset, DATASETS, "Name one of them.")
    names = options.only or tuple(NETWORKS)
    if options.measure:
        return _measure_times(names, options)
    records = Records(
        *(_WHERE, options, options.dataset, ("name", "seed"), cells),
        lambda rows: front_figure(rows, {row["name"]: row["weights"] for row in rows}, "weights"),
        settings=("dataset", "epochs"),
    )
    with records:
        for seed, name in product(options.seeds, names):
            measure = partial(train_and_measure, name, seed, options, console)
            records.row(name, seed, measure=measure)
    return records.record


def train_and_measure(name: str, seed: int, chosen: CostOptions, console: Console | None) -> Row:
    """Return the row of a run; train it if it is not finished."""
    folder = run_folder(name, chosen.dataset, seed)
    if not (folder / RESULT).is_file():
        config = config_of(name, chosen.dataset, seed, chosen.epochs, chosen.threads)
        places: Any = {"data_root": chosen.data_root, "verify": chosen.verify}
        train(out=folder, resume=True, console=console, **places, **config.model_dump())
    result = json.loads((folder / RESULT).read_text("utf-8"))
    loaded = load_model(folder, _WHERE)
    network = _without_centre(loaded.module)
    folded = fold(network, IMAGE_SHAPE)
    kept = ("accuracy", "parameters_in_training", "seconds", "commit")
    return {
        "name": name,
        "seed": seed,
        "multiply_adds": multiply_adds(folded),
        "weights": weights(folded),
        "error": fold_error(network, folded, _images(8, seed=0)),
        "strategy": folded.strategy,
        **{key: result[key] for key in kept},
        # Of the run, without its folders: it must give the same row elsewhere.
        "command": loaded.config.command({}) if loaded.config else result["command"],
    }


def _measure_times(names: Sequence[str], chosen: CostOptions) -> Row:
    """Time deployed networks in ONNX Runtime with one thread, in turns; count int8 instructions on the device.

    Neither depends on the weights, which are random, nor on the way of training: expanded networks are left out.
    """
    names = list(dict.fromkeys([OPPONENT, *(name.removesuffix(EXPANDED) for name in names)]))
    records = Records(
        *(_WHERE, replace(chosen, threads=1), f"{chosen.dataset}-times", ("name", "batch")),
        *(time_cells, partial(_time_figure, chosen)),
        settings=("dataset", "epochs"),
    )
    folds = {}
    for name in names:
        torch.manual_seed(0)
        network = _without_centre(config_of(name, chosen.dataset, 0).build())
        folds[name] = fold(network.eval(), IMAGE_SHAPE)
    with torch_settings(1), records:
        instructions = {name: _instructions(folded) for name, folded in folds.items()}
        for batch in BATCHES:
            x = _images(batch, seed=batch)
            engines = {
                name: partial(Session(folded, engine="onnxruntime", threads=1), x.numpy())
                for name, folded in folds.items()
            }
            times = interleave(engines, _EXECUTIONS)
            for name, timing in times.items():
                row = {"name": name, "batch": batch, "milliseconds": timing}
                ratio = round(timing["median"] / times[OPPONENT]["median"], 3)
                records.add({**row, "ratio": ratio, "instructions": instructions[name]})
    return records.record


def _instructions(folded: Folded) -> int | None:
    """Return the instructions of a Cortex-M4 for one image in int8; None where its tools are missing."""
    if missing_tools():
        return None
    images = _images(_CALIBRATION, seed=0)
    with tempfile.TemporaryDirectory(prefix="conformallayers-") as folder:
        made = export_c(quantize(folded, images), folder, optimize="size")
        return int(run_on_device(made, images[:1].numpy()).instructions[0])


def _without_centre(model: nn.Module) -> nn.Module:
    """Return a network without the subtraction of the mean image, which all networks have in common."""
    if isinstance(model, nn.Sequential) and isinstance(model[0], Centre):
        return model[1]
    return model


def _images(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, *IMAGE_SHAPE, generator=generator) - 0.5


def time_cells(rows: Sequence[Row]) -> Cells:
    """Return a table of the times of each network and batch size."""
    lines = []
    for row in rows:
        line = [row["name"], str(row["batch"]), f"{row['milliseconds']['median']:.4f}"]
        instructions = row["instructions"]
        lines.append([*line, str(row["ratio"]), count(instructions) if instructions else "–"])
    return ["network", "batch", "ms", f"time / {OPPONENT}'s", "int8 instructions"], lines


def cells(rows: Sequence[Row]) -> Cells:
    """Return the header of a table, and one line for all seeds of a network."""
    lines = []
    for name, found in grouped(rows, "name").items():
        shares = [row["accuracy"] for row in found]
        line = [name, mean_and_spread(shares), ", ".join(f"{100 * one:.2f}" for one in shares)]
        line += [count(found[0]["multiply_adds"]), count(found[0]["weights"])]
        lines.append([*line, f"{max(row['error'] for row in found):.1e}"])
    return ["network", "accuracy", "each seed", "multiply-adds", "weights", "error"], lines


def front_figure(rows: Sequence[Row], costs: Mapping[str, float], label: str) -> Figure:
    """Plot accuracy against a cost by name; an arrow leads from a network to itself trained expanded."""
    means = {
        name: 100 * fmean(row["accuracy"] for row in found)
        for name, found in grouped(rows, "name").items()
        if name in costs
    }
    with figures.styled(7.2, 5.0, legend=3) as (figure, axes):
        for kind in ("StageNet", "StageReLUNet", "others"):
            names = [name for name in means if _kind(name) == kind]
            axes.scatter([costs[n] for n in names], [means[n] for n in names], s=28, label=kind)
        for name, mean in means.items():
            plain = name.removesuffix(EXPANDED)
            if plain != name and plain in means:
                ends = (costs[name], mean), (costs[plain], means[plain])
                axes.annotate("", *ends, arrowprops={"arrowstyle": "->", "alpha": 0.5})
            else:
                place = {"xytext": (6, -4), "textcoords": "offset points"}
                axes.annotate(plain.rpartition("Net-")[2], (costs[name], mean), size=8, **place)
        axes.set(xlabel=label, ylabel="test accuracy (%)", xscale="log")
        axes.grid(alpha=0.3)
    return figure


def _time_figure(chosen: CostOptions, times: Sequence[Row]) -> Figure:
    """Plot the accuracies that are recorded so far against the time of one image."""
    path = chosen.out / f"{chosen.dataset}.json"
    rows = read_record(path, _WHERE)["rows"] if path.exists() else []
    plain = {row["name"]: row["ratio"] for row in times if row["batch"] == BATCHES[0]}
    costs = plain | {f"{name}{EXPANDED}": ratio for name, ratio in plain.items()}
    return front_figure(rows, costs, f"time of one image in ONNX Runtime / {OPPONENT}'s")


def _kind(name: str) -> str:
    word = name.partition("-")[0]
    return word if word in ("StageNet", "StageReLUNet") else "others"
