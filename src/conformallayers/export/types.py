"""The types that a file may name: nothing else is written or built."""

from __future__ import annotations

import torch
from torch import nn

from .. import networks
from ..folding.folded import Conformal, Native
from ..folding.recurrence import Recurring
from ..folding.strategies import STRATEGIES
from ..folding.strategies.circular import CircularCore
from ..folding.strategies.paths import NativeLayers
from ..folding.strategies.torus import TorusCore
from ..nn import activations, layers
from ..nn import extra_layers as gains
from ..nn.branches import Join, Parallel, Residual
from ..nn.container import ConformalLayers

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}
_AXES = [
    *("Conv", "ConvTranspose", "AvgPool", "AdaptiveAvgPool", "MaxPool", "Dropout", "BatchNorm"),
    *("ZeroPad", "ConstantPad", "ReflectionPad", "ReplicationPad", "CircularPad"),
]
_PLAIN = [
    *("Linear", "Flatten", "Unflatten", "Identity", "Dropout", "Upsample", "PixelShuffle"),
    *("PixelUnshuffle", "ChannelShuffle", "LayerNorm", "GroupNorm", "ReLU", "ReLU6", "LeakyReLU"),
    *("PReLU", "ELU", "CELU", "SELU", "GELU", "SiLU", "Mish", "Sigmoid", "Tanh", "Softplus"),
    *("Hardtanh", "Hardswish", "Hardsigmoid", "Softmax", "LogSoftmax"),
]
# Made by their constructors.
LAYERS: dict[str, type[nn.Module]] = {
    **{f"nn.{name}{n}d": getattr(nn, f"{name}{n}d") for name in _AXES for n in (1, 2, 3)},
    **{f"nn.{name}": getattr(nn, name) for name in _PLAIN},
    **{
        f"cl.{name}": kind
        for home in (layers, gains)
        for name, kind in vars(home).items()
        if isinstance(kind, type) and kind.__module__ == home.__name__ and name != "ChannelScale"
    },
    **{f"cl.{name}": getattr(activations, name) for name in ("ReSPro", "Gnomonic", "RadialTanh")},
}
# Made of their children alone.
CHAINS: dict[str, type[nn.Module]] = {
    "nn.Sequential": nn.Sequential,
    "nn.ModuleList": nn.ModuleList,
    "cl.ConformalLayers": ConformalLayers,
}
# Made of settings, tensors and children.
RECORDS: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "cl.Residual": (Residual, ()),
    "cl.Parallel": (Parallel, ()),
    "join": (Join, ("how", "dim")),
    "channel scale": (gains.ChannelScale, ()),
    "conformal": (Conformal, Conformal.settings),
    "native": (Native, Native.settings),
    "native layers": (NativeLayers, NativeLayers.settings),
    "recurrence": (Recurring, Recurring.settings),
    "circular": (CircularCore, CircularCore.settings),
    "torus": (TorusCore, TorusCore.settings),
    **{name: (core, core.settings) for name, core in STRATEGIES.items() if name != "spectral"},
    **{
        f"networks.{name}": (getattr(networks, name), ())
        for name in networks.__all__
        if isinstance(getattr(networks, name), type)
    },
}
NAMES: dict[type[nn.Module], str] = {
    **{kind: name for name, kind in (*LAYERS.items(), *CHAINS.items())},
    **{kind: name for name, (kind, _) in RECORDS.items()},
}
