"""Experiment 6: accuracy on corrupted images, by corruption and strength."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from ...errors import refusal
from ...nn.extra_layers import Centre
from ...testing import relative_error
from ...utils.files import replace_file
from ...utils.text import markdown
from ..checks import require_choice, require_positive
from ..data.batches import as_input
from ..data.datasets import Dataset, load
from ..report import figures
from ..settings import torch_settings
from ..training.evaluate import accuracy
from ..training.runs import RESULT
from ..training.saved_models import load_model
from .corruptions import CORRUPTIONS, STRENGTHS, corrupted, scaled
from .options import RobustnessOptions
from .records import Measurements, Row, grouped
from .trained_networks import Trained, named

# No corruption, and a change of contrast to which projective networks without offset are invariant.
CLEAN, SCALED = "none", "scaled"
NAMES = (
    *("LeNet", "LeNetCL", "StageNet-micro", "StageNet-micro-no-offset"),
    *("StageNet-micro-depth2-norm-no-respro", "StageReLUNet-micro-average"),
    "StageReLUNet-micro-max",
)
_COMPARED = 256  # images whose scores are compared
_WHERE = "experiment 6"


def run_robustness(*, say: Callable[[str], object] = print, **options: Any) -> Row:
    """Measure trained networks on corrupted test images; write rows, table and figure.

    Args:
        say: receives one line per row.
        **options: fields of :class:`conformallayers.lab.experiments.options.RobustnessOptions`.
    """
    chosen = RobustnessOptions(**options)
    require_positive(_WHERE, chosen, "epochs", "images", "threads")
    kinds = chosen.corruptions or (*CORRUPTIONS, SCALED)
    for kind in kinds:
        require_choice(f"{_WHERE} --corruptions", kind, (*CORRUPTIONS, SCALED), "Name one of them.")
    for strength in chosen.strengths:
        if strength not in STRENGTHS:
            remedy = "5 is the strongest."
            raise refusal(f"{_WHERE} --strengths", "1 to 5", str(strength), remedy)
    models = _models(named(f"{_WHERE} --only", chosen.only or NAMES), chosen)
    data = load(chosen.dataset, chosen.data_root, verify=chosen.verify)
    measurements = Measurements(
        _WHERE,
        chosen,
        settings=("dataset", "epochs", "images", "seed"),
        name=chosen.dataset,
        key=("corruption", "strength", "name", "run_seed"),
        say=say,
    )
    # Images are corrupted once for all networks, and kept for one corruption and strength only.
    draw = lru_cache(maxsize=1)(partial(_images, data, chosen))
    cases = [(CLEAN, 0), *((kind, strength) for kind in kinds for strength in chosen.strengths)]

    def summarise(rows: list[Row]) -> None:
        replace_file(chosen.out / f"{chosen.dataset}.md", [markdown(*cells(rows)).encode()])
        figures.save(strength_figure(rows), chosen.out, chosen.dataset)

    with torch_settings(chosen.threads), measurements.drawing(summarise):
        for kind, strength in cases:
            for (name, seed), model in models.items():
                key = (kind, strength, name, seed)
                measurements.row(key, partial(_measure, key, model, draw))
    return measurements.record


def _models(
    found: Sequence[Trained], chosen: RobustnessOptions
) -> dict[tuple[str, int], nn.Module]:
    """Load the finished runs of experiment 5 by name and seed."""
    models = {}
    for one in found:
        for seed in chosen.seeds:
            folder = one.folder(chosen.runs, chosen.dataset, seed)
            if not (folder / RESULT).is_file():
                remedy = f"Train it: conformallayers experiment 5 --only {one.name} --seeds {seed}."
                raise refusal(_WHERE, f"a finished run in {folder}", "none", remedy)
            models[one.name, seed] = load_model(folder, _WHERE).module.eval()
    return models


def _images(
    data: Dataset, chosen: RobustnessOptions, kind: str, strength: int
) -> tuple[Tensor, Tensor]:
    images, labels = data.test_images[: chosen.images], data.test_labels[: chosen.images]
    if kind in (CLEAN, SCALED):
        return images, labels
    return corrupted(images, kind, strength, chosen.seed), labels


def _measure(
    key: tuple[str, int, str, int], model: nn.Module, draw: Callable[..., tuple[Tensor, Tensor]]
) -> Row:
    kind, strength, name, seed = key
    images, labels = draw(kind, strength)
    row: Row = {"corruption": kind, "strength": strength, "name": name, "run_seed": seed}
    if kind != SCALED:
        return {**row, "accuracy": accuracy(model, images, labels)}
    means = [module.mean for module in model.modules() if isinstance(module, Centre)]
    mean = means[0] if means else torch.zeros(())

    def run(x: Tensor) -> Tensor:
        scores: Tensor = model(scaled(x, mean, strength))
        return scores

    with torch.inference_mode():
        x = as_input(images[:_COMPARED])
        row["change_of_scores"] = relative_error(run(x), model(x))
    return {**row, "accuracy": accuracy(run, images, labels)}


def shares(rows: Sequence[Row]) -> dict[str, dict[tuple[str, int], float]]:
    """Return the mean accuracy over seeds by network, then by corruption and strength."""
    return {
        name: {
            case: fmean(row["accuracy"] for row in same)
            for case, same in grouped(found, "corruption", "strength").items()
        }
        for name, found in grouped(rows, "name").items()
    }


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the header of a table, and one line of accuracies in per cent for each network.

    The accuracy of a corruption is the mean over its strengths.
    """
    found = shares(rows)
    measured = {row["corruption"] for row in rows}
    kinds = [kind for kind in (CLEAN, *CORRUPTIONS, SCALED) if kind in measured]
    header = ["network", "mean of corruptions", *kinds]
    lines = []
    for name, cases in found.items():
        means = {
            kind: fmean(values)
            for kind in kinds
            if (values := [share for case, share in cases.items() if case[0] == kind])
        }
        common = [means[kind] for kind in CORRUPTIONS if kind in means]
        line = [name, f"{100 * fmean(common):.1f}" if common else ""]
        lines.append([*line, *(f"{100 * means[k]:.1f}" if k in means else "" for k in kinds)])
    return header, lines


def strength_figure(rows: Sequence[Row]) -> Figure:
    """Plot accuracy against strength: the mean of the corruptions, contrast, and scaling."""
    titles = {"mean of corruptions": CORRUPTIONS, "contrast": ("contrast",), SCALED: (SCALED,)}
    with figures.styled(9.6, 4.4, columns=3) as (figure, panels):
        for axes, (title, kinds) in zip(panels, titles.items(), strict=True):
            for index, (name, cases) in enumerate(shares(rows).items()):
                line = {0: [cases[CLEAN, 0]]} if (CLEAN, 0) in cases else {}
                for (kind, strength), share in cases.items():
                    if kind in kinds:
                        line.setdefault(strength, []).append(share)
                points = sorted((strength, 100 * fmean(found)) for strength, found in line.items())
                style: Any = {"color": figures.COLOURS[index % len(figures.COLOURS)], "label": name}
                style |= {"marker": "sovD^<P"[index % 7], "markersize": 4}
                axes.plot(*zip(*points, strict=True), **style)
            axes.set(xlabel="strength", title=title)
            axes.sharey(panels[0])
            axes.grid(alpha=0.3)
        panels[0].set(ylabel="test accuracy (%)")
        figures.legend_below(figure, panels[0])
    return figure
