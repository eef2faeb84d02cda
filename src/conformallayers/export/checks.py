"""What a structure must be beside buildable, so that a file gives back what was saved or nothing.

Each function raises a plain ValueError; who saves or loads says of which file.
"""

from __future__ import annotations

import math
import re
from typing import Any

from torch import Tensor, nn

from ..errors import refusal
from ..folding.folded import Conformal, Part
from ..folding.recurrence import Recurring
from ..folding.strategies.circular import CircularCore
from ..folding.strategies.composed import ComposedCore
from ..folding.strategies.dense import DenseCore
from ..folding.strategies.torus import TorusCore
from ..networks import Network
from ..nn.branches import Join, Parallel, Residual
from .archive import is_count

_CHILDREN: dict[type[nn.Module], dict[str, type[nn.Module]]] = {
    Residual: {"body": nn.Sequential, "shortcut": nn.Module, "join": Join},
    Parallel: {"branches": nn.ModuleList, "join": Join},
    Network: {"features": nn.Module, "head": nn.Module},
}
# Arrays whose first axis is gone through one by one, and the setting that tells how often.
_COUNTED: dict[type[nn.Module], tuple[tuple[str, str], ...]] = {
    DenseCore: (("forms", "weights"),),
    CircularCore: (("symbols", "weights"),),
    TorusCore: (("high", "forms"), ("low", "forms")),
    Recurring: (("vectors", "shifts"), ("factors", "keys")),
}
_WINDOWS = re.compile(r"(?:Conv|ConvTranspose|\.AvgPool|MaxPool)([123])d$")


class Memory:
    """Tell parameters that share memory: they train together, and would come back apart.

    Args:
        remedy: what to do about them.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._spans: dict[Any, list[tuple[int, int, str]]] = {}

    def claim(self, name: str, tensor: Tensor) -> None:
        """Take the memory of a parameter, or refuse what another one has."""
        if tensor.is_meta or not tensor.numel():
            return
        size = tensor.element_size()
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * size
        stop = start + (last + 1) * size
        key = tensor.device, tensor.untyped_storage().data_ptr()
        for begin, end, other in self._spans.setdefault(key, []):
            if start < end and begin < stop:
                got = f"the tensor of {other}"
                raise refusal(f"save: {name}", "a tensor of its own", got, self._remedy)
        self._spans[key].append((start, stop, name))


def check_layer(spec: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse settings that a constructor took for something else, and children it has not.

    Args:
        spec: the layer as the file describes it.
        settings: those of the layer that was made.
    """
    claimed = [key for key in spec["settings"] if key in settings]  # older files may have fewer
    if any(spec["settings"][key] != settings[key] for key in claimed) or spec["children"]:
        raise ValueError(f"{spec['type']} with other settings or with children")
    window = _WINDOWS.search(spec["type"])
    if window is not None:
        _check_window(settings, int(window[1]))


def _check_window(settings: dict[str, Any], axes: int) -> None:
    """Refuse windows that a constructor takes and no image has."""
    for key, least in (("kernel_size", 1), ("stride", 1), ("dilation", 1), ("padding", 0)):
        value = settings.get(key, least)
        values = value if isinstance(value, list) else [value] * axes
        named = key == "padding" and value in ("same", "valid")
        whole = all(type(n) is int and n >= least for n in values)
        if not named and not (whole and len(values) in (1, axes)):
            raise ValueError(f"{key} of {value}")
    if not is_count(settings.get("groups", 1)):
        raise ValueError("no groups")


def check_chain(spec: dict[str, Any], names: list[str]) -> None:
    """Refuse what a chain of modules has no place for."""
    if spec["settings"] or spec["tensors"]:
        raise ValueError(f"{spec['type']} with tensors of its own")
    if spec["type"] == "nn.ModuleList" and names != [str(index) for index in range(len(names))]:
        raise ValueError("a list with names")


def check_record(module: nn.Module) -> None:
    """Refuse parts that would fail, or run away, only when they run."""
    for kind, expected in _CHILDREN.items():
        if isinstance(module, kind):
            children = dict(module.named_children())
            fits = set(children) == set(expected) and not module._parameters and not module._buffers
            if not (fits and all(isinstance(children[name], expected[name]) for name in expected)):
                raise ValueError(f"{kind.__name__} of other parts")
    for array, setting in _COUNTED.get(type(module), ()):
        count = getattr(module, setting)
        if len(getattr(module, array)) != (count if isinstance(count, int) else len(count)):
            raise ValueError(f"{array} of another number")
    if isinstance(module, Join) and (
        module.how not in ("sum", "concatenate") or type(module.dim) is not int or module.dim == 0
    ):
        raise ValueError("branches that do not join")
    if isinstance(module, ComposedCore):
        _check_route(module)
    if isinstance(module, Part) and not is_count(module.piece):
        raise ValueError("pieces of no size")
    if isinstance(module, Conformal) and not _are_limits(module.limits):
        raise ValueError("limits that are none")


def _check_route(core: ComposedCore) -> None:
    """Refuse strides and paddings that are not one for each axis."""
    for step in core.geometry.steps:
        if not all(len(values) in (0, core.geometry.axes) for values in step):
            raise ValueError("a step over other axes")


def _are_limits(limits: Any) -> bool:
    return limits is None or (
        isinstance(limits, tuple)
        and len(limits) == 2
        and all(type(n) in (int, float) and math.isfinite(n) for n in limits)
    )
