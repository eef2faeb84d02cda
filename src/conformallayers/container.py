"""ConformalLayers: nn's container, which trains layer by layer, folded in eval().

It keeps its folds by input key, and drops them at any change of the model: every call compares the whole state of the model
with a copy of it, so that no write can go unnoticed. :func:`conformallayers.fold` is the way without that cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import zip_longest
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from .errors import ConformalError
from .folding.fold import fold_layers
from .folding.plan import EVAL_EFFORT, Settings
from .functional import transformed
from .graph.trace import trace_layers
from .nn.registry import find_spec, has_batch_statistics, has_global_hooks, has_hooks
from .nn.sequential import ConformalSequential
from .recipe.torch.module import RecipeModule

Key = tuple[tuple[int, ...], torch.dtype, torch.device]
# Limits of a cache; the newest fold is always kept.
MOST_FOLDS = 32
MOST_BYTES = 64 * 2**20
_LAYER_BY_LAYER: ContextVar[bool] = ContextVar("layer_by_layer", default=False)


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Make every ConformalLayers in this context run its layers one by one, folding nothing.

    Examples:
        >>> import conformallayers as cl
        >>> model = cl.ConformalLayers(cl.Linear(4, 2), cl.ReSPro()).eval()
        >>> with cl.layer_by_layer(), torch.no_grad():
        ...     model(torch.ones(1, 4)).shape
        torch.Size([1, 2])
    """
    token = _LAYER_BY_LAYER.set(True)
    try:
        yield
    finally:
        _LAYER_BY_LAYER.reset(token)


class ConformalLayers(ConformalSequential):
    """Chain linear layers, :class:`ReSPro` activations and homogeneous maps, as ``nn.Sequential`` does.

    In training mode the layers run one by one. In evaluation mode, without gradients to trainable
    parameters, the first call for an input shape folds them into one linear map and one quadratic
    form; later calls reuse the fold until a parameter, a buffer, an attribute of a layer or the list of
    layers changes. Every call compares them with a copy; a fold of :func:`conformallayers.fold` avoids that cost.
    At most 32 folds and 64 MiB are kept. Both modes give the same numbers. A sample of
    zeros gives zeros; a sample with NaN or infinity gives NaN and does not affect others.

    The embedding of the input gives a sample x the coordinate ``t = √(‖x‖² + offset²)``. Without an offset a
    network of projective activations is invariant to the contrast of an image; with an offset about as large as a
    typical norm, contrast counts. With ``unit="rms"`` every norm is a root mean square over the coefficients, so
    entries of points are of order 1, as batch normalization, learning rates and heads expect.

    Args:
        *modules: layers of supported kinds, or one ``OrderedDict`` of them.
        offset: None, a number > 0, or ``"learned"``: the exponential of the parameter ``log_offset``, initially 1.
        unit: ``"norm"`` or ``"rms"``. The defaults of both are the paper's.

    Shape:
        (B, ...) → (B, ...); always with a batch axis.

    Examples:
        >>> import conformallayers as cl
        >>> model = cl.ConformalLayers(
        ...     cl.Conv2d(3, 32, 3), cl.ReSPro(), cl.AvgPool2d(2), cl.Flatten()
        ... )
        >>> model(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 7200])
        >>> model.append(torch.nn.Sigmoid())
        Traceback (most recent call last):
        ...
        conformallayers.errors.ConformalError: ConformalLayers at position 4: expected a linear layer, an activation such as cl.ReSPro or a homogeneous map such as nn.ReLU, got Sigmoid. Use nn.ReLU(), nn.LPPool2d(2, ...) or cl.ReSPro(), which fold, or put it into the head.
    """

    _cache: FoldCache  # no part of the module's state

    def __init__(
        self, *modules: Any, offset: str | float | None = None, unit: str = "norm"
    ) -> None:
        super().__init__(*modules, offset=offset, unit=unit)
        self._cache = FoldCache()

    def train(self, mode: bool = True) -> Self:
        """Switch the mode; training forgets the fold."""
        if mode:
            self._cache.clear()
        return super().train(mode)

    def _run(self, input: Tensor) -> Tensor:
        """Fold first where that is allowed and worth it."""
        if torch.compiler.is_compiling():
            return self._run_layers(input)
        gradients = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        if self.training or gradients or transformed() or _LAYER_BY_LAYER.get():
            return self._run_layers_or_explain(input)
        folded = self._cache.find(self, input)
        if folded is None:
            others = [module for module in self.modules() if module is not self]
            busy = any(must_run(module) for module in others)
            if busy or input.device.type == "meta":
                return self._run_layers_or_explain(input)
            folded = self._cache.fold(self, input, self._fold)
        result: Tensor = folded(input)
        return result

    def _run_layers_or_explain(self, input: Tensor) -> Tensor:
        try:
            return self._run_layers(input)
        except ConformalError:
            raise
        except (RuntimeError, ValueError, IndexError):
            trace_layers(self, tuple(input.shape[1:]))  # raises an error that names the layer
            raise

    def _fold(self, input: Tensor) -> RecipeModule:
        with torch.inference_mode(False), torch.no_grad():
            try:
                steps = trace_layers(self, tuple(input.shape[1:]))
            except ConformalError:
                self._run_layers_or_explain(input)  # raises an error that shows the batch
                raise
            settings = Settings(input.dtype, input.device, effort=EVAL_EFFORT)
            return RecipeModule(fold_layers(steps, settings), input.dtype).eval()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_cache"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._cache = FoldCache()


# -- the folds of a container ------------------------------------------------------------------------


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
    """Check whether a layer must run, because a fold would lose part of its effect.

    Such layers have hooks, or are a dropout or batch normalization in training mode.
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
    """Yield the items of built-in collections and the contents of arrays."""
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
    """Compare a leaf with a copy; leaves that cannot be compared differ."""
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
