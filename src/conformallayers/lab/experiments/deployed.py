"""Networks as they are deployed, and their costs: folds, and plain networks with convolutions merged."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.flop_counter import FlopCounterMode

from ...container import ConformalLayers
from ...folding.fold import fold
from ...folding.folded import Folded
from ...networks import IMAGE_SHAPE
from ...nn.collapse import composed
from ...nn.extra_layers import Centre


def without_centre(model: nn.Module) -> nn.Module:
    """Return a network without the subtraction of the mean image, which all networks have in common."""
    if isinstance(model, nn.Sequential) and isinstance(model[0], Centre):
        return model[1]
    return model


def deployed(network: nn.Module) -> Folded:
    """Return a network as operations that every runtime has: folded, or its layers if nothing folds.

    In plain networks convolutions in a row become one, and BatchNorms become part of them, so that the linear depth
    of a ReLU network costs as little as that of a conformal one.

    Examples:
        >>> from conformallayers.networks import StageReLUNet
        >>> deep, plain = (deployed(StageReLUNet(depth=depth)) for depth in (2, 1))
        >>> multiply_adds(deep) == multiply_adds(plain)
        True
    """
    whole = network if has_conformal_layers(network) else merged(network)
    return fold(whole, IMAGE_SHAPE)


def has_conformal_layers(network: nn.Module) -> bool:
    """Tell whether a network has ConformalLayers to fold."""
    return any(isinstance(module, ConformalLayers) for module in network.modules())


def merged(network: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode whose neighbouring convolutions and BatchNorms are merged."""
    network = copy.deepcopy(network).eval()
    for sequence in [one for one in network.modules() if isinstance(one, nn.Sequential)]:
        layers: list[nn.Module] = []
        for layer in sequence:
            before = layers[-1] if layers else None
            if isinstance(before, nn.Conv2d) and isinstance(layer, nn.BatchNorm2d):
                layers[-1] = fuse_conv_bn_eval(before, layer)
            elif isinstance(before, nn.Conv2d) and isinstance(layer, nn.Conv2d):
                layers[-1:] = _composed(before, layer)
            else:
                layers.append(layer)
        del sequence[:]
        sequence.extend(layers)
    return network


def _composed(first: nn.Conv2d, second: nn.Conv2d) -> list[nn.Module]:
    """Return one convolution that equals two in a row, or both where there is none."""
    # Zeros that are padded between the two have no counterpart in one kernel.
    pads = second.padding != (0, 0) or first.padding_mode != "zeros"
    strided = {first.stride, first.dilation, second.dilation} != {(1, 1)}
    if first.bias is not None or pads or strided or first.groups > 1 or second.groups > 1:
        return [first, second]
    weight = composed([first.weight.detach().double(), second.weight.detach().double()])
    size: Any = tuple(weight.shape[2:])
    places: Any = {"stride": second.stride, "padding": first.padding}
    bias = second.bias is not None
    one = nn.Conv2d(first.in_channels, second.out_channels, size, bias=bias, **places)
    one.weight = nn.Parameter(weight.to(first.weight.dtype))
    if second.bias is not None:
        one.bias = nn.Parameter(second.bias.detach())
    return [one.eval()]


def multiply_adds(folded: Folded) -> int:
    """Return the multiply-adds of one image, half the operations that torch's FlopCounterMode counts."""
    x = torch.zeros(1, *folded.input_shape, dtype=folded.dtype)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        folded(x)
    return int(counter.get_total_flops()) // 2


def weights(folded: Folded) -> int:
    """Return the number of stored constants."""
    return sum(array.numel() for array in folded.recipe.constants.values())
