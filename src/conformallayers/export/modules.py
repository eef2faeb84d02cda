"""Modules ↔ JSON: the type, its settings, its tensors, its children. No code is stored or run.

Only types that ``types.py`` lists are written or built. A layer is made again by its constructor, with the
arguments read from its attributes; what a fold is made of has the settings that its class names.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import refusal
from ..folding.folded import Conformal, Native, steady_allocator
from ..folding.strategies import Core
from ..folding.strategies.circular import CircularCore
from ..folding.strategies.torus import TorusCore
from ..registry.registry import has_hooks
from ..utils.fingerprint import tensor_bytes
from .checks import Memory, check_chain, check_layer, check_record
from .types import CHAINS, DTYPES, LAYERS, NAMES, RECORDS
from .values import decode, encode


class Writer:
    """Describe modules; collect their tensors in ``arrays`` by name.

    Args:
        remedy: what to do about a module that no file can describe.
    """

    def __init__(self, remedy: str) -> None:
        self.arrays: dict[str, tuple[str, tuple[int, ...], Any]] = {}
        self.remedy = remedy
        self._modules: dict[int, str] = {}
        self._tensors: dict[int, str] = {}
        self._memory = Memory(remedy)
        self._training: bool | None = None

    def put(self, name: str, tensor: Tensor) -> dict[str, Any]:
        """Take a tensor; return what JSON says of it: its strides, unless rows follow each other."""
        if tensor.dtype not in DTYPES or tensor.is_meta or tensor.layout != torch.strided:
            kinds = ", ".join(str(dtype) for dtype in DTYPES)
            got = f"{tensor.dtype} on {tensor.device}, {tensor.layout}"
            raise refusal(f"save: {name}", f"a dense tensor of {kinds}", got, "Convert it first.")
        if self._tensors.setdefault(id(tensor), name) != name:
            got = f"the tensor of {self._tensors[id(tensor)]}"
            raise refusal(f"save: {name}", "a tensor of its own", got, self.remedy)
        data = tensor_bytes(tensor)
        self.arrays[name] = DTYPES[tensor.dtype], tuple(tensor.shape), data
        described = {"is": "tensor", "name": name}
        return described if _in_rows(tensor) else {**described, "strides": list(tensor.stride())}

    def describe(self, module: nn.Module, path: str) -> dict[str, Any]:
        """Return a module as JSON; refuse by name what a file cannot hold."""
        if id(module) in self._modules:
            return {"same": self._modules[id(module)]}
        self._modules[id(module)] = path
        if self._training is None:
            self._training = module.training
        name = NAMES.get(type(module))
        if name is None or "forward" in vars(module) or has_hooks(module):
            hooked = "with hooks" if name is not None else ""
            got = f"{type(module).__name__} {hooked}".strip()
            where = f"save: {path or 'model'}"
            raise refusal(where, "a module that a file can describe", got, self.remedy)
        tensors = _tensors(module)
        for key, (role, tensor) in tensors.items():
            if role != "buffer":
                self._memory.claim(_below(path, key), tensor)
        return {
            "type": name,
            **({} if module.training == self._training else {"training": module.training}),
            "settings": {
                key: encode(value, _below(path, key), self.put)
                for key, value in _settings(name, module).items()
            },
            "tensors": {
                key: [role, self.put(_below(path, key), tensor)]
                for key, (role, tensor) in tensors.items()
            },
            "children": [
                [key, self.describe(child, _below(path, key))]
                for key, child in module._modules.items()
                if child is not None
            ],
        }


class Reader:
    """Build modules again.

    Args:
        get: returns a tensor of the file by its name.
    """

    def __init__(self, get: Callable[[str], Tensor]) -> None:
        self.used: set[str] = set()
        self.modes: list[tuple[nn.Module, bool]] = []  # of modules that differ from the whole
        self._get = get
        self._taken: dict[str, Tensor] = {}
        self._modules: dict[str, nn.Module] = {}

    def take(self, described: dict[str, Any]) -> Tensor:
        """Return a tensor with the strides it had: products round by them."""
        name = described["name"]
        if name not in self._taken:
            self.used.add(name)
            self._taken[name] = self._laid(self._get(name), described.get("strides"))
        return self._taken[name]

    def _laid(self, tensor: Tensor, strides: list[int] | None) -> Tensor:
        if strides is None:
            return tensor
        expected = 1
        for stride, n in sorted(zip(strides, tensor.shape, strict=True)):
            if n > 1 and stride != expected:
                raise ValueError("strides that leave holes")
            expected *= n
        laid = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        return laid.copy_(tensor)

    def build(self, spec: dict[str, Any], path: str) -> nn.Module:
        """Return the module of a description."""
        if "same" in spec:
            return self._modules[spec["same"]]
        name = spec["type"]
        settings = {key: decode(value, self.take) for key, value in spec["settings"].items()}
        children = OrderedDict(
            (key, self.build(child, _below(path, key))) for key, child in spec["children"]
        )
        tensors = {key: (role, self.take(found)) for key, (role, found) in spec["tensors"].items()}
        if name in LAYERS:
            module = _constructed(LAYERS[name], settings, tensors)
            check_layer(spec, _plain_settings(name, module))
        elif name in CHAINS:
            check_chain(spec, list(children))
            module = CHAINS[name](children.values() if name == "nn.ModuleList" else children)
        else:
            module = _assembled(*RECORDS[name], settings, tensors, children)
            check_record(module)
        if "training" in spec:
            self.modes.append((module, spec["training"] is True))
        self._modules[path] = module
        return module


def _settings(name: str, module: Any) -> dict[str, Any]:
    if name not in LAYERS:
        return {key: getattr(module, key) for key in RECORDS.get(name, (None, ()))[1]}
    found = {}
    for key, parameter in inspect.signature(type(module)).parameters.items():
        if key in ("device", "dtype") or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        if key == "bias":
            found[key] = module.bias is not None
        elif key == "gain":
            found[key] = module.initial
        elif hasattr(module, key):
            found[key] = getattr(module, key)
    return found


def _plain_settings(name: str, module: nn.Module) -> dict[str, Any]:
    """Return the settings of a layer as JSON, without those that are tensors."""
    settings = _settings(name, module).items()
    return {
        key: encode(value, key, _no_tensor)
        for key, value in settings
        if not isinstance(value, Tensor)
    }


def _no_tensor(name: str, tensor: Tensor) -> dict[str, Any]:
    raise TypeError(f"{name} holds a tensor")


def _tensors(module: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Return the tensors of a module itself and what they are: parameter, fixed or buffer."""
    found: dict[str, tuple[str, Tensor]] = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            found[name] = ("parameter" if parameter.requires_grad else "fixed"), parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            found[name] = "buffer", buffer
    return found


def _constructed(
    kind: type[nn.Module], settings: dict[str, Any], tensors: dict[str, tuple[str, Tensor]]
) -> nn.Module:
    """Make a layer without memory, then give it its tensors, if they are what it expects."""
    with torch.device("meta"):
        module = kind(**settings)
    expected = {name: tensor for name, (_, tensor) in _tensors(module).items()}
    if set(expected) != set(tensors):
        raise ValueError(f"{kind.__name__} with other tensors")
    for name, (role, tensor) in tensors.items():
        like = expected[name]
        if like.shape != tensor.shape or like.is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{kind.__name__}.{name} of another shape or dtype")
        _set(module, name, role, tensor)
    return module


def _assembled(
    kind: type[nn.Module],
    names: tuple[str, ...],
    settings: dict[str, Any],
    tensors: dict[str, tuple[str, Tensor]],
    children: dict[str, nn.Module],
) -> nn.Module:
    """Put a part of a fold, or a network, together from what its constructor would have made."""
    if set(settings) != set(names):
        raise ValueError(f"{kind.__name__} with other settings")
    module: Any = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, value in settings.items():
        setattr(module, name, value)
    for name, (role, tensor) in tensors.items():
        _set(module, name, role, tensor)
    for name, child in children.items():
        module.add_module(name, child)
    if isinstance(module, (Conformal, Native)):
        steady_allocator()
    for name in _OPTIONAL.get(kind, ()):
        if name not in tensors and name not in children:
            setattr(module, name, None)
    if isinstance(module, Core) and not any(tensor.is_meta for _, tensor in tensors.values()):
        module.check()
    made: nn.Module = module
    return made


_OPTIONAL: dict[type[nn.Module], tuple[str, ...]] = {
    Conformal: ("recurring", "bias"),
    CircularCore: ("matrix", "transfer"),
    TorusCore: ("matrix",),
}


def _set(module: nn.Module, name: str, role: str, tensor: Tensor) -> None:
    if role == "buffer":
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
        module.register_buffer(name, tensor)
    else:
        parameter = nn.Parameter(tensor, requires_grad=role == "parameter")
        module.register_parameter(name, parameter)


def _in_rows(tensor: Tensor) -> bool:
    """Tell whether a tensor lies as any new one does, or in a way that is not worth keeping."""
    fresh = torch.empty(tensor.shape, device="meta").stride()
    dense = torch.empty_like(tensor, device="meta").stride()
    return tensor.stride() == fresh or tensor.stride() != dense


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
