"""Compare a result with the oracle, within what the dtype promises and mathematics allows."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from conformallayers.container import ConformalLayers
from conformallayers.folding.fold import TOLERANCES
from oracle import Run, run_conformal
from soak.case import Case

_SEEDS = 1, 2, 3  # of the runs with noise
_SLACK = 12.0  # how many times the loss of the layers themselves a path may lose


class Reference:
    """The exact output of a model for a batch, and the error that is allowed in a dtype.

    The tolerance is the promised one plus what rounding costs the layers themselves: three runs of
    the oracle multiply every value of every feature map by 1 ± eps, and torch runs the layers around a
    ConformalLayers, and plain models, in the dtype. Where layers cancel, no arithmetic in that dtype can do better. Not compared
    are samples of which rounding leaves no digit, and those whose output, or the output of a part, has values that the
    dtype cannot hold.
    """

    def __init__(self, model: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
        exact, x = copy.deepcopy(model).double().eval(), x.double()
        parts: list[Tensor] = []
        info = torch.finfo(dtype)
        # The oracle itself computes in float64: there the noise is made larger, and its effect smaller.
        larger = 64 if dtype == torch.float64 else 1
        shakes = [_shaking(seed, larger * info.eps) for seed in _SEEDS]
        with torch.no_grad():
            self.y = _run(exact, x, Run(), torch.float64, parts)
            runs = [_run(exact, shake(x), Run(shake=shake), dtype, []) for shake in shakes]
        self.dtype, self.size = dtype, _norms(self.y)
        noise = torch.stack([_norms(y - self.y) for y in runs]).amax(0) / larger
        # Values below `tiny` have fewer digits; `floor` is what they lose together. The cut of t at the end
        # of float64 leaves some 1e-300 of what the oracle sends to 0.
        self.floor = max(info.tiny * (1 + self.y[0].numel()) ** 0.5, 1e-300)
        self.allowed = TOLERANCES[dtype] * self.size + _SLACK * noise + self.floor
        self.held = (self.size == 0) | (_SLACK * noise < 0.1 * self.size)
        for norm in parts:
            self.held &= ((norm == 0) | (norm > self.floor / info.eps)) & (norm < info.max / 16)

    def check(self, case: Case, path: str, y: Tensor, extra: float = 0.0) -> None:
        """Note how far the result of a path is off."""
        case.counts["comparisons"] += 1
        fault = self.error(y, extra)
        if fault:
            case.find(f"{path}: {fault}")

    def error(self, y: Tensor, extra: float = 0.0) -> str | None:
        """Say how far a result is off, or None if it is right; ``extra`` adds to the relative tolerance."""
        if tuple(y.shape) != tuple(self.y.shape):
            return f"shape {tuple(y.shape)} instead of {tuple(self.y.shape)}"
        off = _norms(y.double() - self.y)
        limit = self.allowed + extra * self.size
        wrong = self.held & ~(off <= limit)
        if not bool(wrong.any()):
            return None
        worst = int(torch.where(wrong, off / limit, 0).nan_to_num(torch.inf).argmax())
        size = float(self.size[worst])
        relative = float(off[worst]) / size if size else torch.inf
        allowed = float(limit[worst]) / size if size else 0.0
        return f"sample {worst}: error {relative:.3g}, allowed {allowed:.3g} (‖y‖ = {size:.3g})"


def _run(module: nn.Module, x: Tensor, run: Run, dtype: torch.dtype, parts: list[Tensor]) -> Tensor:
    """Run a model by the oracle, and append the norms of the output of each part.

    ``dtype`` is that of the layers around a ConformalLayers, which torch itself runs.
    """
    if isinstance(module, ConformalLayers):
        x = run_conformal(module, x, run)
    elif isinstance(module, nn.Sequential):
        for child in module:
            x = _run(child, x, run, dtype, parts)
        return x
    else:
        twin = copy.deepcopy(module).to(dtype)
        for layer in twin.modules():
            if not any(layer.children()):
                layer.register_forward_hook(lambda _, inputs, y: run.shake(y))
        x = run.shake(twin(x.to(dtype)).double())
    parts.append(_norms(x))
    return x


def _shaking(seed: int, eps: float) -> Callable[[Tensor], Tensor]:
    """Return a function that multiplies every number by 1 + eps·u, u uniform in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)

    def shake(x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=generator, dtype=torch.float64)
        return (x * (1 + eps * (2 * noise - 1))).to(x.dtype)

    return shake


def _norms(y: Tensor) -> Tensor:
    """Return the norm of each sample, scaled against underflow of squares."""
    flat = y.flatten(1)
    if not flat.shape[1]:
        return torch.zeros(len(flat), dtype=torch.float64)
    peak = flat.abs().amax(1)
    safe = torch.where((peak == 0) | ~peak.isfinite(), 1.0, peak)
    return (flat / safe[:, None]).square().sum(1).sqrt() * safe
