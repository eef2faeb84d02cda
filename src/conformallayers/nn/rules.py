"""How activations change the coordinate: in the layers, in a folded network, and in its proofs.

With ``q`` the squared length of the point in units of α, a rule multiplies the coordinate by a
growth: ``1 + t·q`` as published, ``1 + q`` in the projective form, ``√(1 + q)`` for Gnomonic. The
first and the last collapse: what several of them in a row need is the sum of their energies, which
is one quadratic form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..functional import guarded_ratio

LARGEST = 1e300  # coordinate: beyond it the published form has sent every point to 0
Growth = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rule:
    """The rule of an activation whose growth is a function of q alone.

    Args:
        name: how it is shown; rules of one name are equal.
        growth: q → the factor of the coordinate, 1 at 0.
        collapses: whether rules in a row need only the sum of their energies.
        on_points: whether the scale of the input does not matter.
        provable: whether the bound of a simplified form bounds the coordinate's relative error.
    """

    name: str
    growth: Growth = field(compare=False)
    collapses: bool = False
    on_points: bool = True
    provable: bool = False

    @property
    def signature(self) -> str:
        """The name, and what an activation of a user's own has learned for its growth."""
        owner = getattr(self.growth, "__self__", None)
        parts = [self.name]
        if isinstance(owner, nn.Module):
            for key, value in sorted(owner.state_dict().items()):
                if key not in ("norm", "log_factor"):  # they make α, which is elsewhere
                    parts.append(f"{key}={value.tolist()}")
        return " ".join(parts)

    def advance(self, tau: Tensor, n: Tensor, m: Tensor | float) -> Tensor:
        """Return the next τ, given the energy ``n = q·τ²`` and the peak m of the input."""
        return tau * self.growth(guarded_ratio(guarded_ratio(n, tau), tau))

    def grow(self, q: Tensor, t: Tensor) -> Tensor:
        """Return the factor of the coordinate t."""
        return self.growth(q)


class _Published(Rule):
    def advance(self, tau: Tensor, n: Tensor, m: Tensor | float) -> Tensor:
        return tau + m * n

    def grow(self, q: Tensor, t: Tensor) -> Tensor:
        return 1 + t * q


class _Projective(Rule):
    def advance(self, tau: Tensor, n: Tensor, m: Tensor | float) -> Tensor:
        return tau + guarded_ratio(n, tau)


def _one_more(q: Tensor) -> Tensor:
    return 1 + q


def _root(q: Tensor) -> Tensor:
    return (1 + q).sqrt()


PUBLISHED = _Published("published", _one_more, collapses=True, on_points=False, provable=True)
PROJECTIVE = _Projective("projective", _one_more, provable=True)
GNOMONIC = Rule("gnomonic", _root, collapses=True, provable=True)
