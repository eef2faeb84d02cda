"""The container that runs its layers one by one, in the behaviour of nn.Sequential."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Self, overload

import torch
from torch import Tensor, nn

from ..errors import is_real, refusal
from ..functional import Scalar, autocasts, wide_dtype
from .layerwise import run_layers
from .registry import SUPPORTED_KINDS, check_module, flatten_modules, modules_in


class ConformalSequential(nn.Sequential):
    """Run linear layers, radial activations and homogeneous maps one by one, without folding.

    :class:`conformallayers.ConformalLayers` is this container, folded in ``eval()``, and documents the arguments.
    """

    _offset: str | float | None = None  # of the class, for pickles without one
    _unit: str = "norm"

    def __init__(
        self, *modules: Any, offset: str | float | None = None, unit: str = "norm"
    ) -> None:
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
        """Map a batch."""
        self._check_batch(input)
        return self._run(input)

    def _run(self, input: Tensor) -> Tensor:
        return self._run_layers(input)

    def _run_layers(self, input: Tensor) -> Tensor:
        """Run the layers one by one, on points."""
        offset = self.offset
        offset = 0.0 if offset is None else offset
        return run_layers(flatten_modules(self), input, self.training, offset, self._unit == "rms")

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


def _checked_offset(offset: Any) -> str | float | None:
    if offset is None or (isinstance(offset, str) and offset == "learned"):
        return offset
    if not is_real(offset) or not 0 < offset < math.inf:
        expected = 'None, "learned" or a finite number > 0'
        remedy = "Leave it out for the paper's embedding."
        raise refusal("ConformalLayers(offset=...)", expected, repr(offset), remedy)
    return float(offset)
