"""Networks that take images as they are stored: margins, grey and enlarging as modules that fold."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...errors import refusal, shape_text
from ...networks import IMAGE_SHAPE, Network
from ...nn.extra_layers import Centre, RepeatChannels

Shape = tuple[int, ...]
_CHANNELS, _SIDE = IMAGE_SHAPE[0], IMAGE_SHAPE[1]


def native_shape(model: nn.Module) -> Shape | None:
    """Return the shape of the samples that a model takes, where its class or first module tells."""
    if isinstance(model, Network):
        return IMAGE_SHAPE
    if isinstance(model, Centre):
        return model.shape
    if isinstance(model, nn.Sequential) and len(model):
        return native_shape(model[0])
    return None


def from_images(model: nn.Module, shape: Shape, where: str = "from_images") -> nn.Module:
    """Return a model that takes images of another shape, brought to 3×32×32 as training brings them.

    Enlarging, margins and repeated channels fold away in :func:`conformallayers.fold`. So that they
    begin the model, a mean image that was made from images of this shape is subtracted before.

    Args:
        model: takes 3×32×32, or anything, if ``shape`` is its own.
        shape: of one image, (1 or 3, H, W), with sides of at most 32.
        where: for messages.

    Examples:
        >>> from conformallayers.networks import LeNetCL
        >>> grey = from_images(LeNetCL(), (1, 28, 28))
        >>> [type(module).__name__ for module in grey]
        ['ZeroPad2d', 'RepeatChannels', 'LeNetCL']
    """
    native = native_shape(model)
    if native is None or shape == native:
        return model
    fits = len(shape) == 3 and shape[0] in (1, _CHANNELS) and 1 <= min(shape) <= max(shape) <= _SIDE
    if native != IMAGE_SHAPE or not fits:
        expected = f"samples of shape {shape_text(native)}"
        if native == IMAGE_SHAPE:
            expected = f"images (1 or 3, H, W) with sides of at most {_SIDE}"
        remedy = f"Give --input-shape {' '.join(map(str, native))}."
        raise refusal(f"{where} --input-shape", expected, shape_text(shape), remedy)
    lift = _lift(shape)
    first = next(iter(model.children()), None) if isinstance(model, nn.Sequential) else None
    if isinstance(first, Centre):
        small = _small_mean(first.mean, shape, lift)
        if small is not None:
            centre = Centre(shape, device=small.device, dtype=small.dtype)
            centre.mean.copy_(small)
            return nn.Sequential(centre, *lift, *list(model.children())[1:]).train(model.training)
    return nn.Sequential(*lift, model).train(model.training)


def _lift(shape: Shape) -> list[nn.Module]:
    """Return what brings images to 3×32×32: the modules of batches.as_input."""
    channels, height, width = shape
    factor = _SIDE // max(height, width)
    top, left = (_SIDE - factor * height) // 2, (_SIDE - factor * width) // 2
    bottom, right = _SIDE - factor * height - top, _SIDE - factor * width - left
    found: list[nn.Module] = []
    if factor > 1:
        found.append(nn.Upsample(scale_factor=(factor, factor), mode="nearest"))
    if any((left, right, top, bottom)):
        same = left == right == top == bottom
        found.append(nn.ZeroPad2d(left if same else (left, right, top, bottom)))
    if channels == 1:
        found.append(RepeatChannels(_CHANNELS))
    return found


def _small_mean(mean: Tensor, shape: Shape, lift: list[nn.Module]) -> Tensor | None:
    """Return the mean image that becomes this one, or None where none does, to the bit."""
    channels, height, width = shape
    factor = _SIDE // max(height, width)
    top, left = (_SIDE - factor * height) // 2, (_SIDE - factor * width) // 2
    rows, columns = slice(top, top + factor * height, factor), slice(left, left + factor * width)
    small = mean[:channels, rows, columns][..., ::factor].clone()
    lifted = nn.Sequential(*lift)(small[None])[0]
    return small if torch.equal(lifted, mean) else None
