"""Inspect a trained network: write inspect.json and figures of its forms, terms and templates."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from ...errors import refusal
from ...inspection import Form, Inspection, Part, Terms, inspect
from ...utils.files import write_json
from ..checks import command_line, make_folder
from ..data.batches import as_input
from ..data.datasets import Dataset
from ..data.image_adapter import from_images
from ..data.sources import load_test
from ..report import figures
from ..settings import torch_settings
from ..training.saved_models import load_model
from .options import InspectOptions
from .records import Row, provenance

RECORD = "inspect.json"
_TOP = (1, 10, 100)  # numbers of eigenvalues whose share is written
_COLUMNS, _IMAGES = 8, 16  # images in a row, and in a figure


def run_inspect(
    run: str | os.PathLike[str],
    dataset: str | Dataset | None = None,
    *,
    say: Callable[[str], object] = print,
    **options: Any,
) -> Row:
    """Inspect a trained network on the first test images of a data set; write a folder, return its record.

    Args:
        run: the folder of a run, or a checkpoint.
        dataset: a name or a data set; None means that of the training.
        say: receives the lines of output.
        **options: fields of :class:`conformallayers.lab.experiments.options.InspectOptions`.
    """
    chosen = InspectOptions(**options)
    loaded = load_model(run, "inspect")
    shape = loaded.shape
    if not loaded.folds or shape is None:
        remedy = "Name a run of conformallayers train: a fold has no layers any more."
        got = type(loaded.module).__name__
        raise refusal(f"inspect {run}", "a network with ConformalLayers", got, remedy)
    folder = loaded.path.absolute().parent.name
    out = chosen.out or Path("results/inspect") / folder
    make_folder("inspect --out", out)
    name = dataset.name if isinstance(dataset, Dataset) else dataset or loaded.dataset
    if not isinstance(dataset, Dataset):
        training, verify = replace(loaded.training, shape=shape), chosen.verify
        dataset = load_test(name, training, chosen.data_root, verify=verify, where="inspect")
    if chosen.samples < 1:
        remedy = "Leave it out for 1000."
        raise refusal("inspect --samples", "at least 1", str(chosen.samples), remedy)
    network = str(loaded.about.get("network", type(loaded.module).__name__))
    with torch_settings(chosen.threads):
        x = as_input(dataset.test_images[: chosen.samples], shape=shape)
        found = inspect(from_images(loaded.module, shape, "inspect"), shape, x)
        say(str(found))
        shown = {"dataset": name, "samples": chosen.samples, "threads": chosen.threads}
        record = {
            **provenance(command_line(["inspect", str(run)], shown)),
            "images": len(x),
            "network": network,
            "epoch": loaded.about.get("epoch"),
            "parts": [_part_row(part) for part in found.parts],
        }
        drawn = inspection_figures(found, f"{network}, {Path(str(name)).name}")
        for title, figure in drawn.items():
            figures.save(figure, out, title)
        write_json(out / RECORD, record)
    return record


def _part_row(part: Part) -> Row:
    terms: list[Row] = []
    for index, name in enumerate(part.terms.names if part.terms else ()):
        assert part.terms is not None
        terms.append({"term": name, "share": _summary(part.terms.shares[:, index])})
        if index:
            terms[-1]["gain"] = _summary(part.terms.gains[:, index - 1])
    return {
        "path": part.path,
        "input_shape": list(part.input_shape),
        "output_shape": list(part.output_shape),
        "template_norms": _numbers(part.templates.flatten(1).norm(dim=1)),
        "terms": terms,
        "forms": [
            {
                "layers": list(form.layers),
                "trace": form.trace,
                "effective_rank": form.effective_rank,
                "top_shares": {str(count): form.share(count) for count in _TOP},
                "reach": form.reach,
                "falloff": None if form.falloff is None else _numbers(form.falloff),
                "eigenvalues": _numbers(form.eigenvalues),
            }
            for form in part.forms
        ],
    }


def _summary(values: Tensor) -> dict[str, float]:
    return {"mean": float(values.mean()), "spread": float(values.std(correction=0))}


def _numbers(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def inspection_figures(found: Inspection, title: str) -> dict[str, Figure]:
    """Draw every figure, by file name; the names of a second part's figures end in ``-2``."""
    drawn: dict[str, Figure] = {}
    for number, part in enumerate(found.parts, 1):
        suffix = "" if number == 1 else f"-{number}"
        if part.terms is not None:
            drawn[f"terms{suffix}"] = terms_figure(part.terms, title)
        if part.forms:
            drawn[f"spectrum{suffix}"] = spectrum_figure(part.forms, title)
        if part.forms and part.forms[0].falloff is not None:
            drawn[f"receptive-field{suffix}"] = falloff_figure(part.forms, title)
        if len(part.input_shape) != 3:
            continue
        for form in part.forms[:1]:
            labels = [f"{float(value):.2g}" for value in form.eigenvalues]
            about = f"{title}: first eigenvectors of Q, with eigenvalues"
            drawn[f"eigenimages{suffix}"] = image_figure(form.eigenimages, labels, about)
        # Of many rows those of the largest norm.
        order = part.templates.flatten(1).norm(dim=1).argsort(descending=True)
        rows = sorted(order[:_IMAGES].tolist())
        about = f"{title}: rows of M"
        drawn[f"templates{suffix}"] = image_figure(
            part.templates[rows], list(map(str, rows)), about
        )
    return drawn


def spectrum_figure(forms: Sequence[Form], title: str) -> Figure:
    """Draw the eigenvalues of each form on a logarithmic axis."""
    with figures.styled(6.4, 4.2) as (figure, axes):
        for number, form in enumerate(forms, 1):
            label = f"Q{number}: effective rank {form.effective_rank:.0f}"
            axes.plot(
                form.eigenvalues.clamp_min(1e-8 * form.eigenvalues.max()).cpu().numpy(), label=label
            )
        axes.set(xlabel="number", ylabel="eigenvalue of Q", yscale="log", title=title)
        axes.grid(alpha=0.3)
        figures.legend_below(figure, axes)
    return figure


def terms_figure(terms: Terms, title: str) -> Figure:
    """Draw the mean shares of the denominator's terms as one bar, with their standard deviations in the legend."""
    shares = 100 * terms.shares.cpu()
    colours = matplotlib.colormaps["cividis"](np.linspace(0, 0.9, shares.shape[1]))
    start = 0.0
    with figures.styled(7.2, 2.6) as (figure, axes):
        for name, values, colour in zip(terms.names, shares.T, colours, strict=True):
            mean = float(values.mean())
            label = f"{name}: {mean:.1f} ± {float(values.std(correction=0)):.1f} %"
            axes.barh(0, mean, left=start, color=colour, edgecolor="white", label=label)
            start += mean
        axes.set(xlabel="share of the denominator (%)", xlim=(0, 100), yticks=[])
        axes.set(title=f"{title}: mean and spread over {len(shares)} images")
        figures.legend_below(figure, axes, 3)
    return figure


def falloff_figure(forms: Sequence[Form], title: str) -> Figure:
    """Draw the energy of Q's rows by distance, on a logarithmic axis."""
    with figures.styled(6.4, 4.2) as (figure, axes):
        for number, form in enumerate(forms, 1):
            if form.falloff is not None:
                label = f"Q{number}: 99 % within {form.reach} pixels"
                axes.plot(100 * form.falloff.cpu().numpy(), marker="o", markersize=4, label=label)
        axes.set(xlabel="distance (pixels)", ylabel="share of Q's energy (%)", yscale="log")
        axes.set(title=title, ylim=(1e-10, 200))
        axes.grid(alpha=0.3)
        figures.legend_below(figure, axes)
    return figure


def image_figure(images: Tensor, labels: Sequence[str], title: str) -> Figure:
    """Draw signed images (N, C, H, W): their sums over channels, each divided by its largest value."""
    rows, columns = -(-len(images) // _COLUMNS), min(_COLUMNS, len(images))
    with figures.styled(1.15 * columns + 0.6, 1.3 * rows + 0.5, rows, columns) as (figure, grid):
        for axes in np.ravel(grid):
            axes.set_axis_off()
        for axes, image, label in zip(np.ravel(grid), images, labels, strict=False):
            values = image.sum(0).cpu().numpy()
            peak = abs(values).max() or 1.0
            axes.imshow(values / peak, cmap="PuOr", vmin=-1, vmax=1)
            axes.set_title(label, fontsize=8, pad=2)
        figure.suptitle(title, fontsize=10)
    return figure
