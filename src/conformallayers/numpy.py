"""Run folded networks with numpy alone: no torch is imported, nothing is compiled.

import conformallayers.numpy as cln
net = cln.load("net.safetensors")
y = net(x)
"""

from __future__ import annotations

import os

import numpy as np

from .recipe.file import read_file
from .recipe.numpy.network import Network

__all__ = ["Network", "load"]


def load(path: str | os.PathLike[str]) -> Network:
    """Load a folded network that :func:`conformallayers.save` wrote.

    It makes the same checks as :func:`conformallayers.load`.

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
    stored = read_file(path)
    # numpy computes in float32 or float64; half precision is widened.
    recipe = stored.recipe.with_constants(
        lambda _, array: array.astype(np.float32) if array.dtype == np.float16 else array
    )
    return Network(
        recipe,
        np.dtype(np.float64 if stored.dtype == "float64" else np.float32),
        strategy=stored.strategy,
        origin=stored.origin,
        labels=stored.labels,
        about=stored.about,
    )
