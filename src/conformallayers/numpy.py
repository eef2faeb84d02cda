"""Run folded networks with numpy alone: no torch is imported, nothing is compiled.

import conformallayers.numpy as cln
net = cln.load("net.safetensors")
y = net(x)
"""

from __future__ import annotations

import os
from math import prod

import numpy as np

from .errors import ConformalError
from .recipe.archive import Archive, open_archive, unbuildable
from .recipe.file import read_fold
from .recipe.layer_operations import Conv
from .recipe.numpy.network import Network
from .recipe.places import Array
from .recipe.recipe import Recipe

__all__ = ["Network", "load"]

WINDOWS_LIMIT = 2**29  # elements that all windows of a convolution have together
_DTYPES = {"F64": "<f8", "F32": "<f4", "I32": "<i4", "I8": "<i1", "F16": "<f2", "BF16": "<u2"}


def load(path: str | os.PathLike[str]) -> Network:
    """Load a folded network that :func:`conformallayers.save` wrote.

    Every check of :func:`conformallayers.load` holds here too.

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
    fold = read_fold(archive)
    try:
        _check_windows(fold.recipe)
        dtype = np.dtype(np.float64 if fold.dtype == "float64" else np.float32)
        recipe = fold.recipe.with_constants(lambda name, _: _array(archive, name))
        recipe.check_values()
        net = Network(
            recipe,
            dtype,
            strategy=fold.strategy,
            origin=fold.origin,
            labels=fold.labels,
            about=fold.about,
        )
        y = net(np.empty((0, *net.input_shape), dtype))
        if y.shape != (0, *net.output_shape) or y.dtype != dtype:
            raise ValueError(f"it gives {y.dtype} of shape {y.shape[1:]}")
    except ConformalError:  # numpy lacks an operation; the file is sound
        raise
    except Exception as error:
        raise unbuildable(archive.path, error) from error
    return net


def _array(archive: Archive, name: str) -> Array:
    """Read a constant; half precision is widened to float32."""
    entry = archive.entries[name]
    array: Array = np.empty(prod(entry.shape), _DTYPES[entry.dtype])
    if len(array):
        archive.fill(name, array.view(np.uint8).data)
    if entry.dtype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    elif entry.dtype == "F16":
        array = array.astype(np.float32)
    return array.reshape(entry.shape)


def _check_windows(recipe: Recipe) -> None:
    """Refuse convolutions whose windows, which numpy copies, would not fit into memory."""
    shapes = recipe.shapes()
    for operation in recipe.operations:
        if isinstance(operation, Conv):
            channels, *kernel = recipe.constant_shape(operation.weight)[1:]
            positions = shapes[operation.outputs[0]][1:]
            count = operation.groups * channels * prod(kernel) * prod(positions)
            if count > WINDOWS_LIMIT:
                raise ValueError(f"{count} elements of windows, and {WINDOWS_LIMIT} are the most")
