"""Save a network as one file without pickle, and load it again with the same numbers."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import __version__
from ..errors import refusal, shape_text
from ..folding.folded import Folded
from ..utils.fingerprint import fingerprint
from .archive import (
    FOLDED_DTYPES,
    FORMAT,
    Archive,
    Entry,
    damaged,
    open_archive,
    read_notes,
    unbuildable,
    write_archive,
)
from .chain import chain_of
from .modules import Reader, Writer
from .types import DTYPES
from .values import decode, encode

_FOLDED = 'Fold with strategy="dense", which keeps no layers, or use torch.save.'
_MODEL = "Save its weights: safetensors.torch.save_file(model.state_dict(), path)."
# Endings that promise another format.
_OTHERS = {
    ".onnx": "For ONNX there is cl.export_onnx.",
    **dict.fromkeys((".c", ".h"), "For C there is cl.export_c."),
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".pkl"), "For pickles there is torch.save."),
    **dict.fromkeys((".npy", ".npz"), "conformallayers.numpy loads safetensors files."),
}
_TORCH = {name: dtype for dtype, name in DTYPES.items()}
_FLOATING = {name: getattr(torch, name) for name in FOLDED_DTYPES}


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
        about: anything else that JSON can hold, by name; None keeps what a fold has. ``docs/files.md``
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
    folded = isinstance(model, Folded)
    writer = Writer(_FOLDED if folded else _MODEL)
    dtypes = [tensor.dtype for tensor in model.parameters()]
    dtype = model.dtype if isinstance(model, Folded) else next(iter(dtypes), None)
    document: dict[str, Any] = {
        "format": FORMAT,
        "library": __version__,
        "kind": "folded" if folded else "model",
        "input_shape": None,
        "output_shape": None,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "strategy": None,
        "certificate": None,
        "origin": fingerprint(model),
    }
    if isinstance(model, Folded):
        if model.dtype not in _FLOATING.values():
            remedy = "Fold with dtype=torch.float32."
            raise refusal("save(folded)", "a dtype that files have", str(model.dtype), remedy)
        certificate = encode(model.certificate, "certificate", writer.put)
        chain = chain_of(model, "save(folded)", ", or use torch.save")
        body = nn.Sequential(*chain) if isinstance(model.body, fx.GraphModule) else model.body
        document |= {
            "input_shape": list(model.input_shape),
            "output_shape": list(model.output_shape),
            "strategy": model.strategy,
            "certificate": certificate,
            "origin": model.origin,
            "piece": model.piece,
            "plans": [
                [label, encode(plan, label, writer.put)] for label, plan in model.plans.items()
            ],
            "structure": writer.describe(body, "body"),
        }
    else:
        document |= {"training": model.training, "structure": writer.describe(model, "")}
    document |= _notes(model, labels, about)
    _check_buildable(document, writer)
    write_archive(path, document, writer.arrays)


def _notes(
    model: nn.Module, labels: Sequence[str] | None, about: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return what a file says beside the network, checked; what nobody gave is left out."""
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
        shape = model.output_shape if isinstance(model, Folded) else None
        read_notes(found, shape)
    except (TypeError, ValueError) as error:
        expected = "one word for every output, and numbers and words that JSON has"
        remedy = 'Give labels=["cat", "dog"], about={"source": "…"}.'
        raise refusal("save(labels=..., about=...)", expected, str(error), remedy) from error
    return found


def _check_buildable(document: dict[str, Any], writer: Writer) -> None:
    """Refuse now what could not be built again later, such as a layer with a buffer of one's own."""
    entries = {name: Entry(*array[:2], 0, 0) for name, array in writer.arrays.items()}
    draft = Archive("", document, entries, {}, 0)
    try:
        _restored(draft, _announced(draft), torch.device("meta"))
    except Exception as error:
        got = f"one where this fails: {error}"
        expected = "a model that its settings and tensors make again"
        raise refusal("save", expected, got, writer.remedy) from error


def load(path: str | os.PathLike[str]) -> nn.Module:
    """Load what :func:`save` wrote: a :class:`Folded` or a model, on the CPU, with equal numbers.

    The header is checked before an array is read: lengths, places, dtypes, shapes, and that they make
    a network of the shapes it claims. Every byte is checked by a SHA-256. That finds damage; it does not tell who
    wrote the file.

    Args:
        path: of the file.
    """
    archive = open_archive(path)
    try:
        _restored(archive, _announced(archive), torch.device("meta"))
    except Exception as error:
        raise unbuildable(archive.path, error) from error
    try:
        return _restored(archive, _stored(archive), torch.device("cpu"))
    except Exception as error:
        raise unbuildable(archive.path, error) from error


def _restored(archive: Archive, get: Callable[[str], Tensor], device: torch.device) -> nn.Module:
    document = archive.document
    reader = Reader(get)
    if document["kind"] == "model":
        model = reader.build(document["structure"], "").train(document["training"] is True)
        for module, mode in reader.modes:
            module.training = mode
    else:
        model = _folded(document, reader, device)
        if device.type == "meta":
            _check_shapes(archive.path, model)
    if reader.used != set(archive.entries):
        damaged(archive.path, "arrays that belong to no layer")
    return model


def _folded(document: dict[str, Any], reader: Reader, device: torch.device) -> Folded:
    plans = {str(label): decode(plan, reader.take) for label, plan in document["plans"]}
    body = reader.build(document["structure"], "body")
    shapes = tuple(document["input_shape"]), tuple(document["output_shape"])
    dtype, origin = _FLOATING[document["dtype"]], document["origin"]
    folded = Folded(body, plans, shapes, dtype, device, document["piece"], origin)
    claimed = document["strategy"], decode(document["certificate"], reader.take)
    if claimed != (folded.strategy, folded.certificate):
        raise ValueError("a strategy or a certificate that no part has")
    folded.labels, folded.about = read_notes(document, folded.output_shape)
    return folded


def _check_shapes(path: str, folded: Folded) -> None:
    """Follow the shapes of a few samples, without values, through arrays that are not there yet."""
    # Not one sample: an axis of the batch could pass for another one.
    x = torch.empty(3, *folded.input_shape, dtype=folded.dtype, device="meta")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the layers have warned when they were folded
        shape = tuple(folded(x).shape)
    if shape != (3, *folded.output_shape):
        damaged(path, f"arrays that give {shape_text(shape[1:])}")


def _announced(archive: Archive) -> Callable[[str], Tensor]:
    """Return tensors as the header announces them, without memory."""

    def get(name: str) -> Tensor:
        entry = archive.entries[name]
        return torch.empty(entry.shape, dtype=_TORCH[entry.dtype], device="meta")

    return get


def _stored(archive: Archive) -> Callable[[str], Tensor]:
    """Return the arrays, each read into memory of its own."""

    def get(name: str) -> Tensor:
        entry = archive.entries[name]
        tensor = torch.empty(entry.shape, dtype=_TORCH[entry.dtype])
        if prod(entry.shape):
            archive.fill(name, tensor.view(-1).view(torch.uint8).numpy().data)
        return tensor

    return get
