"""Run a recipe with numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import refusal, refuse_bytes, shape_text, wrong_shape
from ..places import Array
from ..recipe import CHUNK_BYTES, INPUT, Recipe, Shape
from .operations import RUN


def check_batch(where: str, x: Array, shape: Shape, about: Mapping[str, Any] | None) -> None:
    """Refuse an array that is no batch of real numbers of samples of a shape."""
    if x.dtype.kind not in "fiub":
        raise refusal(where, "an array of real numbers", str(x.dtype), "Convert it first.")
    refuse_bytes(where, x.dtype.name, about)
    if x.ndim == 0 or x.shape[1:] != shape:
        raise wrong_shape(where, x.shape, shape, "Fold for this shape.", "array")


class Network:
    """Run a folded network. Made by :func:`conformallayers.numpy.load`.

    Args:
        recipe: its constants are numpy arrays: of the dtype, but for those that have one of their own.
        dtype: float32 or float64.
        strategy, origin, labels, about: see the attributes.

    Attributes:
        input_shape: of one sample.
        output_shape: of one sample.
        dtype: of the arithmetic and the result; float32 for files of float16 or bfloat16.
        strategy: how it was folded.
        origin: the fingerprint of the weights that were folded.
        labels, about: the names of the outputs and other notes, or None.
        recipe: the operations that run; prints as a list.

    Shape:
        (B, *input_shape) → (B, *output_shape)
    """

    def __init__(
        self,
        recipe: Recipe,
        dtype: np.dtype[Any],
        *,
        strategy: str = "",
        origin: str | None = None,
        labels: tuple[str, ...] | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        for operation in recipe.operations:
            RUN.check(operation, "Network")
        self.recipe = recipe
        self.input_shape, self.output_shape = recipe.input_shape, recipe.output_shape
        self.dtype = np.dtype(dtype)
        self.strategy, self.origin = strategy, origin
        self.labels, self.about = labels, about
        self.chunk_size = max(1, CHUNK_BYTES // (self.dtype.itemsize * recipe.peak_elements()))
        self._steps = list(zip(recipe.operations, recipe.last_uses(), strict=True))

    def __call__(self, x: Array) -> Array:
        """Run a batch of numbers of any real dtype; they are converted to ``dtype`` first."""
        x = np.asarray(x)
        check_batch("Network", x, self.input_shape, self.about)
        x, chunk = x.astype(self.dtype, copy=False), self.chunk_size
        with np.errstate(all="ignore"):  # NaN and infinity stay in their sample
            if len(x) <= 2 * chunk:  # a result that is a view is copied
                return np.require(self._run(x), requirements=["C", "OWNDATA", "W"])
            starts = range(0, len(x), chunk)
            return np.concatenate([self._run(x[start : start + chunk]) for start in starts])

    def _run(self, x: Array) -> Array:
        values = {INPUT: x}
        for operation, dropped in self._steps:
            RUN.step(operation, self, values)
            for name in dropped:
                del values[name]
        return values[self.recipe.output]

    def constant(self, name: str) -> Array:
        """Return a constant."""
        found: Array = self.recipe.constants[name]
        return found

    def __repr__(self) -> str:
        shapes = f"{shape_text(self.input_shape)} → {shape_text(self.output_shape)}"
        return f"Network({shapes}, dtype={self.dtype}, strategy={self.strategy!r})"
