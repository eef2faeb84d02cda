"""Experiment 5: accuracy against cost, of networks with stages, their ReLU twins and others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from ..checks import require_choice, require_positive, torch_settings
from ..data.catalogue import CLASSES, LABELS
from ..measure import interleave
from ..options import CostOptions
from ..report import figures
from ..training.config import TrainConfig, make_config, preset_options, resolved
from ..training.run_folder import RESULT
from ..training.saved_models import Loaded, load_model
from ..training.train import train
from .engines import (
    Engine,
    deployed_relu,
    has_conformal_layers,
    multiply_adds,
    relu_engines,
    weights,
)
from .records import Cells, Records, Row, grouped, mean_and_spread, read_rows

PRESET = "modern"
# The ablation: depths of a stage with the rectifiers that are trained at this depth.
ABLATION = {1: ("norm", "relu"), 2: ("norm", "relu", "abs", "max"), 3: ("norm", "relu")}
# Options of StageNet's preset that every network trains with.
_BUDGET = ("epochs", "batch_size", "flips", "shift")
BATCHES = (1, 64)
OPPONENT = "LeNet"  # times are relative to its
_SEEDS = (0, 1, 2)
_LONG_RUN = 1800.0  # seconds; networks that train longer get one seed
_WHERE = "experiment 5"


@dataclass(frozen=True)
class Trained:
    """A network with its options, and its name in tables."""

    name: str
    network: str
    options: Mapping[str, Any] = field(default_factory=dict)
    ablation: bool = False

    def folder(self, dataset: str, seed: int) -> Path:
        """Return the folder of its run."""
        return Path("runs") / f"{self.name}-{dataset}-seed{seed}"

    def load(self, dataset: str, seed: int, where: str) -> Loaded:
        """Load its finished run, or refuse it."""
        folder = self.folder(dataset, seed)
        if not (folder / RESULT).is_file():
            remedy = f"Train it: conformallayers experiment 5 --only {self.name} --seeds {seed}."
            raise refusal(where, f"a finished run in {folder}", "none", remedy)
        return load_model(folder, where)


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
    one: Trained, dataset: str, seed: int, epochs: int | None = None, threads: int | None = None
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
    own = {"network": one.network, "dataset": dataset, "seed": seed, **one.options}
    own["threads"] = threads
    classes = len(LABELS.get(dataset, range(CLASSES)))
    return make_config(**resolved({**shared, **own}), classes=classes)


def run_cost(
    *, say: Callable[[str], object] = print, console: Console | None = None, **options: Any
) -> Row:
    """Train the missing networks, or time those that are trained; write rows, table and figure.

    Args:
        say: receives one line per row.
        console: shows the progress of training; None is the terminal.
        **options: fields of :class:`conformallayers.lab.options.CostOptions`.
    """
    chosen = CostOptions(**options)
    require_positive(_WHERE, chosen, "epochs", "executions", "threads")
    trained = named(f"{_WHERE} --only", chosen.only) or [
        one for one in NETWORKS.values() if one.ablation == chosen.ablation
    ]
    if chosen.measure:
        return _measure_times(trained, chosen, say)
    times = read_rows(chosen.out / f"{chosen.dataset}-times.json", _WHERE)
    records = Records(
        *(_WHERE, chosen, chosen.dataset, ("name", "seed")),
        cells=partial(cells, times=times),
        figure=front_figure,
        settings=("dataset", "epochs"),
        say=say,
    )
    with records:
        for seed in chosen.seeds or _SEEDS:
            for one in trained:
                first = records.rows.get((one.name, _SEEDS[0]), {})
                if chosen.seeds or first.get("seconds", 0.0) <= _LONG_RUN:
                    measure = partial(train_and_measure, one, seed, chosen, console)
                    records.row((one.name, seed), measure)
    return records.record


def train_and_measure(one: Trained, seed: int, chosen: CostOptions, console: Console | None) -> Row:
    """Return the row of a run; train it if it is not finished. Save the fold of the first seed."""
    folder = one.folder(chosen.dataset, seed)
    if not (folder / RESULT).is_file():
        config = config_of(one, chosen.dataset, seed, chosen.epochs, chosen.threads)
        places: Any = {"data_root": chosen.data_root, "verify": chosen.verify}
        train(out=folder, resume=True, console=console, **places, **config.model_dump())
    result = json.loads((folder / RESULT).read_text("utf-8"))
    loaded = one.load(chosen.dataset, seed, _WHERE)
    network = _without_centre(loaded.module)
    folded = fold(network, IMAGE_SHAPE)
    if has_conformal_layers(network) and seed == _SEEDS[0] and not one.ablation:
        chosen.out.mkdir(parents=True, exist_ok=True)
        path = chosen.out / f"{one.name}-{chosen.dataset}.safetensors"
        save(loaded.fold(_WHERE, IMAGE_SHAPE), path)
    kept = ("accuracy", "parameters", "seconds", "commit", "command")
    return {
        "name": one.name,
        "seed": seed,
        "ablation": one.ablation,
        "multiply_adds": multiply_adds(folded),
        "weights": weights(folded),
        "error": fold_error(network, folded, _images(8, seed=0)),
        "strategy": folded.strategy,
        **{name: result[name] for name in kept},
    }


def _measure_times(
    trained: Sequence[Trained], chosen: CostOptions, say: Callable[[str], object]
) -> Row:
    """Time trained networks in ONNX Runtime with one thread, in turns."""
    records = Records(
        *(_WHERE, replace(chosen, threads=1), f"{chosen.dataset}-times", ("name", "batch")),
        cells=time_cells,
        settings=("dataset", "epochs", "executions"),
        say=say,
    )
    names = dict.fromkeys([OPPONENT, *(one.name for one in trained)])
    seed = (chosen.seeds or _SEEDS)[0]
    models = {
        one.name: _without_centre(one.load(chosen.dataset, seed, f"{_WHERE} --measure").module)
        for one in named(_WHERE, list(names))
    }
    rows: list[Row] = []  # written together: half of them must not replace an earlier record
    with torch_settings(1):
        for batch in BATCHES:
            x = _images(batch, seed=batch)
            engines = {name: _engine(name, model, x) for name, model in models.items()}
            times = interleave(engines, chosen.executions)
            for name, timing in times.items():
                row = {"name": name, "batch": batch, "milliseconds": timing.milliseconds}
                rows.append({**row, "ratio": round(timing.median / times[OPPONENT].median, 3)})
    with records:
        for row in rows:
            records.add(row)
    return records.record


def _without_centre(model: nn.Module) -> nn.Module:
    """Return a network without the subtraction of the mean image, which all networks have in common."""
    if isinstance(model, nn.Sequential) and isinstance(model[0], Centre):
        return model[1]
    return model


def _images(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, *IMAGE_SHAPE, generator=generator) - 0.5


def _engine(name: str, network: nn.Module, x: Tensor) -> Engine:
    """Return a network in ONNX Runtime: our export of a fold, or torch's of a plain network."""
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


def cells(rows: Sequence[Row], times: Sequence[Row] = ()) -> Cells:
    """Return the header of a table, and one line for all seeds of a network."""
    header = ["network", "accuracy", "each seed", "multiply-adds", "weights", "error"]
    header += [f"time / {OPPONENT}'s, batch {batch}" for batch in BATCHES]
    lines = []
    ratios = {(row["name"], row["batch"]): f"{row['ratio']:.2f}" for row in times}
    for name, found in grouped(rows, "name").items():
        shares = [row["accuracy"] for row in found]
        line = [name, mean_and_spread(shares), ", ".join(f"{100 * one:.2f}" for one in shares)]
        line += [count(found[0]["multiply_adds"]), count(found[0]["weights"])]
        line.append(f"{max(row['error'] for row in found):.1e}")
        lines.append([*line, *(ratios.get((name, batch), "") for batch in BATCHES)])
    return header, lines


_CLOSE = 2.0  # percent: labels of points this close would touch
_KINDS = {"StageNet": figures.GREEN, "ReLU twin": figures.ORANGE, "others": figures.BLUE}


def front_figure(rows: Sequence[Row]) -> Figure:
    """Plot accuracy against multiply-adds, with a line along the Pareto front."""
    points = [
        (name, found[0]["multiply_adds"], 100 * fmean(row["accuracy"] for row in found))
        for name, found in grouped(rows, "name").items()
        if not found[0]["ablation"]
    ]
    with figures.styled(7.2, 5.0) as (figure, axes):
        best = pareto([(cost, share) for _, cost, share in points])
        axes.plot(*zip(*best, strict=True), color="#999999", linewidth=1, zorder=1)
        for label, colour in _KINDS.items():
            found = [point for point in points if _kind(point[0]) == label]
            if not found:
                continue
            _, costs, shares = zip(*found, strict=True)
            axes.scatter(costs, shares, s=28, color=colour, label=label)
            for name, cost, share in found:
                text = name.removeprefix("StageNet-").removeprefix("StageReLUNet-")
                offset = 6, _label_height(cost, share, points)
                axes.annotate(text, (cost, share), offset, textcoords="offset points", size=8)
        axes.set(xlabel="multiply-adds for one image", ylabel="test accuracy (%)", xscale="log")
        axes.margins(x=0.12)
        axes.set_ylim(top=min(axes.get_ylim()[1], 100))
        figures.plain_ticks(axes.xaxis)
        axes.grid(alpha=0.3)
        figures.legend_below(figure, axes, 4)
    return figure


def _label_height(cost: float, share: float, points: Sequence[tuple[str, float, float]]) -> int:
    """Return the offset of a label from its point, upwards or downwards where another point is close."""
    gaps = [other - share for _, x, other in points if abs(x / cost - 1) < 0.05]
    if any(0 < gap < _CLOSE for gap in gaps):
        return -9
    return 2 if any(-_CLOSE < gap < 0 for gap in gaps) else -3


def _kind(name: str) -> str:
    """Return the legend entry of a network."""
    if name.startswith("StageReLUNet"):
        return "ReLU twin"
    return "StageNet" if name.startswith("StageNet") else "others"


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto front of (cost, accuracy), cheapest first: every point beats all cheaper ones.

    Examples:
        >>> pareto([(3, 80.0), (1, 70.0), (2, 60.0)])
        [(1, 70.0), (3, 80.0)]
    """
    best: list[tuple[float, float]] = []
    for cost, share in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or share > best[-1][1]:
            best.append((cost, share))
    return best
