"""The scalars of a network with biases or branches: which parts a point has, and what divides them.

A point is a sum of parts: ``p = Σ_a k_a·A_a x̂ + Σ_c k_c·v_c``, linear ones and constant ones. Every
activation divides all parts of its point by one growth, so the coefficient of a part is a product:
``k_a = (1/τ₀)·Π 1/growth``, ``k_c = Π 1/growth`` over the sites that the part has passed. What a site
needs is the energy of its point: forms ``x̂ᵀ A_aᵀA_b x̂``, dot products ``(A_aᵀ v_c)·x̂`` and constants
``v_c·v_d``. All coefficients stay bounded, whatever the coordinate does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .errors import refusal
from .functional import full_precision, guarded_ratio, scale_samples, wide_dtype
from .rules import Rule

Key = tuple[int, ...]  # the sites whose growth divides a coefficient
Self = TypeVar("Self", bound="Recurring")
_LARGEST = 1e300  # of a coordinate: beyond it the published form has sent every point to 0


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

    @property
    def forms(self) -> int:
        """The number of quadratic forms."""
        return sum(pairs(len(site.parts)) for site in self.sites)


def pairs(parts: int) -> int:
    """Return the number of pairs (a, b ≥ a).

    Examples:
        >>> [pairs(n) for n in (1, 2, 3)]
        [1, 3, 6]
    """
    return parts * (parts + 1) // 2


class Recurring(nn.Module):
    """Run a recurrence on what a strategy computed: linear parts of the output, and all forms.

    Args:
        recurrence: what to run.
        scale: what the constant parts of the output are multiplied with.
        dtype, device: of the arrays.
    """

    rows: Tensor
    vectors: Tensor

    def __init__(
        self, recurrence: Recurrence, scale: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        sites = recurrence.sites
        self.keys = [(site.rule, site.parts, site.shifts, site.coordinate) for site in sites]
        self.parts, self.shifts = recurrence.parts, recurrence.shifts
        empty = torch.zeros(0, 1, dtype=torch.float64)
        rows = torch.cat([site.rows for site in sites]) if sites else empty
        peaks = rows.abs().amax(1, keepdim=True) if len(rows) else rows
        peaks = peaks + (peaks == 0)
        self.register_buffer("rows", (rows / peaks).to(device, dtype))
        self.register_buffer("vectors", (scale * recurrence.vectors).to(device, dtype))
        # Scalars stay wide whatever the module is cast to.
        self.peaks = peaks.flatten()
        self.factors = torch.tensor([site.factor for site in sites], dtype=torch.float64)
        self.grams = [site.gram for site in sites]
        self._place(device)

    def _place(self, device: torch.device) -> None:
        dtype = wide_dtype(device)
        self.peaks, self.factors = (t.to(device, dtype) for t in (self.peaks, self.factors))
        self.grams = [gram.to(device, dtype) for gram in self.grams]

    def _apply(self: Self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._place(self.vectors.device)
        return self

    def get_extra_state(self) -> Tensor:
        """Return the float64 scalars, which are part of the state beside the buffers."""
        grams = (gram.flatten() for gram in self.grams)
        return torch.cat([self.peaks, self.factors, *grams]).cpu().double()

    def set_extra_state(self, state: Tensor) -> None:
        """Take the scalars of a fold of the same kind."""
        sizes = [len(self.peaks), len(self.factors), *(gram.numel() for gram in self.grams)]
        if state.numel() != sum(sizes):
            expected, got = f"{sum(sizes)} factors of biases", str(state.numel())
            remedy = "Load the state of a fold of the same network."
            raise refusal("Folded.load_state_dict", expected, got, remedy)
        self.peaks, self.factors, *grams = state.to(self.peaks).split(sizes)
        self.grams = [new.view_as(old) for new, old in zip(grams, self.grams, strict=True)]

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
            unit, m, tau: the input as :func:`functional.normalise` gives it.
            v: (B, parts, *output_shape), the linear parts of the output, up to ``scale``.
            forms: the value of each form, (B,) each.
            scale: what they still have to be multiplied with.
        """
        alive = (tau != 0).to(tau.dtype)
        inverse, start = guarded_ratio(1.0, tau), m * tau
        dots = self._dots(unit)
        shrinks: list[Tensor] = []  # 1 / growth of each site

        def along(key: Key, first: Tensor) -> Tensor:
            return math.prod((shrinks[site] for site in key), start=first)

        used, row = 0, 0
        for (rule, parts, shifts, coordinate), gram, factor in zip(
            self.keys, self.grams, self.factors, strict=True
        ):
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
                energy = energy + ((ks @ gram.to(ks.dtype)) * ks).sum(1)
                for k in linear:
                    mixed = (dots[:, row : row + len(constant)] * ks).sum(1)
                    energy = energy + 2 * k * mixed
                    row += len(constant)
            t = start * factor
            for site in coordinate:  # one by one: a product of many could overflow on its way
                t = (t / shrinks[site]).clamp_max(_LARGEST)
            shrinks.append(1 / rule.grow(energy.clamp_min(0), t))
        y = torch.zeros_like(v[:, 0])
        for index, key in enumerate(self.parts):
            y = y + scale_samples(v[:, index], scale * along(key, inverse))
        for key, vector in zip(self.shifts, self.vectors, strict=True):
            y = y + scale_samples(vector.expand_as(y), along(key, alive))
        return y

    def _dots(self, unit: Tensor) -> Tensor:
        if not len(self.rows):
            return unit.new_zeros(unit.shape[0], 0)
        dtype = torch.promote_types(unit.dtype, torch.float32)
        with full_precision(unit):
            products = unit.flatten(1).to(dtype) @ self.rows.T.to(dtype)
        return products.to(wide_dtype(unit.device)) * self.peaks
