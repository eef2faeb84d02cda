"""Time folds of re-parameterized networks against the same networks as torch exports them, in ONNX Runtime.

    python benchmarks/any_network.py [--runs 30] [--side 224]

One thread, batch 1. Both engines run in turns in one process, with a pause between them; the ratio is that of the
medians. The networks have the widths and depths of RepVGG-A0, MobileOne-S0 and ResNet-18, with random statistics.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

import conformallayers as cl

PAUSE = 0.03  # seconds between two engines


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Branches(nn.Module):
    """A sum of convolutions and, where shapes allow it, a batch norm, before a ReLU."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(sum(branch(x) for branch in self.branches))  # type: ignore[arg-type]


def repvgg_block(inputs: int, outputs: int, stride: int) -> nn.Module:
    skip = [nn.BatchNorm2d(inputs)] if inputs == outputs and stride == 1 else []
    return Branches(conv_bn(inputs, outputs, 3, stride), conv_bn(inputs, outputs, 1, stride), *skip)


def repvgg_a0() -> nn.Module:
    layers, channels = [repvgg_block(3, 48, 2)], 48
    for width, depth in ((48, 2), (96, 4), (192, 14), (1280, 1)):
        for index in range(depth):
            layers.append(repvgg_block(channels, width, 2 if index == 0 else 1))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def mobileone_block(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Module:
    branches = [conv_bn(inputs, outputs, kernel, stride, groups) for _ in range(4)]
    if kernel > 1:
        branches.append(conv_bn(inputs, outputs, 1, stride, groups))
    if inputs == outputs and stride == 1:
        branches.append(nn.BatchNorm2d(inputs))
    return Branches(*branches)


def mobileone_s0() -> nn.Module:
    layers, channels = [mobileone_block(3, 48, 3, 2)], 48
    for width, depth in ((48, 2), (128, 8), (256, 10), (1024, 1)):
        for index in range(depth):
            stride = 2 if index == 0 else 1
            layers.append(mobileone_block(channels, channels, 3, stride, groups=channels))
            layers.append(mobileone_block(channels, width, 1))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first, second = conv_bn(inputs, outputs, 3, stride), conv_bn(outputs, outputs, 3)
        self.body = nn.Sequential(first, nn.ReLU(), second)
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else conv_bn(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet18() -> nn.Module:
    layers: list[nn.Module] = [conv_bn(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width in (64, 128, 256, 512):
        for index in range(2):
            layers.append(Residual(channels, width, 2 if index == 0 and width > 64 else 1))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "RepVGG-A0": repvgg_a0,
    "MobileOne-S0": mobileone_s0,
    "ResNet-18": resnet18,
}


def randomised(model: nn.Module) -> nn.Module:
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.uniform_(norm.running_mean, -0.5, 0.5)  # type: ignore[arg-type]
        nn.init.uniform_(norm.running_var, 0.5, 2)  # type: ignore[arg-type]
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    return model.eval()


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def convolutions(model: nn.Module) -> int:
    return sum(isinstance(module, nn.Conv2d) for module in model.modules())


def measure(name: str, side: int, runs: int) -> None:
    torch.manual_seed(0)
    model, x = randomised(NETWORKS[name]()), torch.rand(1, 3, side, side)
    begin = time.perf_counter()
    folded = cl.fold(model, (3, side, side))
    seconds = time.perf_counter() - begin
    left = sum(op.kind == "conv" for op in folded.recipe.operations)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        plain, short = Path(folder) / "plain.onnx", Path(folder) / "folded.onnx"
        torch.onnx.export(model, (x,), str(plain), dynamo=False)
        cl.export_onnx(folded, short)
        engines = [session(plain), session(short)]
    times: list[list[float]] = [[], []]
    outputs: list[Any] = [None, None]
    for _ in range(runs):
        for index, engine in enumerate(engines):
            time.sleep(PAUSE)
            begin = time.perf_counter()
            (outputs[index],) = engine.run(None, {engine.get_inputs()[0].name: x.numpy()})
            times[index].append(time.perf_counter() - begin)
    before, after = (1e3 * statistics.median(part) for part in times)
    error = abs(outputs[0] - outputs[1]).max() / abs(outputs[0]).max()
    print(
        f"| {name} | {convolutions(model)} → {left} | {before:.1f} → {after:.1f} ms"
        f" | {before / after:.2f} | {seconds:.1f} s | {error:.0e} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--side", type=int, default=224)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | convolutions | ONNX Runtime, batch 1 | times as fast | folded in | error |")
    print("|---|---|---|---|---|---|")
    for name in NETWORKS:
        measure(name, arguments.side, arguments.runs)


if __name__ == "__main__":
    main()
