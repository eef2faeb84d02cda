"""What to use instead of a module that cannot stand in a ConformalLayers."""

from __future__ import annotations

from torch import nn

from ..nn.extra_layers import Centre

_REMEDIES: dict[type[nn.Module], str] = {
    nn.MaxPool1d: "Use cl.AvgPool1d: a maximum is not linear.",
    nn.MaxPool2d: "Use cl.AvgPool2d: a maximum is not linear.",
    nn.MaxPool3d: "Use cl.AvgPool3d: a maximum is not linear.",
    nn.AdaptiveMaxPool1d: "Use cl.AdaptiveAvgPool1d: a maximum is not linear.",
    nn.AdaptiveMaxPool2d: "Use cl.AdaptiveAvgPool2d: a maximum is not linear.",
    nn.AdaptiveMaxPool3d: "Use cl.AdaptiveAvgPool3d: a maximum is not linear.",
}
_ACTIVATIONS = tuple(
    getattr(nn, name)
    for name in [
        "ReLU",
        "ReLU6",
        "LeakyReLU",
        "PReLU",
        "ELU",
        "SELU",
        "CELU",
        "GELU",
        "SiLU",
        "Mish",
        "Sigmoid",
        "Tanh",
        "Softplus",
        "Hardswish",
        "Hardsigmoid",
        "Hardtanh",
        "Softsign",
        "Tanhshrink",
        "LogSigmoid",
        "Softmax",
        "LogSoftmax",
        "GLU",
        "Threshold",
    ]
)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm)


def remedy_for(module: nn.Module, derived: bool) -> str:
    """Return the advice for a refused module; ``derived`` tells that a supported type is above it."""
    if isinstance(module, _ACTIVATIONS):
        remedy = "Use cl.ReSPro(), the activation that folds, or put it into the head."
    elif isinstance(module, _NORMS):
        remedy = "Use nn.BatchNorm, which folds, or leave it out: ReSPro already normalises."
    elif type(module).__name__ == "ConformalLayers":
        remedy = "Unpack it: cl.ConformalLayers(*inner, ...); nesting would divide twice."
    elif isinstance(module, nn.modules.lazy.LazyModuleMixin):
        remedy = "Give the number of input channels: bounds need the weights."
    elif isinstance(module, Centre):
        remedy = "Put it before the ConformalLayers: it belongs to the input."
    elif derived:
        remedy = "It overrides forward: if it is linear, vouch for it with cl.register_linear."
    else:
        remedy = _REMEDIES.get(
            type(module), "If it is linear and has no bias, register it with cl.register_linear."
        )
    return remedy
