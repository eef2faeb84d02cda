"""Check the shapes of batches before and after a layer: axes, channels, sizes that torch accepts silently."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import refusal, refusal_at, shape_text
from .bounds import nearest_depends_on_dtype, pool_windows
from .specs import LayerSpec
from .supported import MAX_POOLS


def check_input(
    path: str, module: nn.Module, spec: LayerSpec, shape: tuple[int, ...], *, traced: bool = False
) -> None:
    """Refuse a batch whose number of axes or channels does not fit the module.

    With ``traced`` the user gave the shape of one sample instead of a batch.
    """
    got = f"samples of shape {shape_text(shape[1:])}" if traced else f"an input of shape {shape}"
    if spec.rank is not None and len(shape) != spec.rank:
        unbatched = not traced and len(shape) == spec.rank - 1
        remedy = "Add the batch axis with x.unsqueeze(0)." if unbatched else "Reshape the input."
        if traced and len(shape) == spec.rank + 1:
            remedy = "Leave the batch axis out of the input shape."
        got = f"an unbatched input of shape {shape}" if unbatched else got
        raise refusal_at(path, module, f"a batch with {spec.rank} axes", got, remedy)
    expected = getattr(module, spec.channels) if spec.channels else None
    axis = -1 if isinstance(module, nn.Linear) else 1
    if expected is not None and shape[axis] != expected:
        needed = f"{spec.channels}={expected} on axis {axis}"
        raise refusal_at(path, module, needed, got, "Change the layer or the input.")
    if isinstance(module, nn.modules.padding._CircularPadNd):
        _check_wrapping(path, module, shape, got)
    if torch.compiler.is_compiling():
        return
    if isinstance(module, nn.Upsample):
        _check_nearest(path, module, shape, got)
    if isinstance(module, MAX_POOLS):
        _check_windows(path, module, shape, got)


def _check_nearest(path: str, module: nn.Upsample, shape: tuple[int, ...], got: str) -> None:
    """Refuse an interpolation that a fold, computed in float64, would not repeat in float32."""
    try:
        differs = nearest_depends_on_dtype(module, shape[1:])
    except (RuntimeError, ValueError):
        return  # sizes that do not fit, which the layer itself explains
    if differs:
        raise refusal(
            f"Upsample at position {path}",
            "nearest neighbours that are the same pixels in float32 and float64",
            f"scale_factor={module.scale_factor}, size={module.size} on {got}",
            'Choose another scale or size, or mode="bilinear".',
        )


def _check_windows(path: str, module: nn.Module, shape: tuple[int, ...], got: str) -> None:
    """Refuse a dilated maximum over nothing but padding, which is −∞."""
    if not all(window for axis in pool_windows(module, shape[1:]) for window in axis):
        expected = "windows with at least one pixel of the image"
        raise refusal_at(path, module, expected, got, "Pad or dilate less.")


def _check_wrapping(path: str, module: Any, shape: tuple[int, ...], got: str) -> None:
    """Refuse circular padding that torch would fill with uninitialised memory."""
    pads = tuple(module.padding)  # last axis first: (before, after, before, after, ...)
    for size, before, after in zip(reversed(shape), pads[0::2], pads[1::2], strict=False):
        if size + min(before, 0) + min(after, 0) < max(before, after, 1):
            expected = f"padding={pads} to leave as many entries of an axis as it repeats"
            raise refusal_at(path, module, expected, got, "Crop less, or pad less.")


def check_batch_axis(path: str, module: nn.Module, shape: tuple[int, ...], batch: int) -> None:
    """Refuse an output without the batch axis."""
    if len(shape) < 2 or shape[0] != batch:
        got = f"an output of shape {tuple(shape)} for a batch of {batch}"
        remedy = "Keep axis 0 out of the layer."
        raise refusal_at(path, module, "the batch axis to stay first", got, remedy)
