"""Inspect a trained network: tables and figures of its forms and templates."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from ...errors import refusal
from ...inspection import Form, Inspection, inspect
from ...utils.files import replace_file
from ..data.batches import from_images
from ..report import figures
from ..training.evaluate import has_conformal_layers
from ..training.saved_models import load_model

_COLUMNS, _IMAGES = 8, 16  # images in a row, and in a figure
_QUICK = 3072  # coefficients of an image, 3×32×32; the time grows with their cube


def run_inspect(run: Path, out: Path | None = None) -> Inspection:
    """Inspect a trained network; write tables and figures into a folder."""
    loaded = load_model(run, "inspect")
    shape = loaded.shape
    if loaded.config is None or not has_conformal_layers(loaded.module):
        remedy = "Name a run of conformallayers train: a fold has no layers any more."
        got = type(loaded.module).__name__
        raise refusal(f"inspect {run}", "a network with ConformalLayers", got, remedy)
    out = out or Path("results/inspect") / loaded.path.absolute().parent.name
    out.mkdir(parents=True, exist_ok=True)  # or fail before anything is computed
    if (size := math.prod(shape)) > _QUICK:
        print(f"The eigenvectors of Q, {size} × {size}, take minutes.", file=sys.stderr)
    found = inspect(from_images(loaded.module, shape, loaded.config.input_shape), shape)
    title = f"{loaded.about['network']}, {Path(loaded.about['dataset']).name}"
    for file, figure in inspection_figures(found, title).items():
        figures.save(figure, out, file)
    replace_file(out / "inspect.txt", [f"{found}\n".encode()])
    return found


def inspection_figures(found: Inspection, title: str) -> dict[str, Figure]:
    """Draw every figure, by file name; the names of a second part's figures end in ``-2``."""
    drawn: dict[str, Figure] = {}
    for number, part in enumerate(found.parts, 1):
        suffix = "" if number == 1 else f"-{number}"
        if part.forms:
            drawn[f"spectrum{suffix}"] = spectrum_figure(part.forms, title)
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
    with figures.styled(6.4, 4.2, legend=2) as (figure, axes):
        for number, form in enumerate(forms, 1):
            values = form.eigenvalues.clamp_min(1e-8 * form.eigenvalues.max()).cpu()
            axes.plot(values, label=f"Q{number}: effective rank {form.effective_rank:.0f}")
        axes.set(xlabel="number", ylabel="eigenvalue of Q", yscale="log", title=title)
        axes.grid(alpha=0.3)
    return figure


def image_figure(images: Tensor, labels: Sequence[str], title: str) -> Figure:
    """Draw signed images (N, C, H, W): their sums over channels, each divided by its largest value."""
    rows, columns = -(-len(images) // _COLUMNS), min(_COLUMNS, len(images))
    with figures.styled(1.15 * columns + 0.6, 1.3 * rows + 0.5, rows, columns) as (figure, grid):
        for axes in np.ravel(grid):
            axes.set_axis_off()
        for axes, image, label in zip(np.ravel(grid), images, labels, strict=False):
            values = image.sum(0).detach().double().cpu()
            peak = values.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
            axes.imshow((values / peak).numpy(), cmap="PuOr", vmin=-1, vmax=1)  # 0 is white
            axes.set_title(label, fontsize=8, pad=2)
        figure.suptitle(title, fontsize=10)
    return figure
