"""The evaluation cache of a ConformalLayers: folds by input key, dropped at any change of the model."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..functional import may_look
from ..recipe.torch.module import RecipeModule
from ..registry.registry import find_spec, has_batch_statistics, has_global_hooks, has_hooks

Key = tuple[tuple[int, ...], torch.dtype, torch.device]

# Limits of a cache; the fold that was used last is always kept.
MOST_FOLDS = 32
MOST_BYTES = 64 * 2**20
_PROBES = 256  # entries of each tensor that are compared at every call

_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


class _Slot(NamedTuple):
    """A parameter, buffer or attribute of a module at the time of the fold.

    ``alias`` keeps the storage alive: another tensor of the same version could reuse a freed address.
    """

    table: dict[str, Any]
    name: str
    tensor: Tensor | None
    version: int
    alias: Tensor | None

    def unchanged(self) -> bool:
        tensor = self.table.get(self.name)
        if tensor is not self.tensor:
            return False
        if tensor is None or self.alias is None:
            return True
        return _version(tensor) == self.version and tensor.data_ptr() == self.alias.data_ptr()


class _Contents:
    """Compare entries of tensors: fused optimisers, numpy and others write without a new version.

    Small tensors are compared as a whole, of larger ones every k-th entry. On other devices than the CPU
    a comparison waits for the device, so tensors are compared there only after an optimiser's step.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        by_kind: dict[Any, list[Tensor]] = {}
        for tensor in tensors:
            if type(tensor) is Tensor and tensor.layout == torch.strided and tensor.numel():
                by_kind.setdefault((tensor.dtype, tensor.device), []).append(_probed(tensor))
        self.groups = [(probes, _bits(probes)) for probes in by_kind.values()]
        self.steps = _optimizer_steps

    def unchanged(self) -> bool:
        steps = _optimizer_steps
        for probes, bits in self.groups:
            looks = may_look(probes[0]) if probes[0].is_cpu else steps != self.steps
            if looks and not torch.equal(_bits(probes), bits):
                return False
        self.steps = steps
        return True


class _State:
    """The state of a model when it was folded, and its folds, the least recently used first."""

    def __init__(self, model: nn.Module) -> None:
        self.folds: OrderedDict[Key, RecipeModule] = OrderedDict()
        self.modules = [(m, list(m._modules.values()), dict(vars(m))) for m in model.modules()]
        self.slots = [
            _Slot(
                table,
                name,
                tensor,
                0 if tensor is None else _version(tensor),
                None if tensor is None else tensor.detach(),
            )
            for module in model.modules()
            for table in (module._parameters, module._buffers, vars(module))
            for name, tensor in table.items()
            if tensor is None or isinstance(tensor, Tensor)
        ]
        self.contents = _Contents([s.alias for s in self.slots if s.alias is not None])

    def holds(self) -> bool:
        """Check that the model is unchanged and has no hooks."""
        if has_global_hooks():
            return False
        root = self.modules[0][0]
        for module, children, attributes in self.modules:
            if list(module._modules.values()) != children:
                return False
            if module is not root and (has_hooks(module) or not _equal(vars(module), attributes)):
                return False
        return all(slot.unchanged() for slot in self.slots) and self.contents.unchanged()


class FoldCache:
    """Keep the folds of one model for as long as they are valid."""

    def __init__(self) -> None:
        self._state: _State | None = None
        self._cleared = 0
        self._lock = threading.Lock()  # of the order in which folds were used

    def clear(self) -> None:
        """Drop all folds, including one that another thread is building."""
        self._state = None
        self._cleared += 1

    def find(self, input: Tensor) -> RecipeModule | None:
        """Return the fold for the shape, dtype and device of an input, or None without a valid one."""
        state, key = self._state, _key(input)  # other threads may replace the state meanwhile
        fold = state.folds.get(key) if state is not None else None
        if state is None or fold is None or not state.holds():
            return None
        with self._lock:
            if key in state.folds:
                state.folds.move_to_end(key)
        return fold

    def begin(self, model: nn.Module) -> tuple[_State, int]:
        """Record the state of the model before it is folded."""
        state = self._state
        return (state if state is not None and state.holds() else _State(model)), self._cleared

    def store(self, begun: tuple[_State, int], input: Tensor, fold: RecipeModule) -> None:
        """Store a fold unless the model has changed meanwhile; evict the least recently used."""
        state, cleared = begun
        if cleared != self._cleared or not state.holds():
            return
        with self._lock:
            state.folds[_key(input)] = fold
            sizes = [sum(b.nbytes for b in kept.buffers()) for kept in state.folds.values()]
            while len(sizes) > 1 and (len(sizes) > MOST_FOLDS or sum(sizes) > MOST_BYTES):
                state.folds.popitem(last=False)
                sizes.pop(0)
            self._state = state


def must_run(module: nn.Module) -> bool:
    """Tell whether a layer must run, because a fold would lose part of its effect.

    Such layers have hooks, or are a dropout or batch normalisation in training mode.
    """
    if has_hooks(module) or has_global_hooks():
        return True
    kind = find_spec(module) if module.training else None
    return kind is not None and (kind.identity_in_eval or has_batch_statistics(module))


def _key(input: Tensor) -> Key:
    return tuple(input.shape[1:]), input.dtype, input.device


def _version(tensor: Tensor) -> int:
    # Inference tensors have no version; they are compared by identity, address and contents.
    return 0 if tensor.is_inference() else tensor._version


def _equal(attributes: dict[str, Any], before: dict[str, Any]) -> bool:
    try:
        return attributes == before  # the same tensor is equal without a look at its values
    except (RuntimeError, TypeError, ValueError):  # another tensor or array
        return False


def _probed(tensor: Tensor) -> Tensor:
    """Return a view of at most ``_PROBES`` entries, evenly spread over the memory of the tensor."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in pairs)
    # An even step could skip every other column of a matrix.
    step = 1 if span <= _PROBES else -(-span // _PROBES) | 1
    return tensor.as_strided((-(-span // step),), (step,))


def _bits(probes: list[Tensor]) -> Tensor:
    return torch.cat(probes).view(torch.uint8)  # bits: NaN equals NaN
