"""Draw an inspection: spectrum, terms, receptive field, eigenimages and templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ...inspection import Form, Inspection, Terms
from ..report.figures import COLOURS, STYLE, legend_below, plain_ticks, styled

_SIZE = (6.4, 4.2)
_COLUMNS = 8  # images in a row
_IMAGES = 16  # most images in a figure, per form
_TERMS = 8  # most terms of the bar; further ones are drawn as one


def inspection_figures(
    found: Inspection, untrained: Inspection | None, title: str, classes: int
) -> dict[str, Figure]:
    """Draw every figure, by file name; the names of a second part's figures end in ``-2``."""
    figures: dict[str, Figure] = {}
    for number, part in enumerate(found.parts, 1):
        before = () if untrained is None else untrained.parts[number - 1].forms
        suffix = "" if number == 1 else f"-{number}"
        if part.terms is not None:
            figures[f"terms{suffix}"] = terms_figure(part.terms, title)
        if part.forms:
            figures[f"spectrum{suffix}"] = spectrum_figure(part.forms, before, title)
            if part.forms[0].falloff is not None:
                figures[f"receptive-field{suffix}"] = falloff_figure(part.forms, title)
        if len(part.input_shape) == 3:
            if part.forms:
                about = f"{title}: first eigenvectors of Q, with eigenvalues"
                figures[f"eigenimages{suffix}"] = image_figure(
                    *_leading_eigenimages(part.forms), about
                )
            rows, labels = _strongest_templates(part.templates)
            unit = "class" if len(part.templates) == classes else "unit of the next layer"
            about = f"{title}: rows of M, one for each {unit}"
            figures[f"templates{suffix}"] = image_figure(rows, labels, about)
    return figures


def spectrum_figure(forms: Sequence[Form], untrained: Sequence[Form], title: str) -> Figure:
    """Draw the eigenvalues of each form after training, and before if that is known, on a logarithmic axis."""
    with styled(*_SIZE) as (figure, axes):
        for found, style, when in ((forms, "-", "trained"), (untrained, ":", "untrained")):
            for name, colour, form in zip(_names(forms), _colours(len(forms)), found, strict=False):
                label = f"{name}{when}: effective rank {form.effective_rank:.0f}"
                values = form.eigenvalues.cpu().numpy()
                axes.plot(range(1, len(values) + 1), values, style, color=colour, label=label)
        values = np.concatenate([form.eigenvalues.cpu().numpy() for form in (*forms, *untrained)])
        largest, smallest = values.max(initial=0) or 1.0, values[values > 0].min(initial=1)
        axes.set(xlabel="number", ylabel="eigenvalue of Q", yscale="log", title=title)
        axes.set_ylim(max(smallest / 2, largest * 1e-8), largest * 2)
        axes.grid(alpha=0.3)
        legend_below(figure, axes)
    return figure


def terms_figure(terms: Terms, title: str) -> Figure:
    """Draw the mean shares of the denominator's terms as one bar, with their standard deviations in the legend."""
    shares = 100 * terms.shares.cpu()
    names = ["‖x‖", *(f"activation {number}" for number in range(1, shares.shape[1]))]
    if len(names) > _TERMS:  # terms fall off: the last ones are too thin to be seen
        names = [*names[: _TERMS - 1], f"activations {_TERMS - 1} to {len(names) - 1}"]
        first, last = shares[:, : _TERMS - 1], shares[:, _TERMS - 1 :]
        shares = torch.cat([first, last.sum(1, keepdim=True)], dim=1)
    means, spreads = shares.mean(0).tolist(), shares.std(0, correction=0).tolist()
    start = 0.0
    with styled(7.2, 2.6) as (figure, axes):
        for name, mean, spread, colour in zip(
            names, means, spreads, _colours(len(names)), strict=True
        ):
            label = f"{name}: {mean:.1f} ± {spread:.1f} %"
            axes.barh(0, mean, left=start, color=colour, edgecolor="white", label=label)
            start += mean
        axes.set(xlabel="share of the denominator (%)", xlim=(0, 100), yticks=[])
        axes.set(title=f"{title}: mean and spread over {len(shares)} images")
        axes.spines["left"].set_visible(False)
        legend_below(figure, axes, 3)
    return figure


def falloff_figure(forms: Sequence[Form], title: str) -> Figure:
    """Draw the energy of Q's rows by distance, on a logarithmic axis."""
    with styled(*_SIZE) as (figure, axes):
        for name, form, colour in zip(_names(forms), forms, _colours(len(forms)), strict=True):
            if form.falloff is None:
                continue
            values = 100 * form.falloff.cpu().numpy()
            last = int(np.nonzero(values > 1e-10)[0].max(initial=0))
            label = f"{name}99 % within {form.reach} pixels"
            axes.plot(values[: last + 1], color=colour, marker="o", markersize=4, label=label)
        axes.set(xlabel="distance (pixels)", ylabel="share of Q's energy (%)", yscale="log")
        axes.set(title=title)
        plain_ticks(axes.yaxis)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        legend_below(figure, axes)
    return figure


def image_figure(images: Sequence[Tensor], labels: Sequence[str], title: str) -> Figure:
    """Draw signed images (C, H, W): their sums over channels, each divided by its largest value."""
    rows = -(-len(images) // _COLUMNS)
    columns = min(_COLUMNS, len(images))
    with matplotlib.rc_context({**STYLE, "font.size": 8}):
        figure = Figure(figsize=(1.15 * columns + 0.6, 1.3 * rows + 0.5), layout="compressed")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        shown: Any = None
        for axes in grid:
            axes.set_axis_off()
        for axes, image, label in zip(grid, images, labels, strict=False):
            values = image.sum(0).cpu().numpy()
            peak = abs(values).max() or 1.0
            shown = axes.imshow(values / peak, cmap="PuOr", vmin=-1, vmax=1)
            axes.set_title(label, fontsize=8, pad=2)
        bar = figure.colorbar(shown, ax=list(grid), shrink=0.8)
        bar.set_label("value / largest value")
        figure.suptitle(title, fontsize=10)
    return figure


def _colours(count: int) -> list[Any]:
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    return list(matplotlib.colormaps["cividis"](np.linspace(0, 0.9, count)))


def _names(forms: Sequence[Form]) -> list[str]:
    """Return the prefix of each form in a legend: its number, or nothing for a single form."""
    return [""] if len(forms) == 1 else [f"Q{number}, " for number in range(1, len(forms) + 1)]


def _leading_eigenimages(forms: Sequence[Form]) -> tuple[list[Tensor], list[str]]:
    """Return the first eigenvectors and their eigenvalues as labels; a row per form if several."""
    count = _IMAGES if len(forms) == 1 else _COLUMNS
    images, labels = [], []
    for number, form in enumerate(forms, 1):
        name = "" if len(forms) == 1 else f"Q{number}: "
        shown = form.eigenimages[:count]
        images += list(shown)
        labels += [f"{name}{float(value):.2g}" for value in form.eigenvalues[: len(shown)]]
    return images, labels


def _strongest_templates(templates: Tensor) -> tuple[list[Tensor], list[str]]:
    """Return the templates and their numbers as labels; if many, those of largest norm."""
    order = list(range(len(templates)))
    if len(templates) > _IMAGES:
        norms = templates.flatten(1).norm(dim=1)
        order = norms.argsort(descending=True)[:_IMAGES].tolist()
    return [templates[i] for i in order], [str(i) for i in order]
