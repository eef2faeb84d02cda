"""The evaluation cache of a ConformalLayers: folds by input key, dropped at any change of the model.

Every call compares the whole state of the model with a copy of it, so that no write can go unnoticed.
:func:`conformallayers.fold` is the way without that cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..nn.registry import find_spec, has_batch_statistics, has_global_hooks, has_hooks
from ..recipe.torch.module import RecipeModule

Key = tuple[tuple[int, ...], torch.dtype, torch.device]

# Limits of a cache; the newest fold is always kept.
MOST_FOLDS = 32
MOST_BYTES = 64 * 2**20


class FoldCache:
    """Keep the folds of one model for as long as it does not change; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Drop all folds and the copy of the state."""
        self._kept: tuple[list[Any], dict[Key, RecipeModule]] = ([], {})

    def find(self, model: nn.Module, input: Tensor) -> RecipeModule | None:
        """Return the fold for the shape, dtype and device of an input, or None without a valid one."""
        copied, folds = self._kept  # read once: another thread may replace both
        fold = folds.get(_key(input))
        return fold if fold is not None and _matches(model, copied) else None

    def fold(
        self, model: nn.Module, input: Tensor, build: Callable[[Tensor], RecipeModule]
    ) -> RecipeModule:
        """Build a fold and keep it unless the model changes meanwhile; drop the oldest beyond the limits."""
        with self._lock:
            found = self.find(model, input)  # another thread may have built it meanwhile
            if found is not None:
                return found
            copied, folds = self._kept
            if not _matches(model, copied):
                copied, folds = _copy(model), {}
            fold = build(input)
            if not _matches(model, copied):
                return fold
            folds = {**folds, _key(input): fold}
            sizes = [sum(buffer.nbytes for buffer in kept.buffers()) for kept in folds.values()]
            while len(sizes) > 1 and (len(sizes) > MOST_FOLDS or sum(sizes) > MOST_BYTES):
                del folds[next(iter(folds))], sizes[0]
            self._kept = copied, folds
            return fold


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


def _copy(model: nn.Module) -> list[Any]:
    return [x.detach().clone() if isinstance(x, Tensor) else x for x in _state(model)]


def _matches(model: nn.Module, copied: list[Any]) -> bool:
    """Compare all leaves of a model with copies of them."""
    pairs = zip_longest(_state(model), copied)
    return not has_global_hooks() and all(_same(leaf, copy) for leaf, copy in pairs)


def _state(model: nn.Module) -> Iterator[Any]:
    """Yield every module with its class and the leaves of its attributes: tensors, settings, children, hooks."""
    for module in model.modules():
        yield module
        yield type(module)
        yield from _leaves({k: value for k, value in vars(module).items() if k != "_cache"})


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what built-in collections hold, and the contents of arrays."""
    if isinstance(value, dict):
        yield len(value)
        for key, held in value.items():
            yield key
            yield from _leaves(held)
    elif isinstance(value, (list, tuple)):
        yield len(value)
        for held in value:
            yield from _leaves(held)
    elif isinstance(value, np.ndarray):
        yield value.dtype, value.shape, value.tobytes()
    else:
        yield frozenset(value) if isinstance(value, set) else value


def _same(leaf: Any, copied: Any) -> bool:
    """Compare a leaf with a copy; what cannot be compared is different."""
    if leaf is copied:
        return True
    try:
        if not isinstance(leaf, Tensor):
            return bool(leaf == copied)
        if (leaf.dtype, leaf.device) != (copied.dtype, copied.device):
            return False
        # Bits where values differ: NaN equals NaN.
        return torch.equal(leaf, copied) or (
            leaf.shape == copied.shape and torch.equal(_bits(leaf), _bits(copied))
        )
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
