"""Run folded networks with numpy alone: no torch is imported, nothing is compiled.

    import conformallayers.numpy as cln
    net = cln.load("net.safetensors")
    y = net(x)

A batch of numbers goes in, a batch of numbers comes out.
"""

from __future__ import annotations

import os
from math import prod
from typing import Any

import numpy as np

from ..errors import refusal, shape_text
from ..export.archive import Archive, damaged, open_archive, read_notes, unbuildable
from .arrays import Array
from .parts import Builder, in_chunks

__all__ = ["Network", "load"]

_DTYPES = {"F64": "<f8", "I64": "<i8", "F32": "<f4", "I32": "<i4", "F16": "<f2", "BF16": "<u2"}


class Network:
    """A folded network from a file. Made by :func:`load`.

    Attributes:
        input_shape: of one sample.
        output_shape: of one sample.
        dtype: of the arithmetic and the result; float32 for files of float16 or bfloat16.
        strategy: how it was folded.
        origin: the fingerprint of the weights that were folded.
        labels, about: the names of the outputs and other notes; None where the file has none.

    Shape:
        (B, *input_shape) → (B, *output_shape)
    """

    def __init__(self, document: dict[str, Any], path: str, arrays: dict[str, Array]) -> None:
        self.input_shape: tuple[int, ...] = tuple(document["input_shape"])
        self.output_shape: tuple[int, ...] = tuple(document["output_shape"])
        self.dtype = np.dtype(np.float64 if document["dtype"] == "float64" else np.float32)
        self.strategy: str = document["strategy"]
        self.origin: str | None = document["origin"]
        self.labels, self.about = read_notes(document, self.output_shape)
        self._piece: int | None = document["piece"]
        self._run = Builder(path, arrays).build(document["structure"], "body")

    def __call__(self, x: Array) -> Array:
        """Run a batch of numbers of any real dtype; they are converted to ``dtype`` first."""
        x = np.asarray(x)
        if x.dtype.kind not in "fiub":
            raise refusal("Network", "an array of real numbers", str(x.dtype), "Convert it first.")
        if x.ndim == 0 or x.shape[1:] != self.input_shape:
            unbatched = x.shape == self.input_shape
            raise refusal(
                "Network",
                f"a batch of samples of shape {shape_text(self.input_shape)}",
                f"{'an unbatched array' if unbatched else 'an array'} of shape {x.shape}",
                "Add the batch axis with x[None]." if unbatched else "Fold for this shape.",
            )
        with np.errstate(all="ignore"):  # NaN and infinity stay in their sample
            return in_chunks(self._run, x.astype(self.dtype, copy=False), self._piece)

    def __repr__(self) -> str:
        shapes = f"{shape_text(self.input_shape)} → {shape_text(self.output_shape)}"
        return f"Network({shapes}, dtype={self.dtype}, strategy={self.strategy!r})"


def load(path: str | os.PathLike[str]) -> Network:
    """Load a folded network that :func:`conformallayers.save` wrote.

    Every check of :func:`conformallayers.load` holds here too. Networks with branches that keep
    their layers, and layers outside the library's registry, are refused by name.

    Args:
        path: of the file.

    Examples:
        >>> import conformallayers as cl, tempfile, torch
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro(), cl.Flatten())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cl.save(cl.fold(model, (1, 8, 8), strategy="dense"), f"{folder}/net.safetensors")
        ...     net = load(f"{folder}/net.safetensors")
        >>> net
        Network((1, 8, 8) → (144,), dtype=float32, strategy='dense')
        >>> net(np.ones((2, 1, 8, 8))).shape
        (2, 144)
    """
    archive = open_archive(path)
    if archive.document["kind"] != "folded":
        remedy = "Fold it first: cl.save(cl.fold(model, input_shape), path)."
        raise refusal(f"load({archive.path})", "a folded network", "a model with layers", remedy)
    try:
        with np.errstate(all="ignore"):
            net = Network(archive.document, archive.path, _arrays(archive))
        shape = net(np.empty((0, *net.input_shape), net.dtype)).shape
    except Exception as error:
        raise unbuildable(archive.path, error) from error
    if shape != (0, *net.output_shape):
        damaged(archive.path, f"arrays that give {shape_text(shape[1:])}")
    return net


def _arrays(archive: Archive) -> dict[str, Array]:
    """Return the arrays of a file; what numpy has no arithmetic for is widened to float32."""
    found: dict[str, Array] = {}
    for name, entry in archive.entries.items():
        array = np.empty(prod(entry.shape), _DTYPES[entry.dtype])
        if len(array):
            archive.fill(name, array.view(np.uint8).data)
        if entry.dtype == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        elif entry.dtype == "F16":
            array = array.astype(np.float32)
        found[name] = array.reshape(entry.shape)
    return found
