"""Attack plain networks: folds of random branches, chains and heads against the model itself."""

from __future__ import annotations

import torch

from conformallayers.errors import ConformalError
from conformallayers.folding.fold import fold
from plain import PlainDraw
from soak.case import Case

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


def attack(case: Case) -> None:
    """Fold one random plain network, and run it for its own shape and for a larger one."""
    draw = PlainDraw(case.rng.randrange(2**31))
    dtype = case.rng.choice(list(_TOLERANCES))
    model = draw.network().double()
    case.subject = f"{dtype} {draw.shape} {model}"
    folded = fold(model, draw.shape, dtype=dtype)
    for more in (0, case.rng.randint(1, 4)):
        shape = (draw.shape[0], *(n + more for n in draw.shape[1:]))
        x = torch.randn(3, *shape, dtype=torch.float64)
        try:
            with torch.no_grad():
                expected, found = model(x), folded(x.to(dtype)).double()
        except (ConformalError, RuntimeError):  # a size that the fold or the model does not take
            if not more:
                raise
            continue
        case.counts["plain comparisons"] += 1
        error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-3))
        if not error < _TOLERANCES[dtype]:
            case.find(f"{shape}: an error of {error:.1e}")
    for region in folded.explain().regions:
        if region.cost_after.work > region.cost_before.work:
            case.find(f"more multiply-adds than before: {region}")
