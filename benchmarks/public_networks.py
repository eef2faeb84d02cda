"""Count the convolutions that folding leaves in public networks, beside what their authors' own switch leaves.

    pip install --no-deps timm
    python benchmarks/public_networks.py [NAME ...] [--side 224]

Statistics of batch norms are random. The error is the largest relative difference of the outputs in float32.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from types import ModuleType
from unittest.mock import MagicMock

import torch
from torch import nn

import conformallayers as cl

NAMES = [
    *("repvgg_a0", "mobileone_s0", "fastvit_t8", "repvit_m0_9", "repghostnet_050", "resnet18"),
    *("mobilenetv2_050", "mobilenetv3_small_050", "efficientnet_b0", "convnext_atto"),
    *("densenet121", "inception_v3"),
]


def import_timm() -> ModuleType:
    """Import timm without torchvision: it reads one class of it, and the rest only to load pictures."""
    if importlib.util.find_spec("torchvision") is None:
        names = ("torchvision", "torchvision.ops", "torchvision.ops.misc", "torchvision.models")
        for name in (*names, "torchvision.models.feature_extraction", "timm.data"):
            sys.modules[name] = MagicMock()
        frozen = type("FrozenBatchNorm2d", (nn.Module,), {})
        sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = frozen  # type: ignore[attr-defined]
    import timm.utils

    return timm


def randomised(model: nn.Module) -> nn.Module:
    for norm in (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)):
        nn.init.normal_(norm.running_mean, std=0.1)  # type: ignore[arg-type]
        nn.init.uniform_(norm.running_var, 0.5, 2)  # type: ignore[arg-type]
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.1)
    return model.eval()


def convolutions(model: nn.Module) -> int:
    return sum(isinstance(module, nn.Conv2d) for module in model.modules())


def measure(timm: ModuleType, name: str, side: int) -> None:
    torch.manual_seed(0)
    model, x = randomised(timm.create_model(name)), torch.rand(2, 3, side, side)
    begin = time.perf_counter()
    folded = cl.fold(model, (3, side, side))
    seconds = time.perf_counter() - begin
    switched = convolutions(timm.utils.reparameterize_model(model))
    left = sum(op.kind == "conv" for op in folded.recipe.operations)
    with torch.no_grad():
        y, z = model(x), folded(x)
    error = float(((y - z).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)).max())
    cells = f"{convolutions(model)} | {switched} | {left} | {error:.0e} | {seconds:.1f} s"
    print(f"| {name} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--side", type=int, default=224)
    arguments = parser.parse_args()
    timm = import_timm()
    print("| network | convolutions | authors' switch | cl.fold | error | folded in |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in arguments.names:
        measure(timm, name, arguments.side)


if __name__ == "__main__":
    main()
