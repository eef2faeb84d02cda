"""The evaluation cache of a ConformalLayers: folds by input key, dropped at any change of the model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..nn.activations import RadialActivation, Rule
from ..recipe.torch.module import RecipeModule
from ..registry.registry import find_spec, has_batch_statistics, has_hooks

Key = tuple[tuple[int, ...], torch.dtype, torch.device]


class _Slot(NamedTuple):
    """A tensor in its table at the time of the fold.

    ``alias`` shares its storage and keeps it alive: a freed address could come back with another
    tensor of the same version.
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


class _State:
    """The state of a model when it was folded. Only ``folds`` changes, by replacement."""

    def __init__(self, model: nn.Module) -> None:
        self.folds: dict[Key, RecipeModule] = {}
        self.slots: list[_Slot] = []
        self.modules: list[tuple[nn.Module, dict[str, Any]]] = []
        self.activations: list[tuple[RadialActivation, Any, Rule]] = []
        for module in model.modules():
            self.modules.append((module, dict(module._modules)))
            if isinstance(module, RadialActivation):
                self.activations.append((module, module.alpha, module.rule))
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    alias = None if tensor is None else tensor.detach()
                    version = 0 if tensor is None else _version(tensor)
                    self.slots.append(_Slot(table, name, tensor, version, alias))

    def holds(self) -> bool:
        """Tell whether the model is unchanged and may still be folded."""
        root = self.modules[0][0]
        return (
            all(slot.unchanged() for slot in self.slots)
            and all(
                module._modules == children and (module is root or not must_run(module))
                for module, children in self.modules
            )
            and all((m.alpha, m.rule) == (a, p) for m, a, p in self.activations)
        )


class FoldCache:
    """Keep the folds of one model for as long as they are valid."""

    def __init__(self) -> None:
        self._state: _State | None = None
        self._cleared = 0

    def clear(self) -> None:
        """Drop all folds, also one that another thread is building."""
        self._state = None
        self._cleared += 1

    def find(self, input: Tensor) -> RecipeModule | None:
        """Return the fold for the shape, dtype and device of an input, or None without a valid one."""
        state = self._state  # other threads may replace it meanwhile
        fold = state.folds.get(_key(input)) if state is not None else None
        return fold if state is not None and fold is not None and state.holds() else None

    def begin(self, model: nn.Module) -> tuple[_State, int]:
        """Note the state of the model before it is folded."""
        state = self._state
        return (state if state is not None and state.holds() else _State(model)), self._cleared

    def store(self, begun: tuple[_State, int], input: Tensor, fold: RecipeModule) -> None:
        """Keep a fold, unless the model has changed while it was made."""
        state, cleared = begun
        if cleared == self._cleared and state.holds():
            state.folds = {**state.folds, _key(input): fold}
            self._state = state


def must_run(module: nn.Module) -> bool:
    """Tell whether a layer must run, because a fold would lose part of its effect.

    Such layers have hooks, or are a dropout or batch normalisation in training mode.
    """
    if has_hooks(module):
        return True
    kind = find_spec(module) if module.training else None
    return kind is not None and (kind.identity_in_eval or has_batch_statistics(module))


def _key(input: Tensor) -> Key:
    return tuple(input.shape[1:]), input.dtype, input.device


def _version(tensor: Tensor) -> int:
    # Inference tensors have no version; they are compared by identity and address.
    return 0 if tensor.is_inference() else tensor._version
