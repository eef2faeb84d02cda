"""ConformalLayers: an nn.Sequential that trains layer by layer and evaluates as one fold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, overload

import torch
from torch import Tensor, nn

from ..errors import ConformalError, is_real, refusal
from ..folding.cache import FoldCache, must_run
from ..folding.certificate import rounding_budget
from ..folding.operators import freeze, frozen_layers
from ..folding.part import lower_part
from ..folding.problem import Conditions
from ..folding.split import stages_of
from ..folding.trace import Trace, trace_modules
from ..functional import Scalar, autocasts, transformed, wide_dtype
from ..recipe.torch.module import RecipeModule
from .layerwise import run_layers
from .registry import (
    SUPPORTED_KINDS,
    check_module,
    flatten_modules,
    modules_in,
)

# Multiply-adds that the first call in eval() may spend on folding: about half a second.
EVAL_EFFORT = 4e9
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


class ConformalLayers(nn.Sequential):
    """Chain linear layers, :class:`ReSPro` activations and homogeneous maps, as ``nn.Sequential`` does.

    In training mode the layers run one by one. In evaluation mode, without gradients to trainable
    parameters, the first call for an input shape folds them into one linear map and one quadratic
    form; later calls reuse the fold until a parameter, a buffer, an attribute of a layer or the list of
    layers changes. Every call compares them with a copy; :func:`conformallayers.fold` is the way without that cost.
    At most 32 folds and 64 MiB are kept. Both modes give the same numbers. A sample of
    zeros gives zeros; a sample with NaN or infinity gives NaN and does not affect others.

    The embedding of the input gives a sample x the coordinate ``t = √(‖x‖² + offset²)``. Without an offset a
    network of projective activations does not see the contrast of an image; an offset of the size of a typical
    norm keeps it. With ``unit="rms"`` every norm is a root mean square over the coefficients, so that the
    entries of points are of order 1, as batch normalisation, learning rates and heads expect.

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

    _cache: FoldCache
    _offset: str | float | None = None  # of the class, for pickles without one
    _unit: str = "norm"

    def __init__(
        self, *modules: Any, offset: str | float | None = None, unit: str = "norm"
    ) -> None:
        self._reset_cache()
        super().__init__(*modules)
        self.offset, self.unit = offset, unit

    # -- the embedding --------------------------------------------------------------------------

    @property
    def offset(self) -> Scalar | None:
        """The offset of the embedding; a tensor if it is learned. Set it to any value of the argument."""
        if self._offset == "learned":
            return self.log_offset.to(wide_dtype(self.log_offset.device)).exp()
        return self._offset  # type: ignore[return-value]

    @offset.setter
    def offset(self, value: str | float | None) -> None:
        self._offset = _checked_offset(value)
        self._parameters.pop("log_offset", None)
        if self._offset == "learned":
            like = next(self.parameters(), torch.empty(()))
            self.log_offset = nn.Parameter(torch.zeros((), dtype=like.dtype, device=like.device))

    @property
    def unit(self) -> str:
        """The unit of lengths, ``"norm"`` or ``"rms"``."""
        return self._unit

    @unit.setter
    def unit(self, value: str) -> None:
        if value not in ("norm", "rms"):
            remedy = 'The paper\'s is "norm"; "rms" makes entries of order 1.'
            raise refusal("ConformalLayers(unit=...)", '"norm" or "rms"', repr(value), remedy)
        self._unit = value

    @property
    def embedding(self) -> tuple[float, str]:
        """The offset as a number, 0 for none, and the unit."""
        with torch.no_grad():
            offset = float(self.offset or 0.0)
        if not math.isfinite(offset):
            remedy = "Look for NaN or infinity in log_offset."
            raise refusal("ConformalLayers", "a finite offset", str(offset), remedy)
        return offset, self.unit

    def reset_parameters(self) -> None:
        """Set a learned offset to 1."""
        if self._offset == "learned":
            nn.init.zeros_(self.log_offset)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments beside the modules that are not the defaults."""
        offset = {} if self._offset is None else {"offset": self._offset}
        return offset if self._unit == "norm" else {**offset, "unit": self._unit}

    def extra_repr(self) -> str:
        """Return the settings."""
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())

    def _share_embedding(self, other: Self) -> Self:
        """Give another network this embedding; a learned offset is shared, as layers are."""
        other._offset, other._unit = self._offset, self._unit
        if self._offset == "learned":
            other.log_offset = self.log_offset
        return other

    # -- nn.Sequential's interface ---------------------------------------------------------------

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a layer under a name; refuse what does not fold."""
        self._check(name, module)
        super().add_module(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        modules = self.__dict__.get("_modules")
        if modules is not None and (isinstance(value, nn.Module) or name in modules):
            self._check(name, value)
        super().__setattr__(name, value)

    @overload
    def __getitem__(self, idx: slice) -> Self: ...
    @overload
    def __getitem__(self, idx: int) -> nn.Module: ...
    def __getitem__(self, idx: slice | int) -> Self | nn.Module:
        item: Any = super().__getitem__(idx)
        return self._share_embedding(item) if isinstance(idx, slice) else item

    def insert(self, index: int, module: nn.Module) -> Self:
        """Insert a layer; refuse what does not fold."""
        self._check(str(index), module)
        super().insert(index, module)
        return self

    def __add__(self, other: Iterable[nn.Module]) -> Self:
        return self._share_embedding(self.__class__(*self, *other))

    def __mul__(self, other: int) -> Self:
        return self._share_embedding(self.__class__(*(list(self) * other)))

    __rmul__ = __mul__

    # -- forward --------------------------------------------------------------------------------

    def forward(self, input: Tensor) -> Tensor:
        """Map a batch; fold first where that is allowed and worth it."""
        self._check_batch(input)
        if torch.compiler.is_compiling():
            return self._run_layers(input)
        if self.training or transformed() or _LAYER_BY_LAYER.get():
            return self._run_layers_or_explain(input)
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
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

    def train(self, mode: bool = True) -> Self:
        """Switch the mode; training forgets the fold."""
        if mode:
            self._cache.clear()
        return super().train(mode)

    def _run_layers_or_explain(self, input: Tensor) -> Tensor:
        try:
            return self._run_layers(input)
        except ConformalError:
            raise
        except (RuntimeError, ValueError, IndexError):
            self.trace(tuple(input.shape[1:]))  # raises an error that names the layer
            raise

    def _run_layers(self, input: Tensor) -> Tensor:
        """Run the layers one by one in the balanced scaling (see ``folding/stages.py`` for the letters)."""
        offset = self.offset
        offset = 0.0 if offset is None else offset
        return run_layers(flatten_modules(self), input, self.training, offset, self._unit == "rms")

    # -- folding --------------------------------------------------------------------------------

    def trace(self, input_shape: tuple[int, ...]) -> Trace:
        """Return the steps for an input shape; :func:`conformallayers.trace` checks it first."""
        frozen = [(path, freeze(module)) for path, module in flatten_modules(self)]
        return trace_modules(frozen, input_shape, *self.embedding)

    def _fold(self, input: Tensor) -> RecipeModule:
        with torch.inference_mode(False), torch.no_grad():
            try:
                shape = tuple(input.shape[1:])
                steps = trace_modules(frozen_layers(self), shape, *self.embedding)
            except ConformalError:
                self._run_layers_or_explain(input)  # raises an error that shows the batch
                raise
            budget = rounding_budget(input.dtype)
            conditions = Conditions(budget, input.dtype, input.device, effort=EVAL_EFFORT)
            recipe, _ = lower_part(stages_of(steps), conditions)
            return RecipeModule(recipe, input.dtype).eval()

    # -- checks ---------------------------------------------------------------------------------

    def _check(self, name: str, module: Any) -> None:
        if not isinstance(module, nn.Module):
            raise refusal(
                f"ConformalLayers at position {name}",
                SUPPORTED_KINDS,
                repr(module),
                "Pass modules, or one OrderedDict of modules.",
            )
        passed = [a for path, child in modules_in(name, module) for a in check_module(path, child)]
        spectral = [act for act in passed if getattr(act, "alpha", None) == "spectral"]
        others = {
            m for key, part in self._modules.items() if key != name and part for m in part.modules()
        }
        if len(set(spectral)) < len(spectral) or others & set(spectral):
            raise refusal(
                f"ConformalLayers at position {name}",
                f'a {type(spectral[0]).__name__}(alpha="spectral") of its own',
                "one that stands elsewhere too",
                "Make a second one: each keeps the norm of the layers before it.",
            )

    def _check_batch(self, input: Tensor) -> None:
        if not isinstance(input, Tensor) or not input.is_floating_point():
            tensor = isinstance(input, Tensor)
            got = str(input.dtype) if tensor else type(input).__name__
            remedy = "Convert it with x.float()." if tensor else "Use torch.as_tensor(x)."
            raise refusal("ConformalLayers", "a floating-point tensor", got, remedy)
        parameter = next(self.parameters(), None)
        if parameter is not None and parameter.dtype != input.dtype and not autocasts(input):
            raise refusal(
                "ConformalLayers",
                f"an input of the parameters' dtype {parameter.dtype}",
                str(input.dtype),
                "Convert the input, or the model with model.to(x.dtype).",
            )
        if input.dim() < 2 or 0 in input.shape[1:]:
            raise refusal(
                "ConformalLayers",
                "a batch of samples, each with at least one coefficient",
                f"an input of shape {tuple(input.shape)}",
                "Add the batch axis with x.unsqueeze(0).",
            )

    # -- state ----------------------------------------------------------------------------------

    def _reset_cache(self) -> None:
        self.__dict__["_cache"] = FoldCache()  # past __setattr__: no part of the module's state

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_cache"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._reset_cache()


def _checked_offset(offset: Any) -> str | float | None:
    if offset is None or (isinstance(offset, str) and offset == "learned"):
        return offset
    if not is_real(offset) or not 0 < offset < math.inf:
        expected = 'None, "learned" or a finite number > 0'
        remedy = "Leave it out for the paper's embedding."
        raise refusal("ConformalLayers(offset=...)", expected, repr(offset), remedy)
    return float(offset)
