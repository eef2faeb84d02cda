"""LayerSpec: one row of the registry, everything the library knows of a module type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..functional import Scalar
from .bounds import Shape

Bound = Callable[[nn.Module, Shape], Scalar]
Scaled = Callable[[nn.Module, Tensor, Scalar], Tensor]
Check = Callable[[nn.Module], str | None]


@dataclass(frozen=True)
class LayerSpec:
    """Describe a linear module type, or a positively homogeneous one.

    Args:
        bound: (module, input shape) → an upper bound of the operator norm; of a homogeneous map, an
            upper bound of ``‖h(x)‖/‖x‖``.
        scaled: (module, input, factor) → factor · U(input) without the bias, by a factor of the
            weights; None if a later layer should apply the factor.
        check: module → why this configuration is refused, or None.
        rank: the number of axes of a batch, if the module fixes it.
        channels: the name of the attribute that holds the size of axis 1.
        identity_in_eval: whether the module is the identity in evaluation mode.
        affine: whether the module adds its ``bias``, if that is not None.
        multiple: whether it multiplies the whole sample by one number in evaluation mode.
        norm_factor: (module, input shape) → the number by which it multiplies the norm of every
            sample, or None if there is no such number.
        homogeneous: whether it is not linear, but ``h(λx) = λ·h(x)`` for λ > 0.
    """

    bound: Bound
    scaled: Scaled | None = None
    check: Check | None = None
    rank: int | None = None
    channels: str | None = None
    identity_in_eval: bool = False
    affine: bool = False
    multiple: bool = False
    norm_factor: Callable[[Any, Shape], float | None] | None = None
    homogeneous: bool = False

    def takes(self, shape: Shape) -> bool:
        """Tell whether samples of a shape have the number of axes that the module fixes."""
        return self.rank is None or len(shape) + 1 == self.rank

    def problem(self, module: nn.Module) -> str | None:
        """Return why the configuration of a module is refused, or None."""
        return None if self.check is None else self.check(module)


def scale_output(module: Any, x: Tensor, factor: Scalar) -> Tensor:
    """Return factor · module(x) for a module without a weight to scale."""
    result: Tensor = module(x)
    return result * factor
