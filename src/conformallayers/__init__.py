"""ConformalLayers: networks whose non-linear layers are associative, and fold into one.

    import conformallayers as cl
    model = cl.ConformalLayers(cl.Conv2d(3, 32, 3), cl.ReSPro(), cl.AvgPool2d(2))
    folded = cl.fold(model, (3, 32, 32))

Names are imported when they are first used, so that the parts that need no torch stay without it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "ConformalError": "errors",
    "MissingExtra": "errors",
    **dict.fromkeys((f"Conv{n}d" for n in (1, 2, 3)), "layers"),
    **dict.fromkeys((f"ConvTranspose{n}d" for n in (1, 2, 3)), "layers"),
    **dict.fromkeys((f"AvgPool{n}d" for n in (1, 2, 3)), "layers"),
    **dict.fromkeys((f"AdaptiveAvgPool{n}d" for n in (1, 2, 3)), "layers"),
    **dict.fromkeys(("Linear", "Dropout", "Flatten", "Identity"), "layers"),
    **dict.fromkeys(("Scale", "RepeatChannels", "Centre"), "gains"),
    **dict.fromkeys(("RadialActivation", "ReSPro", "Gnomonic", "RadialTanh"), "activations"),
    **dict.fromkeys(("Residual", "Parallel"), "composite"),
    "Traced": "traced",
    "register_linear": "kinds",
    "ConformalLayers": "container",
    "Folded": "runtime",
    "fold": "graph",
    "trace": "graph",
    "layer_by_layer": "container",
    "fold_error": "testing",
    "Certificate": "certificate",
    "verify": "verify",
    "Inspection": "inspection",
    "inspect": "inspection",
    "save": "export.store",
    "load": "export.store",
    "CExport": "export.c99",
    "export_c": "export.c99",
    "export_onnx": "export.onnx",
}
_SUBMODULES = ("functional", "networks", "testing")

__all__ = [
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
    "Dropout",
    "Flatten",
    "Folded",
    "Gnomonic",
    "Identity",
    "Inspection",
    "Linear",
    "MissingExtra",
    "Parallel",
    "RadialActivation",
    "RadialTanh",
    "ReSPro",
    "RepeatChannels",
    "Residual",
    "Scale",
    "Traced",
    "__version__",
    "export_c",
    "export_onnx",
    "fold",
    "fold_error",
    "functional",
    "inspect",
    "layer_by_layer",
    "load",
    "networks",
    "register_linear",
    "save",
    "testing",
    "trace",
    "verify",
]

if TYPE_CHECKING:
    from . import functional, networks, testing
    from .activations import Gnomonic, RadialActivation, RadialTanh, ReSPro
    from .certificate import Certificate
    from .composite import Parallel, Residual
    from .container import ConformalLayers, layer_by_layer
    from .errors import ConformalError, MissingExtra
    from .export.c99 import CExport, export_c
    from .export.onnx import export_onnx
    from .export.store import load, save
    from .gains import Centre, RepeatChannels, Scale
    from .graph import fold, trace
    from .inspection import Inspection, inspect
    from .kinds import register_linear
    from .layers import (
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
    from .runtime import Folded
    from .testing import fold_error
    from .traced import Traced
    from .verify import verify


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
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keep ``cl.fold`` and ``cl.trace`` the functions, though files of those names exist."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
