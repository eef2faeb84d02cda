"""Attack certificates: look for a sample on which a fold errs more than it has proven.

A certificate says |D̂ − D| ≤ ε·D for ‖x‖ ≤ R. The numerators agree, so outputs may differ relatively by
ε/(1 − ε), and by the rounding of the dtype. Samples are random, near the null space of the first layers,
and climb the error along its gradient.
"""

from __future__ import annotations

import copy
import math
from random import Random

import torch
from torch import Tensor, nn

from ...errors import ConformalError
from ...folding.certificate import Certificate
from ...folding.fold import fold
from ...folding.folded import Folded
from ...folding.strategies import STRATEGIES
from ...folding.verify import verify
from ...nn.activations import Gnomonic, ReSPro
from ...nn.container import ConformalLayers, layer_by_layer
from ...nn.layers import AvgPool2d, Conv2d, Linear
from ..oracle import matrix_of
from .case import Case
from .reference import Reference

STEPS = 15  # of gradient ascent


def attack(case: Case) -> None:
    """Fold a random chain with a tolerance and attack what is proven of it."""
    rng = case.rng
    torch.manual_seed(rng.getrandbits(60))
    model, shape = _chain(rng)
    dtype = rng.choice((torch.float32, torch.float64))
    model = model.to(dtype)
    tolerance = 10 ** rng.uniform(-5, -1)
    radius = rng.choice((None, 10 ** rng.uniform(-1, 3)))
    strategy = rng.choice(("auto", *STRATEGIES))
    case.subject = f"{strategy} {dtype} tolerance={tolerance} max_norm={radius} {shape} {model}"
    try:
        folded = fold(model, shape, strategy=strategy, tolerance=tolerance, max_norm=radius)
    except ConformalError:
        case.counts["folds refused with a tolerance"] += 1
        return
    certificate = folded.certificate
    if certificate is None:
        case.counts["folds without a certificate"] += 1
        return
    case.counts["certificates"] += 1
    if not verify(folded, model):
        case.find(f"verify does not prove {certificate}\n{verify(folded, model)}")
    # Without a radius any norm will do; ascent needs some.
    most = certificate.max_norm if math.isfinite(certificate.max_norm) else 10 ** rng.uniform(-2, 4)
    near = _near_null_space(model, shape, most)
    for x in (near, _climbed(model, folded, near, most), _climbed(model, folded, None, most)):
        _check(case, model, folded, certificate, x.to(dtype))


def _check(
    case: Case, model: nn.Module, folded: Folded, certificate: Certificate, x: Tensor
) -> None:
    case.counts["attacks on certificates"] += len(x)
    allowed = certificate.epsilon / (1 - certificate.epsilon)
    expected = Reference(model, x, x.dtype)
    with torch.no_grad():
        fault = expected.error(folded(x), allowed)
    if fault:
        case.find(f"{folded.strategy}, {certificate}: {fault}")


def _chain(rng: Random) -> tuple[ConformalLayers, tuple[int, ...]]:
    """Return layers and activations without biases; layers may have a null space."""
    parts: list[nn.Module] = []
    image = rng.random() < 0.6
    sizes = ((1, 3), (5, 12), (5, 12)) if image else ((2, 64),)
    shape = tuple(rng.randint(*ends) for ends in sizes)
    width, projective = shape[0], rng.random() < 0.3
    gnomonic = rng.random() < 0.2
    for _ in range(rng.randint(1, 4)):
        before, width = width, rng.randint(1, 6 if image else 32)
        kernel = rng.choice((1, 3)) if image else 1
        parts.append(Conv2d(before, width, kernel, padding=1) if image else Linear(before, width))
        alpha = rng.choice((None, 10 ** rng.uniform(-2, 0.5)))
        parts.append(Gnomonic(alpha) if gnomonic else ReSPro(alpha, projective=projective))
    if image and rng.random() < 0.5:
        parts.append(AvgPool2d(2))
    return ConformalLayers(*parts), shape


def _near_null_space(model: ConformalLayers, shape: tuple[int, ...], most: float) -> Tensor:
    """Return samples of norm ``most``: the first layer nearly sends them to 0; and random ones."""
    matrix = matrix_of(next(iter(model)), shape)
    _, basis = torch.linalg.eigh(matrix.T @ matrix)  # columns, the null space first
    rows = [basis.T[:2] + share * basis.T[-2:] for share in (0.0, 1e-6, 1e-4, 1e-3, 1e-2, 0.1)]
    x = torch.cat([*rows, torch.randn(6, math.prod(shape), dtype=torch.float64)])
    return _within(x, most).view(-1, *shape)


def _within(x: Tensor, most: float) -> Tensor:
    """Scale flat samples to a norm just below the largest."""
    scale = most * (1 - 1e-6) / x.norm(dim=1, keepdim=True).clamp_min(1e-300)
    scaled: Tensor = x * scale
    return scaled


def _climbed(model: nn.Module, folded: Folded, start: Tensor | None, most: float) -> Tensor:
    """Climb |log(‖ŷ‖/‖y‖)| along its gradient, within ‖x‖ ≤ most."""
    shape = folded.input_shape
    exact = copy.deepcopy(model).double().eval()
    x = torch.randn(8, *shape, dtype=torch.float64) if start is None else start
    x = _within(x.flatten(1), most)
    for step in range(STEPS):
        x = x.detach().requires_grad_()
        batch = x.view(-1, *shape)
        with layer_by_layer():
            y = exact(batch).flatten(1).norm(dim=1)
        found = folded(batch.to(folded.dtype)).double().flatten(1).norm(dim=1)
        error = (found.clamp_min(1e-300).log() - y.clamp_min(1e-300).log()).abs()
        (slope,) = torch.autograd.grad(error.sum(), x)
        slope = slope.nan_to_num(0.0)
        length = slope.norm(dim=1, keepdim=True).clamp_min(1e-300)
        rate = 0.3 * 0.8**step
        x = _within(x.detach() + rate * x.detach().norm(dim=1, keepdim=True) * slope / length, most)
    return x.view(-1, *shape)
