"""Save a fold or a model as one safetensors file, and load it with the same numbers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..errors import refusal
from ..recipe.archive import FORMAT, Archive, Entry, open_archive, unbuildable, write_archive
from ..recipe.document import describe
from ..recipe.file import DTYPES, FoldDocument, read_fold, read_notes
from ..recipe.layer_operations import Call
from ..recipe.recipe import Recipe
from ..utils.fingerprint import fingerprint, tensor_bytes
from ..utils.quiet import ignored_warnings
from .folded import Folded
from .model_files import STORED_DTYPES, ModelReader, ModelWriter
from .plan import Candidate, Plan

# Endings of other formats.
_OTHERS = {
    ".onnx": "For ONNX there is cl.export_onnx.",
    **dict.fromkeys((".c", ".h"), "For C there is cl.export_c."),
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".pkl"), "For pickles there is torch.save."),
    **dict.fromkeys((".npy", ".npz"), "conformallayers.numpy loads safetensors files."),
}
_TORCH = {stored: dtype for dtype, stored in STORED_DTYPES.items()}
Arrays = dict[str, tuple[str, tuple[int, ...], Any]]


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    labels: Sequence[str] | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Save a folded network, or a model, as one safetensors file; no pickle.

    The file is written beside its place and moved there when it is whole, so that neither a full
    disk nor a kill leaves half of it or harms the file that was there.

    Args:
        model: a :class:`Folded`; or a :class:`ConformalLayers`, an ``nn.Sequential`` of supported
            layers, or a class of :mod:`conformallayers.networks`. Other classes are refused by name:
            a file holds no code.
        path: of the file.
        labels: a name for every output; None keeps those that a fold has.
        about: anything else that JSON can hold, by name; None keeps what a fold has. ``docs/deploy.md``
            has the names that the command line looks at.

    Examples:
        >>> import conformallayers as cl, tempfile
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro(), cl.Flatten())
        >>> folded, x = cl.fold(model, (1, 8, 8)), torch.rand(2, 1, 8, 8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cl.save(folded, f"{folder}/net.safetensors")
        ...     loaded = cl.load(f"{folder}/net.safetensors")
        >>> torch.equal(loaded(x), folded(x))
        True
    """
    if not isinstance(model, nn.Module):
        raise refusal("save(model)", "an nn.Module", type(model).__name__, "Pass the model itself.")
    ending = os.path.splitext(os.fspath(path))[1].lower()
    if ending in _OTHERS:
        remedy = f"{_OTHERS[ending]} Files of cl.save end with .safetensors."
        raise refusal("save(path)", "a safetensors file", repr(os.fspath(path)), remedy)
    described, arrays = _fold(model) if isinstance(model, Folded) else _model(model)
    head = {"format": FORMAT, "library": __version__}
    document = head | described | _notes(model, labels, about)
    entries = {name: Entry(*array[:2], 0, 0) for name, array in arrays.items()}
    _check_readable(Archive("", document, entries, {}, 0))
    write_archive(path, document, arrays)


def load(path: str | os.PathLike[str]) -> nn.Module:
    """Load what :func:`save` wrote: a :class:`Folded` or a model, on the CPU, with equal numbers.

    The header is checked before an array is read: lengths, places, dtypes, every operation and the
    shapes of its values. Every byte is checked by a SHA-256. That finds damage; it does not tell who
    wrote the file.

    Args:
        path: of the file.
    """
    return read_network(open_archive(path))


def read_network(archive: Archive) -> nn.Module:
    """Read the fold or model of an open archive, as :func:`load` does."""
    kind = archive.document["kind"]
    if kind == "checkpoint":
        remedy = "conformallayers fold turns it into a file of cl.save."
        where = f"load({archive.path})"
        raise refusal(where, "a file of cl.save", "a training checkpoint", remedy)
    try:
        if kind == "folded":
            return _read_fold(archive)
        read_notes(archive.document, None)
        _read_model(archive, stored=False)
        return _read_model(archive, stored=True)
    except Exception as error:
        raise unbuildable(archive.path, error) from error


# -- folds ------------------------------------------------------------------------------------------


def _fold(folded: Folded) -> tuple[dict[str, Any], Arrays]:
    """Return the document of a fold and its arrays; refuse operations and dtypes that files lack."""
    recipe, dtype = folded.recipe, str(folded.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        remedy = "Fold with dtype=torch.float32."
        raise refusal("save(folded)", "a dtype that files have", str(folded.dtype), remedy)
    _refuse_code(recipe)
    arrays: Arrays = {}
    for name, array in recipe.constants.items():
        if array.is_meta:
            got, remedy = f"{name} on meta", "Give it its values first."
            raise refusal("save(folded)", "constants with values", got, remedy)
        # Devices without float64 hold wide constants in float32.
        array = array.cpu().double() if name in recipe.wide else array
        arrays[name] = STORED_DTYPES[array.dtype], tuple(array.shape), tensor_bytes(array)
    document = {
        "kind": "folded",
        "dtype": dtype,
        "strategy": folded.strategy,
        "origin": folded.origin,
        "recipe": describe(recipe),
        "parts": [_part(path, plan) for path, plan in folded.plans.items()],
    }
    return document, arrays


def _refuse_code(recipe: Recipe) -> None:
    """Refuse operations that call a module: a file holds no code."""
    for operation in recipe.operations:
        if isinstance(operation, Call):
            expected = "operations that a file can describe"
            raise refusal("save(folded)", expected, operation.what, operation.remedy)


def _part(path: str, plan: Plan) -> dict[str, Any]:
    return {
        "path": path,
        "strategy": plan.strategy,
        "reason": plan.reason,
        "absorbed": plan.absorbed,
        "advice": list(plan.advice),
        "operations": None if plan.operations is None else list(plan.operations),
        "candidates": [
            {
                "strategy": item.name,
                "multiply_adds": item.multiply_adds,
                "bytes": item.bytes,
                "seconds": None if math.isinf(item.seconds) else item.seconds,
                "note": item.note,
            }
            for item in plan.candidates
        ],
    }


def _read_fold(archive: Archive) -> Folded:
    """Read the arrays of a fold that has been checked, and run an empty batch through it."""
    document = read_fold(archive)
    recipe = document.recipe.with_constants(lambda name, _: read_tensor(archive, name))
    recipe.check_values()
    folded = Folded(recipe, getattr(torch, document.dtype), _plans(document), document.origin)
    folded.labels, folded.about = document.labels, document.about
    with torch.no_grad(), ignored_warnings():
        y = folded(torch.empty(0, *folded.input_shape, dtype=folded.dtype))
    if tuple(y.shape) != (0, *folded.output_shape) or y.dtype != folded.dtype:
        raise ValueError(f"it gives {y.dtype} of shape {tuple(y.shape[1:])}")
    return folded


def _plans(document: FoldDocument) -> dict[str, Plan]:
    found = {}
    for part in document.parts:
        candidates = tuple(
            Candidate(c["strategy"], c["multiply_adds"], c["bytes"], c["seconds"], c["note"])
            for c in part["candidates"]
        )
        found[part["path"]] = Plan(
            part["strategy"],
            part["reason"],
            candidates,
            part["absorbed"],
            part["advice"],
            part["operations"],
        )
    return found


# -- models -----------------------------------------------------------------------------------------


def _model(model: nn.Module) -> tuple[dict[str, Any], Arrays]:
    """Return the document of a model and its arrays."""
    dtype = next((tensor.dtype for tensor in model.parameters()), None)
    writer = ModelWriter()
    document = {
        "kind": "model",
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "origin": fingerprint(model),
        "training": model.training,
        "model": writer.describe(model, ""),
    }
    return document, writer.arrays


def _read_model(archive: Archive, *, stored: bool) -> nn.Module:
    """Build a model, with tensors from the file if ``stored``, else on the meta device."""
    reader = ModelReader(lambda name: (read_tensor if stored else _meta_tensor)(archive, name))
    document = archive.document
    model = reader.build(document["model"], "").train(document.get("training") is True)
    for module, mode in reader.modes:
        module.training = mode
    if reader.tensors.keys() != archive.entries.keys():
        raise ValueError("arrays that belong to no layer")
    return model


# -- both -------------------------------------------------------------------------------------------


def _notes(
    model: nn.Module, labels: Sequence[str] | None, about: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the checked labels and notes of a file, as far as they are given."""
    found: dict[str, Any] = {}
    if isinstance(labels, str):
        got = f"the word {labels!r}"
        raise refusal("save(labels=...)", "a list of words", got, "Put it into a list.")
    if isinstance(model, Folded):
        labels = model.labels if labels is None else labels
        about = model.about if about is None else about
    if labels is not None:
        found["labels"] = list(labels)
    if about is not None:
        found["about"] = dict(about)
    try:
        json.dumps(found, allow_nan=False)
        read_notes(found, model.output_shape if isinstance(model, Folded) else None)
    except (TypeError, ValueError) as error:
        expected = "one word for every output, and numbers and words that JSON has"
        remedy = 'Give labels=["cat", "dog"], about={"source": "…"}.'
        raise refusal("save(labels=..., about=...)", expected, str(error), remedy) from error
    return found


def _check_readable(draft: Archive) -> None:
    """Refuse a document that could not be loaded, such as of a layer with an extra buffer."""
    folded = draft.document["kind"] == "folded"
    try:
        if folded:
            read_fold(draft)
        else:
            _read_model(draft, stored=False)
    except Exception as error:
        got = f"one where this fails: {error.__cause__ if folded else error}"
        expected, remedy = "a model that its settings and tensors make again", ModelWriter.remedy
        if folded:
            expected, remedy = "a recipe that can be read back", "Use torch.save."
        raise refusal("save", expected, got, remedy) from error


def _meta_tensor(archive: Archive, name: str) -> Tensor:
    """Return an array of the header on the meta device."""
    entry = archive.entries[name]
    return torch.empty(entry.shape, dtype=_TORCH[entry.dtype], device="meta")


def read_tensor(archive: Archive, name: str) -> Tensor:
    """Read an array of an archive."""
    entry = archive.entries[name]
    tensor = torch.empty(entry.shape, dtype=_TORCH[entry.dtype])
    if prod(entry.shape):
        archive.fill(name, tensor.view(-1).view(torch.uint8).numpy().data)
    return tensor
