"""Check the shapes of batches before and after a layer."""

from __future__ import annotations

from torch import nn

from ..errors import refusal_at, shape_text
from .supported import LayerSpec


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


def check_batch_axis(path: str, module: nn.Module, shape: tuple[int, ...], batch: int) -> None:
    """Refuse an output without the batch axis."""
    if len(shape) < 2 or shape[0] != batch:
        got = f"an output of shape {tuple(shape)} for a batch of {batch}"
        remedy = "Keep axis 0 out of the layer."
        raise refusal_at(path, module, "the batch axis to stay first", got, remedy)
