"""Drop and round entries of forms within their certificates, and prove the result again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...folding.certificate import Certificate, ErrorBudget, proven, weakest
from ..layer_operations import Elementwise, Pad, Permute, Reshape
from ..operation import Operation
from ..point_operations import Advance, Normalize, QuadraticForm, Rebase, Rescale, SumSquares
from ..recipe import Recipe
from ..torch.points import RULES
from .constants import Array, Stored, form

_STEPS = 10, 7  # of the search in small and in large forms; each takes two factorisations
_LARGE = 1536
# How a form may be stored within a tolerance, smallest first, and the share of the room that
# dropped entries may take; the rest is for rounding.
_COMPACT = {"int8_t": 0.5, "int16_t": 0.9, "float": 1.0}


def room_left(certificate: Certificate | None) -> float:
    """Return the relative error that may still be added to a denominator.

    With D̂ within ``(1 − margin)·ε`` of D, another form within ε′ of D̂ is within
    ``(1 − margin)·ε + ε′·(1 + (1 − margin)·ε)`` of D.

    Examples:
        >>> room_left(Certificate(1e-2, math.inf, 1.0)), room_left(None)
        (0.01, 0.0)
    """
    if certificate is None or certificate.epsilon <= torch.finfo(torch.float32).eps:
        return 0.0
    used = (1 - certificate.margin) * certificate.epsilon
    return (certificate.epsilon - used) / (1 + used)


def room_each(room: float, forms: int) -> float:
    """Return the error that each of several forms may have, for the last coordinate to be off by ``room``.

    With τ off by δ and a form by ``ε′·(n + ‖x̂‖²)``, the projective ``τ + n/τ`` is off by at most
    ``(δ + ε′)/(1 − δ)``, because τ is never smaller than ‖x̂‖. The other rules are off by less.

    Examples:
        >>> room_each(1e-2, 1), 0.0049 < room_each(1e-2, 2) < 0.005
        (0.01, True)
    """
    low, high = 0.0, room
    for _ in range(60):
        each = (low + high) / 2 if forms > 1 else room
        off = 0.0
        for _ in range(forms):
            off = (off + each) / (1 - off) if off < 1 else math.inf
        low, high = (each, high) if off <= room else (low, each)
    return low


def needed(form: Tensor, budget: ErrorBudget) -> Tensor:
    """Return a mask of the entries of a form (n, n) that have to stay; the diagonal always does."""
    stays = torch.eye(len(form), dtype=torch.bool)
    found = (form != 0) | stays
    if budget.epsilon <= 0:
        return found
    size = form.diagonal() + budget.inverse_radius
    scale = size.clamp_min(torch.finfo(torch.float64).tiny).rsqrt()
    # Entries are compared as correlations: pixels at the edges have small rows, but count as much.
    score = form.abs() * scale[:, None] * scale
    scores = score[found & ~stays].sort().values
    least = found
    # Bisect the number of smallest entries to drop: ``low`` of them are proven, ``high`` are not.
    low, high = 0, len(scores) + 1
    for _ in range(_STEPS[len(form) > _LARGE]):
        middle = (low + high) // 2
        if middle == low:
            break
        mask = (found & (score > scores[middle - 1])) | stays
        if proven(form, form.where(mask, 0.0), budget):
            low, least = middle, mask
        else:
            high = middle
    return least


class Proofs:
    """Store the forms of a recipe, and keep the certificate of each denominator up to date.

    The i-th ``normalize`` of a recipe begins its i-th part.

    Args:
        recipe: holds the forms.
        certificates: of its parts.
        storage: type of the weights, "float" or "int8_t".
    """

    def __init__(
        self, recipe: Recipe, certificates: Sequence[Certificate | None], storage: str
    ) -> None:
        self.storage = storage
        self._writer = {name: op for op in recipe.operations for name in op.outputs}
        self._parts: list[list[Operation]] = []
        self._part_of: dict[str, int] = {}  # value → the part that computes it
        for operation in recipe.operations:
            if isinstance(operation, Normalize):
                self._parts.append([])
            if self._parts:
                self._parts[-1].append(operation)
                self._part_of |= dict.fromkeys(operation.outputs, len(self._parts) - 1)
        self._given = [*certificates, *[None] * len(self._parts)][: len(self._parts)]
        self._proven = self._given.copy()
        for index, part in enumerate(self._parts):
            if storage != "float" and any(isinstance(op, (SumSquares, Rescale)) for op in part):
                self._proven[index] = None  # energies of rounded weights are only measured

    def store(self, name: str, operation: QuadraticForm, exact: Array) -> Stored:
        """Store a form (n, n), given without its weight, as short as the certificate of its part allows."""
        index = self._part_of.get(operation.outputs[0])
        if index is None:
            return form(name, exact, self.storage)
        given, before = self._given[index], self._proven[index]
        found = None if given is None else self._shortened(name, operation, exact, index, given)
        if found is None:
            found = form(name, exact, self.storage), given if self.storage == "float" else None
        stored, proof = found
        known = [other for other in (before, proof) if other is not None]
        self._proven[index] = min(known, key=lambda p: p.margin) if len(known) == 2 else None
        return stored

    def _shortened(
        self, name: str, operation: QuadraticForm, exact: Array, index: int, given: Certificate
    ) -> tuple[Stored, Certificate | None] | None:
        """Return a shorter form and its certificate; None where the certificate has no room."""
        rules = self._rules(self._parts[index])
        room = room_each(room_left(given), len(rules)) if rules else 0.0
        if room == 0:
            return None
        # Rules on points do not depend on the scale of x: a bound for norm 1 holds for every norm.
        radius = 1.0 if rules[operation.outputs[0]] else given.max_norm
        # Rows of zeros, as padding leaves them, make the matrices of the proof singular.
        used = np.flatnonzero(exact.any(0))
        inner = np.ix_(used, used)
        form_used = torch.from_numpy(exact[inner]) * operation.weight
        for storage, share in _COMPACT.items():
            mask = np.zeros(exact.shape, bool)
            mask[inner] = needed(form_used, ErrorBudget(share * room, radius)).numpy()
            stored = form(name, exact, storage, mask)
            rounded = torch.from_numpy(stored.values[inner].astype(np.float64))
            if proven(form_used, rounded * operation.weight, ErrorBudget(room, radius)):
                return stored, replace(given, margin=0.0)
            if storage == self.storage == "int8_t":
                return stored, None
        return None

    def _rules(self, part: list[Operation]) -> dict[str, bool]:
        """Map the value of each form to whether its rule is one on points.

        The map is empty unless the proof applies: every energy of the part is a single form of x̂, every rule
        is provable, and one division ends the part.
        """
        if any(isinstance(operation, Rebase) for operation in part):
            return {}
        found = {}
        for operation in part:
            if not isinstance(operation, Advance):
                continue
            rule = RULES.get(operation.rule) if operation.module is None else None
            writer = self._writer[operation.inputs[2]]
            if isinstance(writer, Elementwise) and writer.function == "relu":
                # An energy is not negative: clamping at 0 brings it nearer to the exact one.
                writer = self._writer[writer.inputs[0]]
            alone = len(operation.inputs) == 3 and isinstance(writer, QuadraticForm)
            if not alone or rule is None or not rule.provable or not self._of_unit(writer):
                return {}
            found[writer.outputs[0]] = rule.on_points
        return found

    def _of_unit(self, operation: Operation) -> bool:
        """Tell whether an operation reads x̂, up to the order of its entries and added zeros."""
        while True:
            name = operation.inputs[0]
            if name not in self._writer:
                return False
            operation = self._writer[name]
            if isinstance(operation, Normalize):
                return name == operation.outputs[0]
            zeros = isinstance(operation, Pad) and operation.mode == "zeros" and not operation.value
            if not zeros and not isinstance(operation, (Reshape, Permute)):
                return False

    def weakest(self) -> Certificate | None:
        """Return the weakest certificate of the parts; None in int8 if one of them has none."""
        proofs = [proof for proof in self._proven if proof is not None]
        if self.storage != "float" and len(proofs) < len(self._proven):
            return None
        return weakest(proofs)
