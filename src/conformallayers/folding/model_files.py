"""Models ↔ JSON: type, settings, tensors and children of each module. No code is stored or run.

Only the types of the tables below are written or built. A layer is made again by its constructor, with
the arguments read from its attributes.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import __all__ as public_names
from .. import networks
from ..container import ConformalLayers
from ..conversion.convert import Converted
from ..errors import refusal
from ..nn import activations, extra_layers, homogeneous, layers
from ..nn.branches import Composite, Parallel, Residual, below
from ..nn.homogeneous import Split
from ..nn.registry import has_hooks
from ..recipe.fields import Reader, flag, optional, several, whole, word
from ..recipe.file import OPERATIONS_LIMIT
from ..recipe.layer_operations import MODES
from ..recipe.operation import expect
from ..utils.fingerprint import tensor_bytes
from .lower import LOWER

STORED_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
}
# Stored name → class. Layers are built by their constructors, composites from their children. All layers of torch.nn
# that can be lowered can be stored, and all public layers and activations of the library.
LAYERS: dict[str, type[nn.Module]] = {
    **{f"nn.{kind.__name__}": kind for kind in LOWER if kind.__module__.startswith("torch.nn.")},
    **{
        f"cl.{kind.__name__}": kind
        for place in (layers, extra_layers, homogeneous, activations)
        for kind in vars(place).values()
        if isinstance(kind, type) and kind.__module__ == place.__name__
        if kind.__name__ in public_names and kind not in (activations.RadialActivation, Split)
    },
}
COMPOSITES: dict[str, type[nn.Module]] = {
    "nn.Sequential": nn.Sequential,
    "nn.ModuleList": nn.ModuleList,
    "cl.ConformalLayers": ConformalLayers,
    "cl.Residual": Residual,
    "cl.Parallel": Parallel,
    "cl.Split": Split,
    **{
        f"networks.{name}": kind
        for name, kind in vars(networks).items()
        if name in networks.__all__ and isinstance(kind, type)
    },
}
_NAMES = {kind: name for name, kind in (*LAYERS.items(), *COMPOSITES.items())}
_NAMES[Converted] = "nn.Sequential"  # its report is not stored
_WINDOWS = re.compile(r"(?:Conv|ConvTranspose|\.AvgPool|MaxPool|LPPool)([123])d$")
_ENTRIES = {"type", "settings", "tensors", "children"}
# Without limits, a few numbers in a small file could fill the memory when the model runs.
_SIZE_LIMIT = 4096  # of a window, a padding or a size that a layer gives an axis
_SCALE_LIMIT = 128  # of an interpolation
_AXES_LIMIT = 16


class ModelWriter:
    """Describe modules; collect their tensors in ``arrays`` by name."""

    remedy = "Save its weights: safetensors.torch.save_file(model.state_dict(), path)."

    def __init__(self) -> None:
        self.arrays: dict[str, tuple[str, tuple[int, ...], Any]] = {}
        self._modules: dict[int, str] = {}
        self._memory: dict[Any, list[tuple[int, int, str]]] = {}
        self._training: bool | None = None

    def describe(self, module: nn.Module, path: str) -> dict[str, Any]:
        """Return a module as JSON; refuse unknown classes, hooks and other dtypes by name."""
        if id(module) in self._modules:
            return {"same": self._modules[id(module)]}
        self._modules[id(module)] = path
        if self._training is None:
            self._training = module.training
        name = _NAMES.get(type(module))
        joined = getattr(module, "join", None) if isinstance(module, Composite) else None
        hooked = any(
            "forward" in vars(item) or has_hooks(item) for item in (module, joined) if item
        )
        if name is None or hooked:
            got = type(module).__name__ + (" with hooks" if name is not None else "")
            where = f"save: {path or 'model'}"
            raise refusal(where, "a module that a file can describe", got, self.remedy)
        return {
            "type": name,
            **({} if module.training == self._training else {"training": module.training}),
            "settings": {
                key: _encode(value, below(path, key))
                for key, value in _settings(name, module).items()
            },
            "tensors": {
                key: [role, self._store(below(path, key), role, tensor)]
                for key, (role, tensor) in _tensors(module).items()
            },
            "children": [
                [key, self.describe(child, below(path, key))]
                for key, child in module._modules.items()
                if child is not None and child is not joined
            ],
        }

    def _store(self, name: str, role: str, tensor: Tensor) -> dict[str, Any]:
        """Store a tensor; return its name, and its strides unless it is contiguous."""
        if tensor.dtype not in STORED_DTYPES or tensor.is_meta or tensor.layout != torch.strided:
            kinds = ", ".join(str(dtype) for dtype in STORED_DTYPES)
            got = f"{tensor.dtype} on {tensor.device}, {tensor.layout}"
            raise refusal(f"save: {name}", f"a dense tensor of {kinds}", got, "Convert it first.")
        if role != "buffer":
            self._refuse_shared(name, tensor)
        self.arrays[name] = STORED_DTYPES[tensor.dtype], tuple(tensor.shape), tensor_bytes(tensor)
        strides = {} if _has_plain_strides(tensor) else {"strides": list(tensor.stride())}
        return {"name": name, **strides}

    def _refuse_shared(self, name: str, tensor: Tensor) -> None:
        """Refuse parameters that share memory: after loading they would no longer be tied."""
        if not tensor.numel():
            return
        size = tensor.element_size()
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * size
        stop = start + (last + 1) * size
        spans = self._memory.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), [])
        for begin, end, other in spans:
            if start < end and begin < stop:
                got = f"the tensor of {other}"
                raise refusal(f"save: {name}", "a tensor of its own", got, self.remedy)
        spans.append((start, stop, name))


class ModelReader:
    """Build modules from their descriptions; raise ValueError, TypeError or KeyError for a bad one.

    Args:
        get: returns a tensor of the file by its name.
    """

    def __init__(self, get: Callable[[str], Tensor]) -> None:
        self.tensors: dict[str, Tensor] = {}  # those that modules have, by their names in the file
        self.modes: list[tuple[nn.Module, bool]] = []  # of modules that differ from the whole
        self._get = get
        self._modules: dict[str, nn.Module] = {}
        self._runs: dict[nn.Module, int] = {}  # how many layers run when a module runs

    def build(self, spec: dict[str, Any], path: str) -> nn.Module:
        """Return the module of a description."""
        if "same" in spec:
            return self._modules[spec["same"]]
        if not _ENTRIES <= set(spec) <= {*_ENTRIES, "training"}:
            raise ValueError("a module with other entries")
        name = spec["type"]
        settings = {key: _decode(value) for key, value in spec["settings"].items()}
        tensors = {
            key: (role, self._tensor(found)) for key, (role, found) in spec["tensors"].items()
        }
        children = OrderedDict(
            (key, self.build(child, below(path, key))) for key, child in spec["children"]
        )
        runs = 1 + sum(self._runs[child] for child in children.values())
        expect(runs <= OPERATIONS_LIMIT, f"{runs} layers, and {OPERATIONS_LIMIT} are the most")
        if name in LAYERS:
            _check_settings(name, settings)
            with torch.device("meta"):  # without memory, until it has its tensors
                module = LAYERS[name](**settings)
            _set_tensors(module, tensors)
            _check_layer(spec, module)
        else:
            module = _composite(COMPOSITES[name], settings, children)
            _set_tensors(module, tensors)
        if "training" in spec:
            self.modes.append((module, spec["training"] is True))
        self._modules[path], self._runs[module] = module, runs
        return module

    def _tensor(self, described: dict[str, Any]) -> Tensor:
        """Return a tensor with its original strides, which decide how products round."""
        name = described["name"]
        if name not in self.tensors:
            self.tensors[name] = _with_strides(self._get(name), described.get("strides"))
        return self.tensors[name]


# -- layers -----------------------------------------------------------------------------------------


def _settings(name: str, module: Any) -> dict[str, Any]:
    """Return the constructor arguments of a module, read from its attributes."""
    if name.startswith("networks."):
        return dict(module.arguments)
    if isinstance(module, Parallel):
        return {"join": module.join.how, "dim": module.join.dim}
    if isinstance(module, Split):
        return {"sizes": module.sizes}
    if isinstance(module, ConformalLayers):
        return module.settings
    if name not in LAYERS:
        return {}
    found = {}
    for key, parameter in inspect.signature(type(module)).parameters.items():
        several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if several or key in ("device", "dtype"):
            continue
        if key == "bias":
            found[key] = module.bias is not None
        elif key == "gain":
            found[key] = module.initial
        elif hasattr(module, key):
            found[key] = getattr(module, key)
    return found


def _tensors(module: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Return the roles (parameter, fixed or buffer) and tensors of a module, without its children."""
    found: dict[str, tuple[str, Tensor]] = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            found[name] = ("parameter" if parameter.requires_grad else "fixed"), parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            found[name] = "buffer", buffer
    return found


def _set_tensors(module: nn.Module, tensors: dict[str, tuple[str, Tensor]]) -> None:
    """Set the tensors of a module; refuse other names, shapes or dtypes."""
    kind = type(module)
    expected = {name: tensor for name, (_, tensor) in _tensors(module).items()}
    if set(expected) != set(tensors):
        raise ValueError(f"{kind.__name__} with other tensors")
    for name, (role, tensor) in tensors.items():
        like = expected[name]
        if like.shape != tensor.shape or like.is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{kind.__name__}.{name} of another shape or dtype")
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
        if role == "buffer":
            module.register_buffer(name, tensor)
        else:
            trained = role == "parameter"
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=trained))


def _at_most(limit: float, reader: Reader) -> Reader:
    """Return a reader of numbers up to a limit."""

    def read(value: Any) -> Any:
        found = reader(value)
        expect(found <= limit, f"{found}, and {limit} is the most")
        return found

    return read


def _limited(least: int) -> Reader:
    return _at_most(_SIZE_LIMIT, whole(least))


def _real(value: Any) -> float:
    """Read a number; floats may be infinite, integers must fit into 64 bits."""
    fits = isinstance(value, float) or (type(value) is int and abs(value) < 2**63)
    expect(fits, f"{value!r:.60} is no number")
    return float(value)


def _positive(value: Any) -> float:
    expect(_real(value) > 0, f"{value} is not above 0")
    return float(value)


def _each(reader: Reader) -> Reader:
    """Return a reader of one value or a tuple of them."""
    return lambda value: (several(reader) if isinstance(value, tuple) else reader)(value)


def _or_word(reader: Reader, *words: str) -> Reader:
    return lambda value: value if value in words else reader(value)


def _readers() -> dict[str, Reader]:
    """Return a reader for each setting of a layer: constructors check almost nothing."""
    flags = "bias ceil_mode count_include_pad return_indices affine track_running_stats inplace"
    flags += " elementwise_affine projective"
    counts = "in_features out_features in_channels out_channels groups num_features num_parameters"
    counts += " num_groups num_channels"
    numbers = "eps p norm_type value negative_slope beta threshold min_val max_val init gain"
    axis = _at_most(_AXES_LIMIT - 1, whole(-_AXES_LIMIT))
    return {
        **dict.fromkeys(flags.split(), flag),
        **dict.fromkeys(counts.split(), whole(1)),
        **dict.fromkeys(numbers.split(), _real),
        **dict.fromkeys(("kernel_size", "dilation"), _each(_limited(1))),
        "stride": optional(_each(_limited(1))),  # None in LPPool
        **dict.fromkeys(("upscale_factor", "downscale_factor", "times"), _limited(1)),
        **dict.fromkeys(("start_dim", "end_dim"), axis),
        **dict.fromkeys(("align_corners", "recompute_scale_factor"), optional(flag)),
        **dict.fromkeys(("normalized_shape", "shape"), _each(whole(1))),
        "padding": _or_word(_each(_limited(-_SIZE_LIMIT)), "same", "valid"),
        "padding_mode": word("zeros", "reflect", "replicate", "circular"),
        "output_padding": _each(_limited(0)),
        "momentum": optional(_real),
        "dim": optional(axis),
        "unflattened_size": several(whole(-1)),
        "divisor_override": optional(whole(1)),
        "output_size": optional(_each(optional(_limited(1)))),
        "size": optional(_each(_limited(1))),
        "scale_factor": optional(_each(_at_most(_SCALE_LIMIT, _positive))),
        "mode": word(*MODES, "area"),
        "approximate": word("none", "tanh"),
        "alpha": _or_word(optional(_real), "young", "spectral", "learned"),
    }


_READERS = _readers()


def _check_settings(name: str, settings: dict[str, Any]) -> None:
    """Refuse unknown settings, and values that would fail or fill the memory when the layer runs."""
    for key, value in settings.items():
        known = key in _READERS
        expect(known, f"_readers in folding/model_files.py lacks {key!r:.60}, a setting of {name}")
        try:
            _READERS[key](value)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None


def _check_layer(spec: dict[str, Any], module: nn.Module) -> None:
    """Refuse settings that a constructor has changed, and children."""
    settings = {key: _encode(value, key) for key, value in _settings(spec["type"], module).items()}
    other = any(settings.get(key, value) != value for key, value in spec["settings"].items())
    if other or spec["children"]:
        raise ValueError(f"{spec['type']} with other settings or with children")
    window = _WINDOWS.search(spec["type"])
    if window is not None:
        _check_window(settings, int(window[1]), pools="Pool" in spec["type"])


def _check_window(settings: dict[str, Any], axes: int, *, pools: bool) -> None:
    """Refuse windows with a wrong number of axes, and negative padding.

    One value in a list counts for every axis of a pooling layer, not of a convolution.
    """
    for key in ("kernel_size", "stride", "dilation", "padding", "output_padding"):
        value = settings.get(key)
        values = value if isinstance(value, list) else [value] * axes
        lengths = (1, axes) if pools else (axes,)
        fits = len(values) in lengths and not any(type(n) is int and n < 0 for n in values)
        expect(fits, f"{key} of {value}")
    if settings.get("output_padding") is not None:
        every = zip(*(settings[k] for k in ("output_padding", "stride", "dilation")), strict=True)
        fits = all(extra < max(stride, dilation) for extra, stride, dilation in every)
        expect(
            fits, f"output_padding of {settings['output_padding']}, not below stride or dilation"
        )


# -- modules with children --------------------------------------------------------------------------


_CHILDREN: dict[type[nn.Module], dict[str, type[nn.Module]]] = {
    Split: {"groups": nn.ModuleList},
    Residual: {"body": nn.Sequential, "shortcut": nn.Module},
    Parallel: {"branches": nn.ModuleList},
}


def _composite(
    kind: type[nn.Module], settings: dict[str, Any], children: OrderedDict[str, nn.Module]
) -> nn.Module:
    """Build a composite from its children."""
    if kind is nn.ModuleList:
        if list(children) != [str(index) for index in range(len(children))]:
            raise ValueError("a list with names")
        return nn.ModuleList(children.values(), **settings)
    if kind in (nn.Sequential, ConformalLayers):
        return kind(children, **settings)
    expected = _CHILDREN.get(kind, {"features": nn.Module, "head": nn.Module})
    fits = set(children) == set(expected)
    if not fits or not all(isinstance(children[name], of) for name, of in expected.items()):
        raise ValueError(f"other parts than {', '.join(expected)}")
    given: Any = children
    if kind is Split:
        module: nn.Module = Split(modules=given["groups"], **settings)
    elif kind is Residual:
        module = Residual(shortcut=given["shortcut"], **settings)
    elif kind is Parallel:
        module = Parallel(*given["branches"], **settings)
    else:
        network: Any = kind.__new__(kind, **settings)  # keeps the arguments
        if network.arguments != settings:
            raise ValueError(f"{kind.__name__} with other arguments")
        # The children may differ from those of the constructor, such as a new head.
        networks.base.Network.__init__(network, given["features"], given["head"])
        module = network
    for name, child in children.items():
        setattr(module, name, child)
    return module


# -- values -----------------------------------------------------------------------------------------


def _encode(value: Any, name: str) -> Any:
    """Return a setting as JSON; infinity and NaN are ``{"number": "inf"}`` and the like."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, numbers.Integral):  # such as numpy's
        return int(value)
    if isinstance(value, numbers.Real):
        value = float(value)
        return value if math.isfinite(value) else {"number": repr(value)}
    if isinstance(value, (tuple, list)):
        return [_encode(item, f"{name}.{index}") for index, item in enumerate(value)]
    expected, got = "a number, a text or a tuple of them", f"a {type(value).__name__}"
    raise refusal(f"save: {name}", expected, got, "Set it to one.")


def _decode(value: Any) -> Any:
    """Invert :func:`_encode`; lists become tuples."""
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    return float(value["number"]) if isinstance(value, dict) else value


def _has_plain_strides(tensor: Tensor) -> bool:
    """Check whether a tensor is contiguous, or has gaps, which files leave out."""
    fresh = torch.empty(tensor.shape, device="meta").stride()
    dense = torch.empty_like(tensor, device="meta").stride()
    return tensor.stride() == fresh or tensor.stride() != dense


def _with_strides(tensor: Tensor, strides: list[int] | None) -> Tensor:
    """Copy a tensor to other strides; refuse strides that leave gaps."""
    if strides is None:
        return tensor
    expected = 1
    for stride, n in sorted(zip(strides, tensor.shape, strict=True)):
        if n > 1 and stride != expected:
            raise ValueError("strides that leave holes")
        expected *= n
    laid = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return laid.copy_(tensor)
