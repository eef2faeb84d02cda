"""ConformalLayers: networks whose non-linear layers are associative, and fold into one.

    import conformallayers as cl
    model = cl.ConformalLayers(cl.Conv2d(3, 32, 3), cl.ReSPro(), cl.AvgPool2d(2))
    folded = cl.fold(model, (3, 32, 32))

Names are imported when they are first used, so that the parts that need no torch stay without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOMES = {
    "ConformalError": "errors",
    "MissingExtra": "errors",
    **dict.fromkeys((f"Conv{n}d" for n in (1, 2, 3)), "nn.layers"),
    **dict.fromkeys((f"ConvTranspose{n}d" for n in (1, 2, 3)), "nn.layers"),
    **dict.fromkeys((f"AvgPool{n}d" for n in (1, 2, 3)), "nn.layers"),
    **dict.fromkeys((f"AdaptiveAvgPool{n}d" for n in (1, 2, 3)), "nn.layers"),
    **dict.fromkeys(("Linear", "Dropout", "Flatten", "Identity"), "nn.layers"),
    **dict.fromkeys(("Scale", "RepeatChannels", "Centre"), "nn.extra_layers"),
    **dict.fromkeys(("RadialActivation", "ReSPro", "Gnomonic", "RadialTanh"), "nn.activations"),
    **dict.fromkeys(("Residual", "Parallel"), "nn.branches"),
    **dict.fromkeys(("Abs", "Split"), "nn.homogeneous"),
    "Traced": "nn.traced",
    "convert": "conversion.convert",
    **dict.fromkeys(("register_linear", "register_homogeneous"), "registry.registry"),
    "ConformalLayers": "nn.container",
    "Folded": "folding.folded",
    "fold": "folding.fold",
    "trace": "folding.fold",
    "layer_by_layer": "nn.container",
    "fold_error": "testing",
    "Certificate": "folding.certificate",
    "verify": "folding.verify",
    "quantize": "folding.quantize",
    "Quantization": "folding.quantization",
    "Inspection": "inspection",
    "inspect": "inspection",
    "Diagnosis": "diagnosis.record",
    "diagnose": "diagnosis.diagnose",
    "save": "folding.files",
    "load": "folding.files",
    "CExport": "recipe.c.files",
    "export_c": "recipe.c.export",
    "export_onnx": "recipe.onnx.export",
    "Session": "session.session",
    "compare": "session.compare",
}
_SUBMODULES = ("functional", "networks", "testing", "zoo")

__all__ = [
    "Abs",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "CExport",
    "Centre",
    "Certificate",
    "ConformalError",
    "ConformalLayers",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Diagnosis",
    "Dropout",
    "Flatten",
    "Folded",
    "Gnomonic",
    "Identity",
    "Inspection",
    "Linear",
    "MissingExtra",
    "Parallel",
    "Quantization",
    "RadialActivation",
    "RadialTanh",
    "ReSPro",
    "RepeatChannels",
    "Residual",
    "Scale",
    "Session",
    "Split",
    "Traced",
    "__version__",
    "compare",
    "convert",
    "diagnose",
    "export_c",
    "export_onnx",
    "fold",
    "fold_error",
    "functional",
    "inspect",
    "layer_by_layer",
    "load",
    "networks",
    "quantize",
    "register_homogeneous",
    "register_linear",
    "save",
    "testing",
    "trace",
    "verify",
    "zoo",
]

if TYPE_CHECKING:
    from . import functional, networks, testing, zoo
    from .conversion.convert import convert
    from .diagnosis.diagnose import diagnose
    from .diagnosis.record import Diagnosis
    from .errors import ConformalError, MissingExtra
    from .folding.certificate import Certificate
    from .folding.files import load, save
    from .folding.fold import fold, trace
    from .folding.folded import Folded
    from .folding.quantization import Quantization
    from .folding.quantize import quantize
    from .folding.verify import verify
    from .inspection import Inspection, inspect
    from .nn.activations import Gnomonic, RadialActivation, RadialTanh, ReSPro
    from .nn.branches import Parallel, Residual
    from .nn.container import ConformalLayers, layer_by_layer
    from .nn.extra_layers import Centre, RepeatChannels, Scale
    from .nn.homogeneous import Abs, Split
    from .nn.layers import (
        AdaptiveAvgPool1d,
        AdaptiveAvgPool2d,
        AdaptiveAvgPool3d,
        AvgPool1d,
        AvgPool2d,
        AvgPool3d,
        Conv1d,
        Conv2d,
        Conv3d,
        ConvTranspose1d,
        ConvTranspose2d,
        ConvTranspose3d,
        Dropout,
        Flatten,
        Identity,
        Linear,
    )
    from .nn.traced import Traced
    from .recipe.c.export import export_c
    from .recipe.c.files import CExport
    from .recipe.onnx.export import export_onnx
    from .registry.registry import register_homogeneous, register_linear
    from .session.compare import compare
    from .session.session import Session
    from .testing import fold_error


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
