"""ReSPro, the activation of the paper, and the ways to get its radius α."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .errors import refusal
from .functional import Scalar, positive, project, respro, wide_dtype

_MODES = ("young", "spectral", "learned")


class ReSPro(nn.Module):
    """Reflect in a sphere of radius α, scale by 2/α, project back: the activation of the paper.

    Inside a :class:`ConformalLayers` it changes only the homogeneous coordinate:
    ``t ← (α/2)·t + ‖x‖²/(2α)`` as published, ``t ← (α/2)·t + ‖x‖²/(2α·t)`` in the projective form.
    Called on its own it maps points (t = 1, where the forms agree): ``y = 2αx/(α² + ‖x‖²)``.

    Args:
        alpha: how to get α.

            - ``None`` or ``"young"``: the product of the norm bounds of the layers since the last
              activation (Young's inequality), as in the paper; gradients flow through it.
            - ``"spectral"``: the norm of those layers as one map, by one step of power iteration
              per training forward. It nears the norm from below. Kept in the buffer ``norm``.
            - ``"learned"``: Young's bound times a trained positive factor that starts at 1.
            - a number > 0: that number.
        projective: take the projective form, invariant to the scale of the input and bounded by 1.
        device, dtype: where and how the factor and the norm are kept.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> respro = ReSPro(alpha=3.0)
        >>> respro(torch.tensor([[3.0, 0.0], [0.0, 1.5]]))
        tensor([[1.0000, 0.0000],
                [0.0000, 0.8000]])
    """

    norm: Tensor
    vector: Tensor | None

    def __init__(
        self,
        alpha: str | float | None = None,
        *,
        projective: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.alpha: str | float = _checked_alpha(alpha)
        if not isinstance(projective, bool):
            raise refusal("ReSPro(projective=...)", "True or False", repr(projective), "Give one.")
        self.projective = projective
        if self.alpha == "learned":
            self.log_factor = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        if self.alpha == "spectral":
            self.register_buffer("norm", torch.empty((), device=device, dtype=dtype))
            self.register_buffer("vector", None, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the learned factor to 1, and forget the spectral norm."""
        if self.alpha == "learned":
            nn.init.zeros_(self.log_factor)
        if self.alpha == "spectral":
            nn.init.zeros_(self.norm)
            self.vector = None

    def resolve(self, bound: Scalar) -> Scalar:
        """Return α, given the bound of the layers since the last activation; never 0."""
        if isinstance(self.alpha, float):
            return self.alpha
        if self.alpha == "learned":
            return positive(bound) * _wide(self.log_factor).exp()
        if self.alpha == "spectral":
            norm = _wide(self.norm)
            fallback = torch.as_tensor(positive(bound), dtype=norm.dtype, device=norm.device)
            return torch.where(norm > 0, norm, fallback)
        return positive(bound)

    def forward(self, input: Tensor) -> Tensor:
        """Map points; needs α as a number."""
        if not isinstance(self.alpha, float):
            raise refusal(
                "ReSPro called on its own",
                "alpha as a number",
                f'alpha="{self.alpha}"',
                "Put it into cl.ConformalLayers after the layers that bound it, or give a number.",
            )
        if not input.is_floating_point() or input.dim() < 2:
            raise refusal(
                "ReSPro called on its own",
                "a batch of points as a floating-point tensor",
                f"{input.dtype} of shape {tuple(input.shape)}",
                "Add the batch axis with x.unsqueeze(0), or convert it with x.float().",
            )
        return project(*respro(input, input.new_ones(input.shape[0]), self.alpha))

    def extra_repr(self) -> str:
        """Show the arguments that are not the default."""
        alpha = {"young": "", "spectral": "alpha='spectral'", "learned": "alpha='learned'"}
        shown = alpha[self.alpha] if isinstance(self.alpha, str) else f"alpha={self.alpha:g}"
        return ", ".join(part for part in (shown, "projective=True" * self.projective) if part)


def _wide(scalar: Tensor) -> Tensor:
    return scalar.to(wide_dtype(scalar.device))


def _checked_alpha(alpha: Any) -> str | float:
    if alpha is None:
        return "young"
    if isinstance(alpha, str) and alpha in _MODES:
        return alpha
    number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if not number or not math.isfinite(alpha) or alpha <= 0:
        raise refusal(
            "ReSPro(alpha=...)",
            'None, "young", "spectral", "learned" or a finite number > 0',
            repr(alpha),
            "Leave alpha out to use the bound of the layers before it.",
        )
    return float(alpha)
