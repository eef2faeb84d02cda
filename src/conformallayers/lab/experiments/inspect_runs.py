"""Inspect a trained network: write inspect.json and figures of its forms, terms and templates."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from ...errors import refusal
from ...folding.folded import Folded
from ...inspection import Form, Inspection, Part, Terms, inspect
from ...nn.container import layer_by_layer
from ...recipe.archive import open_archive
from ...utils.files import write_json
from ..checks import command_line, require_folder
from ..data.batches import as_input
from ..data.datasets import Dataset
from ..data.files import md5
from ..data.image_adapter import from_images
from ..data.sources import load_test
from ..report.figures import save
from ..settings import torch_settings
from ..training.config import TrainConfig, make_config
from ..training.saved_models import Loaded, load_model
from .insights import inspection_figures
from .options import InspectOptions
from .records import Row, earlier_record, provenance, staged_folder

RECORD = "inspect.json"
_SAMPLES = 1000  # default number of images
_TOP = (1, 10, 100)  # numbers of eigenvalues whose share is written
_BATCH = 500


def run_inspect(
    run: str | os.PathLike[str],
    dataset: str | Dataset | None = None,
    *,
    say: Callable[[str], object] = print,
    **options: Any,
) -> Row:
    """Inspect a trained network on the first test images of a data set; write a folder, return its record.

    The files are written to a temporary folder and moved at the end, inspect.json last.

    Args:
        run: the folder of a run, a checkpoint, a name of the zoo, or another model of :func:`conformallayers.save`.
        dataset: a name or a data set; None means that of the training.
        say: receives the lines of output.
        **options: fields of :class:`conformallayers.lab.experiments.options.InspectOptions`.
    """
    chosen = InspectOptions(**options)
    loaded = load_model(run, "inspect")
    subject = _subject(loaded)
    out = chosen.out or Path("results/inspect") / subject.folder
    require_folder("inspect --out", out)
    shape, initial = subject.shape, subject.initial
    name = dataset.name if isinstance(dataset, Dataset) else dataset or loaded.dataset
    network = str(loaded.about.get("network", type(loaded.module).__name__))
    shown: Row = {"dataset": name, "samples": chosen.samples}
    kept_options = {**shown, "checkpoint": md5(loaded.path.read_bytes())}
    record = earlier_record(out / RECORD, kept_options, chosen.resume)
    if record:
        say(f"{out}/{RECORD} exists already.")
        return record
    if not isinstance(dataset, Dataset):
        training, verify = replace(loaded.training, shape=shape), chosen.verify
        dataset = load_test(name, training, chosen.data_root, verify=verify, where="inspect")
    count = _sample_count(chosen.samples, len(dataset.test_labels))
    with torch_settings(chosen.threads):
        images, labels = dataset.test_images[:count], dataset.test_labels[:count]
        x = as_input(images, shape=shape)
        found = inspect(subject.model, shape, x)
        untrained = None if initial is None else inspect(initial(), shape, x)
        say(str(found))
        record = {
            **provenance(command_line(["inspect", str(run)], {**shown, "threads": chosen.threads})),
            "options": kept_options,
            "images": count,
            "network": network,
            "epoch": loaded.about.get("epoch"),
            "trained": subject.command,
            **_results(subject.model, found, untrained, x, labels),
        }
        title = f"{network}, {Path(str(name)).name}"
        _write(out, inspection_figures(found, untrained, title, dataset.classes), record)
    return record


@dataclass(frozen=True)
class _Subject:
    """A trained network to inspect.

    Args:
        model: in evaluation mode.
        shape: of one image.
        folder: the name of the folder for its record.
        command: of the training, if it is known.
        initial: makes the network as it was before training; None if that is not known.
    """

    model: nn.Module
    shape: tuple[int, ...]
    folder: str
    command: str | None
    initial: Callable[[], nn.Module] | None = None


def _subject(loaded: Loaded) -> _Subject:
    """Prepare the network of a checkpoint, or a model with notes, such as one of the zoo."""
    document, path = open_archive(loaded.path).document, loaded.path
    if document["kind"] == "checkpoint":
        config = make_config(**{**document["state"]["config"], "device": "cpu"})
        folder, command = path.absolute().parent.name, config.command({})
        initial = partial(_initial, config)
        return _Subject(loaded.module, config.input_shape, folder, command, initial)
    known = loaded.shape
    if not loaded.folds or known is None or loaded.dataset is None:
        expected = "a run, a checkpoint, or a model with ConformalLayers and a known data set"
        got = "a model without ConformalLayers"
        remedy = "Name a run, or a network of the zoo: conformallayers zoo lists them."
        if isinstance(loaded.module, Folded):
            got, remedy = "a fold", "Name what it was folded from: a fold has no layers any more."
        elif loaded.folds:
            got = "a model without the name of one"
        raise refusal(f"inspect {path}", expected, got, remedy)
    model = from_images(loaded.module, known, "inspect")
    return _Subject(model, known, path.stem, loaded.about.get("command"))


def _results(
    model: nn.Module, found: Inspection, untrained: Inspection | None, x: Tensor, labels: Tensor
) -> Row:
    """Return the measured part of a record, for the trained network and, if known, the untrained one."""
    before = () if untrained is None else untrained.parts
    return {
        "image_frequency": _summary(frequencies(x)),
        "parts": [
            {**_part_row(part, labels), "accuracy": accuracies(model, part, x, labels)}
            for part in found.parts
        ],
        "untrained": [_part_row(part, labels) for part in before],
    }


def _initial(config: TrainConfig) -> nn.Module:
    """Return the network as it was before training."""
    with torch_settings(seed=config.seed):
        return config.build()


def _write(out: Path, figures: dict[str, Figure], record: Row) -> None:
    with staged_folder(out, "inspect --out") as folder:
        for name, figure in figures.items():
            save(figure, folder, name)
        write_json(folder / RECORD, record)


def _part_row(part: Part, labels: Tensor) -> Row:
    row: Row = {
        "path": part.path,
        "input_shape": list(part.input_shape),
        "output_shape": list(part.output_shape),
        "forms": [_form_row(form) for form in part.forms],
        "template_norms": _numbers(part.templates.flatten(1).norm(dim=1)),
    }
    return row if part.terms is None else {**row, "terms": _term_rows(part.terms, labels)}


def _form_row(form: Form) -> Row:
    images: Row = {}
    if form.eigenimages.dim() == 4:
        images["eigenimage_frequencies"] = _numbers(frequencies(form.eigenimages))
        images["eigenimage_grey_shares"] = _numbers(_grey_shares(form.eigenimages))
    return {
        "layers": list(form.layers),
        "rule": form.rule.name,
        "trace": form.trace,
        "effective_rank": form.effective_rank,
        "top_shares": {str(count): form.share(count) for count in _TOP},
        "reach": form.reach,
        "falloff": None if form.falloff is None else _numbers(form.falloff),
        **images,
        "eigenvalues": _numbers(form.eigenvalues),
    }


def _term_rows(terms: Terms, labels: Tensor) -> list[Row]:
    rows: list[Row] = []
    for index, name in enumerate(terms.names):
        rows.append({"term": name, "share": _summary(terms.shares[:, index])})
        if index:
            gains = terms.gains[:, index - 1]
            rows[-1]["gain"] = {**_summary(gains), **by_class(gains, labels)}
    return rows


def by_class(values: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return the mean of each class, and the share of the variance between classes.

    Examples:
        >>> by_class(torch.tensor([1.0, 3.0, 5.0, 7.0]), torch.tensor([0, 0, 1, 1]))
        {'by_class': {'0': 2.0, '1': 6.0}, 'between_classes': 0.8}
    """
    means = torch.zeros_like(values)
    found = {}
    for label in labels.unique().tolist():
        mean = values[labels == label].mean()
        means[labels == label] = mean
        found[str(label)] = float(f"{float(mean):.6g}")
    between, total = (float(v.var(correction=0)) for v in (means, values))
    return {"by_class": found, "between_classes": between / total if total else 0.0}


def frequencies(images: Tensor) -> Tensor:
    """Return the energy-weighted mean frequency in cycles per pixel, (N, C, H, W) → (N,).

    Examples:
        >>> stripes = torch.tensor([[1.0, -1.0], [1.0, 1.0]]).repeat(1, 4)  # of width 1; constant
        >>> frequencies(stripes[:, None, None, :].expand(-1, 1, 8, -1))
        tensor([0.5000, 0.0000])
    """
    energy: Tensor = torch.fft.fft2(images).abs().square().sum(1)
    down, across = (torch.fft.fftfreq(n, dtype=energy.dtype) for n in images.shape[2:])
    radius = (down[:, None].square() + across.square()).sqrt()
    mean: Tensor = (energy * radius).sum((1, 2)) / energy.sum((1, 2))
    return mean


def _grey_shares(images: Tensor) -> Tensor:
    """Return the share of the energy that equal channels carry, (N, C, H, W) → (N,)."""
    grey = images.mean(1).square().sum((1, 2)) * images.shape[1]
    return grey / images.square().sum((1, 2, 3))


def _summary(values: Tensor) -> dict[str, float]:
    return {"mean": float(values.mean()), "spread": float(values.std(correction=0))}


def _numbers(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def accuracies(model: nn.Module, part: Part, x: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the accuracy as trained, with a multiple of I for every Q, and with a constant D.

    The multiple is the mean of ``xᵀQx / ‖x‖²`` over the images, the constant the mean of D. Only
    the denominator of the conformal part is replaced. For a stage only the accuracy as trained is returned:
    its denominator is not that of the output.
    """
    if part.stage is not None:
        return {"network": _accuracy(model, "", x, labels, torch.ones(len(x), dtype=torch.float64))}
    terms = part.terms
    if terms is None:
        raise refusal("accuracies(part=...)", "terms", "none", "Inspect the model with data=x.")
    # Replay the recurrence of the denominator with c·‖x‖² in place of every xᵀQx.
    isotropic = terms.norms
    rules = {path: form.rule for form in part.forms for path in form.layers}
    for path, gain in zip(terms.names[1:], terms.gains.mean(0), strict=True):
        isotropic = rules[path].advance(isotropic, gain * terms.norms**2, 1.0)
    exact = terms.denominators
    factors = {
        "network": torch.ones_like(exact),
        "multiple_of_identity": exact / isotropic,
        "constant_denominator": exact / exact.mean(),
    }
    return {name: _accuracy(model, part.path, x, labels, f) for name, f in factors.items()}


def _accuracy(model: nn.Module, path: str, x: Tensor, labels: Tensor, factors: Tensor) -> float:
    """Return the accuracy with the output of one part multiplied by a factor per sample."""
    rest = iter(factors.split(_BATCH))

    def scaled(module: nn.Module, inputs: Any, y: Tensor) -> Tensor:
        result: Tensor = y * next(rest).view(-1, *[1] * (y.dim() - 1))
        return result

    copied = copy.deepcopy(model).double().eval()
    copied.get_submodule(path).register_forward_hook(scaled)
    right = 0
    with torch.no_grad(), layer_by_layer():
        for images, wanted in zip(x.split(_BATCH), labels.split(_BATCH), strict=True):
            right += int((copied(images.double()).argmax(1) == wanted).sum())
    return right / len(labels)


def _sample_count(samples: int | None, available: int) -> int:
    count = min(_SAMPLES, available) if samples is None else samples
    if not 1 <= count <= available:
        expected, remedy = f"a whole number from 1 to {available}", "Leave it out."
        raise refusal("inspect --samples", expected, str(samples), remedy)
    return count
