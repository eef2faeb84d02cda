"""Experiment 5: accuracy against cost, of networks with stages, their ReLU twins and others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn

from ...errors import ConformalError, refusal
from ...folding.save import save
from ...networks import IMAGE_SHAPE
from ...session import Session
from ...testing import fold_error
from ...utils.files import replace_file
from ...utils.text import count, markdown
from ...utils.timing import interleave
from ..checks import require_positive
from ..report import figures
from ..settings import torch_settings
from ..training.runs import RESULT
from ..training.saved_models import load_model
from ..training.train import train
from .deployed import (
    deployed,
    has_conformal_layers,
    merged,
    multiply_adds,
    weights,
    without_centre,
)
from .engines import Engine, relu_engines
from .options import CostOptions
from .records import Measurements, Row, grouped, mean_and_spread, read_rows
from .trained_networks import NETWORKS, Trained, config_of, named

BATCHES = (1, 64)
OPPONENT = "LeNet"  # times are relative to its
_SEEDS = (0, 1, 2)
_LONG_RUN = 1800.0  # seconds; networks that train longer get one seed
_WHERE = "experiment 5"


def run_cost(
    *, say: Callable[[str], object] = print, console: Console | None = None, **options: Any
) -> Row:
    """Train the missing networks, or time those that are trained; write rows, table and figure.

    Args:
        say: receives one line per row.
        console: shows the progress of training; None is the terminal.
        **options: fields of :class:`conformallayers.lab.experiments.options.CostOptions`.
    """
    chosen = CostOptions(**options)
    require_positive(_WHERE, chosen, "epochs", "executions", "threads")
    trained = named(f"{_WHERE} --only", chosen.only) or [
        one for one in NETWORKS.values() if one.ablation == chosen.ablation
    ]
    if chosen.measure:
        return _measure_times(trained, chosen, say)
    measurements = Measurements(
        _WHERE,
        chosen,
        settings=("dataset", "epochs"),
        name=chosen.dataset,
        key=("name", "seed"),
        say=say,
    )
    failed = []
    with measurements.drawing(lambda _: write_summary(chosen.out, chosen.dataset)):
        for seed in chosen.seeds or _SEEDS:
            for one in trained:
                first = measurements.rows.get((one.name, _SEEDS[0]), {})
                if not chosen.seeds and first.get("seconds", 0.0) > _LONG_RUN:
                    continue
                try:
                    measure = partial(train_and_measure, one, seed, chosen, console)
                    measurements.row((one.name, seed), measure)
                except ConformalError as error:
                    say(f"{one.name}, seed {seed}: {error}")
                    failed.append(f"{one.name} seed {seed}")
    if failed:
        got, remedy = f"the errors above in {', '.join(failed)}", "Repeat the command."
        raise refusal(_WHERE, "every network trained", got, remedy)
    return measurements.record


def train_and_measure(one: Trained, seed: int, chosen: CostOptions, console: Console | None) -> Row:
    """Return the row of a run; train it if it is not finished. Save the fold of the first seed."""
    runtime = {"threads": chosen.threads, "device": chosen.device}
    config = config_of(one, chosen.dataset, seed, chosen.epochs, **runtime)
    folder = one.folder(chosen.runs, chosen.dataset, seed)
    if not (folder / RESULT).is_file():
        train(
            out=folder,
            resume=True,
            data_root=chosen.data_root,
            verify=chosen.verify,
            console=console,
            **config.model_dump(),
        )
    result = json.loads((folder / RESULT).read_text("utf-8"))
    loaded = load_model(folder, _WHERE)
    network = without_centre(loaded.module)
    folded = deployed(network)
    if has_conformal_layers(network) and seed == _SEEDS[0] and not one.ablation:
        path = chosen.out / f"{one.name}-{chosen.dataset}.safetensors"
        save(deployed(loaded.module), path, labels=loaded.labels, about=loaded.about)
    return {
        "name": one.name,
        "seed": seed,
        "ablation": one.ablation,
        "accuracy": result["accuracy"],
        "multiply_adds": multiply_adds(folded),
        "weights": weights(folded),
        "error": fold_error(network, folded, _images(8, seed=0)),
        "strategy": folded.strategy,
        "parameters": result["parameters"],
        "seconds": result["seconds"],
        "commit": result["commit"],
        "command": result["command"],
    }


def _measure_times(
    trained: Sequence[Trained], chosen: CostOptions, say: Callable[[str], object]
) -> Row:
    """Time trained networks in ONNX Runtime with one thread, in turns."""
    measurements = Measurements(
        _WHERE,
        replace(chosen, threads=1),
        settings=("dataset", "epochs", "executions"),
        name=f"{chosen.dataset}-times",
        key=("name", "batch"),
        say=say,
    )
    names = dict.fromkeys([OPPONENT, *(one.name for one in trained)])
    seed = (chosen.seeds or _SEEDS)[0]
    models = {}
    for one in named(_WHERE, list(names)):
        folder = one.folder(chosen.runs, chosen.dataset, seed)
        if not (folder / RESULT).is_file():
            remedy = "Train it first: the same command without --measure."
            raise refusal(f"{_WHERE} --measure", f"a finished run in {folder}", "none", remedy)
        models[one.name] = without_centre(load_model(folder, _WHERE).module)
    rows: list[Row] = []  # written together: half of them must not replace an earlier record
    with torch_settings(1):
        for batch in BATCHES:
            x = _images(batch, seed=batch)
            engines = {name: _engine(name, model, x) for name, model in models.items()}
            times = interleave(engines, chosen.executions)
            for name, timing in times.items():
                row = {"name": name, "batch": batch, "milliseconds": timing.milliseconds}
                rows.append({**row, "ratio": round(timing.median / times[OPPONENT].median, 3)})
    with measurements.drawing(lambda _: write_summary(chosen.out, chosen.dataset)):
        for row in rows:
            measurements.add(row)
    return measurements.record


def _images(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, *IMAGE_SHAPE, generator=generator) - 0.5


def _engine(name: str, network: nn.Module, x: Tensor) -> Engine:
    """Return a network in ONNX Runtime: our export of a fold, or torch's of a plain network."""
    if has_conformal_layers(network):
        return partial(Session(deployed(network), engine="onnxruntime", threads=1), x.numpy())
    engines, notes = relu_engines(merged(network), x, ["onnx"])
    if not engines:
        raise refusal(_WHERE, f"{name} in ONNX Runtime", notes["onnx"], "Report it.")
    return engines["onnx"]


def write_summary(out: Path, dataset: str) -> None:
    """Write the table and the figure of the rows in a folder."""
    rows, times = (read_rows(out / f"{dataset}{end}.json", _WHERE) for end in ("", "-times"))
    front, ablation = ([row for row in rows if row["ablation"] == one] for one in (False, True))
    parts = {"Accuracy against cost": front, "Ablation of StageNet micro": ablation}
    text = "".join(
        f"## {title}\n\n{markdown(*cells(part, times))}\n" for title, part in parts.items() if part
    )
    if text:
        replace_file(out / f"{dataset}.md", [text.encode()])
    if front:
        figures.save(front_figure(front), out, dataset)


def cells(rows: Sequence[Row], times: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
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
