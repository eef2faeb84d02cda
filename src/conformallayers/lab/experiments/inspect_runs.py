"""Inspect a trained network: write inspect.json and figures of its forms, terms and templates."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
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
from ..data.sources import TrainingData, load_test
from ..report.figures import save
from ..settings import torch_settings
from ..training import checkpoint
from ..training.config import TrainConfig
from ..training.saved_models import Loaded, load_model, locate
from .insights import inspection_figures
from .options import InspectOptions
from .records import Row, kept, provenance, staged_folder

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
    path = locate(run, "inspect")
    subject = _subject(path)
    out = chosen.out or Path("results/inspect") / subject.folder
    require_folder("inspect --out", out)
    shape, initial = subject.training.shape, subject.initial
    name = dataset.name if isinstance(dataset, Dataset) else dataset or subject.training.dataset
    shown: Row = {"dataset": name, "samples": chosen.samples}
    kept_options = {**shown, "checkpoint": md5(path.read_bytes())}
    record = kept(out / RECORD, kept_options, chosen.resume)
    if record:
        say(f"{out}/{RECORD} exists already.")
        return record
    if not isinstance(dataset, Dataset):
        root, verify = chosen.data_root, chosen.verify
        dataset = load_test(name, subject.training, root, verify=verify, where="inspect")
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
            **subject.notes,
            **_results(subject.model, found, untrained, x, labels),
        }
        title = f"{subject.notes['network']}, {Path(str(name)).name}"
        _write(out, inspection_figures(found, untrained, title, dataset.classes), record)
    return record


@dataclass(frozen=True)
class _Subject:
    """A trained network to inspect.

    Args:
        model: in evaluation mode.
        training: the data set, and the shape of one sample.
        folder: the name of the folder for its record.
        notes: network, epoch and command of the training, for the record.
        initial: makes the network as it was before training; None if that is not known.
    """

    model: nn.Module
    training: TrainingData
    folder: str
    notes: Row
    initial: Callable[[], nn.Module] | None = None


def _subject(path: Path) -> _Subject:
    """Read a checkpoint, or a model with notes, such as one of the zoo."""
    archive = open_archive(path)
    if archive.document["kind"] != "checkpoint":
        return _shipped(load_model(path, "inspect"))
    stored = checkpoint.read(archive)
    config, model = checkpoint.trained(stored)
    labels = None if config.labels is None else tuple(config.labels)
    training = TrainingData(config.dataset, labels, config.pictures, config.input_shape)
    notes = {"network": config.network_name, "epoch": stored.state.epoch}
    notes["trained"] = config.command({})
    folder = path.absolute().parent.name
    return _Subject(model, training, folder, notes, lambda: _initial(config))


def _shipped(loaded: Loaded) -> _Subject:
    shape, dataset = loaded.shape, loaded.dataset
    if not loaded.folds or shape is None or dataset is None:
        expected = "a run, a checkpoint, or a model with ConformalLayers and a known data set"
        got = "a model without ConformalLayers"
        remedy = "Name a run, or a network of the zoo: conformallayers zoo lists them."
        if isinstance(loaded.module, Folded):
            got, remedy = "a fold", "Name what it was folded from: a fold has no layers any more."
        elif loaded.folds:
            got = "a model without the name of one"
        raise refusal(f"inspect {loaded.path}", expected, got, remedy)
    about = loaded.about
    notes = {
        "network": str(about.get("network", type(loaded.module).__name__)),
        "epoch": about.get("epoch"),
        "trained": about.get("command"),
    }
    training = TrainingData(dataset, loaded.labels, loaded.pictures, shape)
    model = from_images(loaded.module, shape, "inspect")
    return _Subject(model, training, loaded.path.stem, notes)


def _results(
    model: nn.Module, found: Inspection, untrained: Inspection | None, x: Tensor, labels: Tensor
) -> Row:
    """Return the numbers of a record: those of the trained and, if it is known, of the untrained network."""
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
    the denominator of the conformal part is replaced. Of a network of stages only the first is returned: its
    denominators are inside.
    """
    if part.stage is not None:
        return {"network": _accuracy(model, "", x, labels, torch.ones(len(x), dtype=torch.float64))}
    terms = part.terms
    if terms is None:
        raise refusal("accuracies(part=...)", "terms", "none", "Inspect the model with data=x.")
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
