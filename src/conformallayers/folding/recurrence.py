"""The scalars of a network with biases or branches: which parts a point has, and what divides them.

A point is a sum of parts: ``p = Σ_a k_a·A_a x̂ + Σ_c k_c·v_c``, linear ones and constant ones. Every
activation divides all parts of its point by one growth, so the coefficient of a part is a product:
``k_a = (1/τ₀)·Π 1/growth``, ``k_c = Π 1/growth`` over the sites that the part has passed. What a site
needs is the energy of its point: forms ``x̂ᵀ A_aᵀA_b x̂``, dot products ``(A_aᵀ v_c)·x̂`` and constants
``v_c·v_d``. All coefficients stay bounded, whatever the coordinate does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..functional import full_precision, guarded_ratio, scale_samples, wide_dtype
from ..nn.activations import LARGEST, Rule

Key = tuple[int, ...]  # the sites whose growth divides a coefficient


@dataclass(frozen=True)
class Site:
    """One activation, or several that collapse.

    Args:
        rule: how the coordinate grows.
        parts: the keys of the linear parts; the forms of pairs (a, b ≥ a) come in this order.
        shifts: the keys of the constant parts.
        rows: float64 (parts · shifts, d_in): dot products that mix a linear and a constant part.
        gram: float64 (shifts, shifts): inner products of the constant parts.
        coordinate: the sites that the coordinate has passed.
        factor: what the coordinate was multiplied with besides.
    """

    rule: Rule
    parts: tuple[Key, ...]
    shifts: tuple[Key, ...]
    rows: Tensor
    gram: Tensor
    coordinate: Key
    factor: float = 1.0


@dataclass(frozen=True)
class Recurrence:
    """The sites in order, and the parts of the output.

    Args:
        sites: the activations.
        parts: the keys of the linear parts of the output.
        shifts: the keys of its constant parts.
        vectors: float64 (shifts, *output_shape): the constant parts.
    """

    sites: tuple[Site, ...]
    parts: tuple[Key, ...]
    shifts: tuple[Key, ...]
    vectors: Tensor

    @property
    def dots(self) -> int:
        """The number of dot products that biases cost a sample."""
        return sum(len(site.rows) for site in self.sites)


def pairs(parts: int) -> int:
    """Return the number of pairs (a, b ≥ a).

    Examples:
        >>> [pairs(n) for n in (1, 2, 3)]
        [1, 3, 6]
    """
    return parts * (parts + 1) // 2


class Recurring(nn.Module):
    """Run a recurrence on what a strategy computed: linear parts of the output, and all forms.

    All of it is wide: an energy may be a small difference of its parts.

    Args:
        recurrence: what to run.
        scale: what the constant parts of the output are multiplied with.
        device: of the arrays.
    """

    settings: ClassVar[tuple[str, ...]] = ("keys", "parts", "shifts")
    rows: Tensor
    vectors: Tensor
    factors: Tensor

    def __init__(self, recurrence: Recurrence, scale: float, device: torch.device) -> None:
        super().__init__()
        sites, place = recurrence.sites, (device, wide_dtype(device))
        self.keys = [(site.rule, site.parts, site.shifts, site.coordinate) for site in sites]
        self.parts, self.shifts = recurrence.parts, recurrence.shifts
        rows = torch.cat([site.rows for site in sites]) if sites else torch.zeros(0, 1)
        self.register_buffer("rows", rows.to(*place))
        self.register_buffer("vectors", (scale * recurrence.vectors).to(*place))
        factors = torch.tensor([site.factor for site in sites], dtype=torch.float64)
        self.register_buffer("factors", factors.to(*place))
        for index, site in enumerate(sites):
            self.register_buffer(f"gram{index}", site.gram.to(*place))

    @property
    def signature(self) -> str:
        """What must agree for the arrays of another recurrence to fit."""
        sites = [(rule.signature, *keys) for rule, *keys in self.keys]
        return repr((sites, self.parts, self.shifts))

    def forward(
        self,
        unit: Tensor,
        m: Tensor,
        tau: Tensor,
        v: Tensor,
        forms: Sequence[Tensor],
        scale: float,
    ) -> Tensor:
        """Return the points.

        Args:
            unit, m, tau: the input as :func:`functional.normalise` gives it, wide.
            v: (B, parts, *output_shape), the linear parts of the output, up to ``scale``.
            forms: the value of each form, (B,) each.
            scale: what they still have to be multiplied with.
        """
        alive = (tau != 0).to(tau.dtype)
        inverse, start = guarded_ratio(1.0, tau), m * tau
        with full_precision(unit):
            dots = (
                unit.flatten(1) @ self.rows.T
                if len(self.rows)
                else unit.new_zeros(unit.shape[0], 0)
            )
        growths: list[Tensor] = []

        def along(key: Key, coefficient: Tensor) -> Tensor:
            for site in key:
                coefficient = coefficient / growths[site]
            return coefficient

        used, row = 0, 0
        for index, (rule, parts, shifts, coordinate) in enumerate(self.keys):
            linear = [along(key, inverse) for key in parts]
            constant = [along(key, alive) for key in shifts]
            energy = torch.zeros_like(tau)
            for a in range(len(parts)):
                for b in range(a, len(parts)):
                    pair = linear[a] * linear[b] * forms[used]
                    energy = energy + (pair if a == b else 2 * pair)
                    used += 1
            if constant:
                ks = torch.stack(constant, 1)
                gram: Tensor = getattr(self, f"gram{index}")
                energy = energy + ((ks @ gram) * ks).sum(1)
                for k in linear:
                    mixed = (dots[:, row : row + len(constant)] * ks).sum(1)
                    energy = energy + 2 * k * mixed
                    row += len(constant)
            t = start * self.factors[index]
            for site in coordinate:  # one by one: a product of many could overflow on its way
                t = (t * growths[site]).clamp_max(LARGEST)
            growths.append(rule.grow(energy.clamp_min(0), t).clamp_max(LARGEST))
        y = torch.zeros_like(v[:, 0])
        for index, key in enumerate(self.parts):
            y = y + scale_samples(v[:, index], scale * along(key, inverse))
        for key, vector in zip(self.shifts, self.vectors, strict=True):
            y = y + scale_samples(vector.expand_as(y), along(key, alive))
        return y
