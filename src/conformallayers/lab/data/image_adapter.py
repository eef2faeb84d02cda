"""Adapt networks to the shape of stored images by modules that fold: enlarge, pad, repeat channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...errors import refusal, shape_text
from ...networks import IMAGE_SHAPE
from ...networks.base import Network
from ...nn.extra_layers import Centre, RepeatChannels
from .batches import Shape, enlargement

_CHANNELS, _SIDE = IMAGE_SHAPE[0], IMAGE_SHAPE[1]


def native_shape(model: nn.Module) -> Shape | None:
    """Return the input shape of a model if its class or its first module determines it."""
    if isinstance(model, Network):
        return tuple(model.arguments.get("in_shape", IMAGE_SHAPE))
    if isinstance(model, Centre):
        return model.shape
    if isinstance(model, nn.Sequential) and len(model):
        return native_shape(model[0])
    return None


def from_images(model: nn.Module, shape: Shape, where: str = "from_images") -> nn.Module:
    """Return a model that takes images of another shape and converts them to 3×32×32 as in training.

    :func:`conformallayers.fold` folds the conversion if it comes directly before the network. A mean
    image that was computed from images of this shape is therefore subtracted before it.

    Args:
        model: takes 3×32×32 images; a model that already takes ``shape`` is returned as it is.
        shape: of one image, (1 or 3, H, W), with sides of at most 32.
        where: the name for error messages.

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
    conversion = _conversion(shape)
    first = next(iter(model.children()), None) if isinstance(model, nn.Sequential) else None
    if isinstance(first, Centre):
        small = _small_mean(first.mean, shape, conversion)
        if small is not None:
            centre = Centre(shape, device=small.device, dtype=small.dtype)
            centre.mean.copy_(small)
            return nn.Sequential(centre, *conversion, *list(model.children())[1:]).train(
                model.training
            )
    return nn.Sequential(*conversion, model).train(model.training)


def _conversion(shape: Shape) -> list[nn.Module]:
    """Return modules that convert images to 3×32×32 as batches.as_input does."""
    factor, padding = enlargement(shape[1], shape[2])
    found: list[nn.Module] = []
    if factor > 1:
        found.append(nn.Upsample(scale_factor=(factor, factor), mode="nearest"))
    if any(padding):
        found.append(nn.ZeroPad2d(padding[0] if len(set(padding)) == 1 else padding))
    if shape[0] == 1:
        found.append(RepeatChannels(_CHANNELS))
    return found


def _small_mean(mean: Tensor, shape: Shape, conversion: list[nn.Module]) -> Tensor | None:
    """Return the mean image that converts to this one bit by bit; None if there is none.

    There is one if the network was trained on images of this shape: enlarged pixels are equal, margins are 0.
    """
    factor, (left, right, top, bottom) = enlargement(shape[1], shape[2])
    rows, columns = slice(top, _SIDE - bottom, factor), slice(left, _SIDE - right, factor)
    small = mean[: shape[0], rows, columns].clone()
    converted = nn.Sequential(*conversion)(small[None])[0]
    return small if torch.equal(converted, mean) else None
