"""ConformalLayers: train deep, run shallow, with the same numbers.

    import conformallayers as cl
    model = cl.ConformalLayers(cl.Conv2d(3, 32, 3), cl.ReSPro(), cl.AvgPool2d(2))
    folded = cl.fold(model, (3, 32, 32))

Names are imported when they are first used, so that the parts that need no torch stay without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "1.0.0rc1"

# The public names of each module.
_NAMES = {
    "errors": ("ConformalError", "MissingExtra"),
    "nn.layers": (
        *(f"{layer}{n}d" for layer in ("Conv", "ConvTranspose") for n in (1, 2, 3)),
        *(f"{layer}{n}d" for layer in ("AvgPool", "AdaptiveAvgPool") for n in (1, 2, 3)),
        *("Linear", "Dropout", "Flatten", "Identity"),
        *("Abs", "Scale", "RepeatChannels", "Centre"),
    ),
    "nn.activations": ("RadialActivation", "ReSPro", "Gnomonic"),
    "nn.branches": ("Residual", "Parallel", "Split"),
    "nn.traced": ("Traced",),
    "container": ("ConformalLayers", "layer_by_layer"),
    "nn.registry": ("register_linear", "register_homogeneous"),
    "conversion": ("convert",),
    "expansion": ("Expansion", "expand", "collapse"),
    "folding.fold": ("fold",),
    "graph.trace": ("trace",),
    "folding.folded": ("Folded", "Quantization"),
    "quantization.quantize": ("quantize",),
    "folding.save": ("save", "load"),
    "testing": ("fold_error",),
    "inspection": ("Inspection", "inspect"),
    "diagnosis": ("Diagnosis", "diagnose"),
    "recipe.c.files": ("CExport",),
    "recipe.c.export": ("export_c",),
    "recipe.onnx.export": ("export_onnx",),
    "session": ("Session",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
_SUBMODULES = ("functional", "networks", "testing", "zoo")
__all__ = sorted([*_HOMES, *_SUBMODULES, "__version__"])

if TYPE_CHECKING:  # "as" re-exports a name to type checkers, which __all__ cannot
    from . import functional as functional
    from . import networks as networks
    from . import testing as testing
    from . import zoo as zoo
    from .container import ConformalLayers as ConformalLayers
    from .container import layer_by_layer as layer_by_layer
    from .conversion import convert as convert
    from .diagnosis import Diagnosis as Diagnosis
    from .diagnosis import diagnose as diagnose
    from .errors import ConformalError as ConformalError
    from .errors import MissingExtra as MissingExtra
    from .expansion import Expansion as Expansion
    from .expansion import collapse as collapse
    from .expansion import expand as expand
    from .folding.fold import fold as fold
    from .folding.folded import Folded as Folded
    from .folding.folded import Quantization as Quantization
    from .folding.save import load as load
    from .folding.save import save as save
    from .graph.trace import trace as trace
    from .inspection import Inspection as Inspection
    from .inspection import inspect as inspect
    from .nn.activations import Gnomonic as Gnomonic
    from .nn.activations import RadialActivation as RadialActivation
    from .nn.activations import ReSPro as ReSPro
    from .nn.branches import Parallel as Parallel
    from .nn.branches import Residual as Residual
    from .nn.branches import Split as Split
    from .nn.layers import Abs as Abs
    from .nn.layers import AdaptiveAvgPool1d as AdaptiveAvgPool1d
    from .nn.layers import AdaptiveAvgPool2d as AdaptiveAvgPool2d
    from .nn.layers import AdaptiveAvgPool3d as AdaptiveAvgPool3d
    from .nn.layers import AvgPool1d as AvgPool1d
    from .nn.layers import AvgPool2d as AvgPool2d
    from .nn.layers import AvgPool3d as AvgPool3d
    from .nn.layers import Centre as Centre
    from .nn.layers import Conv1d as Conv1d
    from .nn.layers import Conv2d as Conv2d
    from .nn.layers import Conv3d as Conv3d
    from .nn.layers import ConvTranspose1d as ConvTranspose1d
    from .nn.layers import ConvTranspose2d as ConvTranspose2d
    from .nn.layers import ConvTranspose3d as ConvTranspose3d
    from .nn.layers import Dropout as Dropout
    from .nn.layers import Flatten as Flatten
    from .nn.layers import Identity as Identity
    from .nn.layers import Linear as Linear
    from .nn.layers import RepeatChannels as RepeatChannels
    from .nn.layers import Scale as Scale
    from .nn.registry import register_homogeneous as register_homogeneous
    from .nn.registry import register_linear as register_linear
    from .nn.traced import Traced as Traced
    from .quantization.quantize import quantize as quantize
    from .recipe.c.export import export_c as export_c
    from .recipe.c.files import CExport as CExport
    from .recipe.onnx.export import export_onnx as export_onnx
    from .session import Session as Session
    from .testing import fold_error as fold_error


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
