"""Compare a training step of each conformal or expanded network with that of its plain counterpart.

    python benchmarks/train_step.py [--rounds 15] [--out results/benchmarks]

Time: forward, loss and backward, interleaved in one process. Memory: the peak of a process of its
own for each network, less that of the same process before its first step. For the times, glibc's
allocator is told to keep what it has: otherwise chance decides who pays for fresh pages.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import conformallayers as cl
from conformallayers import networks
from conformallayers.lab.measure import interleave

ALPHAS = ("young", "spectral")
BUDGET = 40.0  # seconds of one network and batch size; slow ones are called less often
Builders = dict[str, Callable[[], nn.Module]]


def pair(relu: Callable[[], nn.Module], conformal: Callable[..., nn.Module]) -> Builders:
    return {"relu": relu, **{alpha: partial(conformal, alpha=alpha) for alpha in ALPHAS}}


def stages(preset: str) -> Builders:
    """Return StageNet and its twin; both train on composed kernels, and alpha is 1."""
    relu = partial(networks.StageReLUNet, preset)
    return {"relu": relu, "one": partial(networks.StageNet, preset)}


def expansion(plain: Callable[[], nn.Module], norm: bool = False) -> Builders:
    return {"relu": plain, "expanded": lambda: cl.expand(plain(), norm=norm)}


PAIRS: dict[str, Builders] = {
    "Base": pair(networks.BaseReLUNet, networks.BaseReSProNet),
    "LeNet": pair(networks.LeNet, networks.LeNetCL),
    "D3ModNet": pair(networks.D3ModNet, networks.D3ModNetCL),
    "DkNet, k = 1": pair(partial(networks.DkNet, 1), partial(networks.DkNetCL, 1)),
    "DkNet, k = 3": pair(partial(networks.DkNet, 3), partial(networks.DkNetCL, 3)),
    "DkNet, k = 9": pair(partial(networks.DkNet, 9), partial(networks.DkNetCL, 9)),
    **{f"StageNet {preset}": stages(preset) for preset in ("micro", "small", "base", "large")},
    "LeNet, expanded": expansion(networks.LeNet),
    "LeNet, expanded, norm": expansion(networks.LeNet, norm=True),
    "StageReLUNet micro, expanded": expansion(networks.StageReLUNet),
    "ResNet8, expanded": expansion(networks.ResNet8),
}


def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    nn.functional.cross_entropy(model(images), labels).backward()


def batch_of(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(size, *networks.IMAGE_SHAPE, generator=generator)
    return images, torch.randint(0, 10, (size,), generator=generator)


def build(name: str, kind: str) -> nn.Module:
    torch.manual_seed(0)
    return PAIRS[name][kind]()


def peak_memory(name: str, kind: str, size: int) -> int:
    """Return the bytes by which a few steps raise the peak of a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure_peak, (name, kind, size))


def _measure_peak(name: str, kind: str, size: int) -> int:
    torch.set_num_threads(1)
    model = build(name, kind)
    images, labels = batch_of(size)
    step(model, images[:2], labels[:2])
    before = _high_water()
    for _ in range(3):
        step(model, images, labels)
    return _high_water() - before


def _high_water() -> int:
    """Return the peak resident memory of this process; getrusage would show the parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])
    raise SystemExit("peak memory is read from /proc/self/status, which this system does not have")


def measure(name: str, size: int, rounds: int) -> dict[str, object]:
    images, labels = batch_of(size)
    models = {kind: build(name, kind) for kind in PAIRS[name]}
    engines = {kind: partial(step, model, images, labels) for kind, model in models.items()}
    times = interleave(engines, 3 * rounds, pause=0.0, budget=BUDGET)  # all in torch: no pause
    memory = {kind: peak_memory(name, kind, size) for kind in engines}
    row: dict[str, object] = {"network": name, "batch": size}
    for kind, timing in times.items():
        row[f"{kind}_ms"] = round(timing["median"], 3)
        row[f"{kind}_spread_ms"] = [timing["low"], timing["high"]]
        row[f"{kind}_mib"] = round(memory[kind] / 2**20, 1)
    for kind in list(engines)[1:]:
        row[f"{kind}_time_ratio"] = round(times[kind]["median"] / times["relu"]["median"], 3)
        row[f"{kind}_memory_ratio"] = round(memory[kind] / max(memory["relu"], 1), 3)
    return row


def markdown(rows: list[dict[str, object]]) -> str:
    columns = {"network": "network", "batch": "batch", "relu_ms": "ReLU, ms"}
    names = {"young": "Young", "spectral": "spectral", "one": "α = 1", "expanded": "expanded"}
    for kind, name in names.items():
        columns |= {f"{kind}_ms": f"{name}, ms", f"{kind}_time_ratio": "ratio"}
    columns |= {f"{kind}_mib": f"{name}, MiB" for kind, name in {"relu": "ReLU", **names}.items()}
    lines = [list(columns.values()), ["---"] * len(columns)]
    lines += [[str(row.get(key, "–")) for key in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def keep_memory() -> None:
    """Start again with an allocator that returns nothing to the system."""
    settings = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **settings})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--only", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    options = parser.parse_args()
    keep_memory()
    options.out.mkdir(parents=True, exist_ok=True)
    machine = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    rows: list[dict[str, object]] = []
    for name in options.only:
        for size in options.batch:
            rows.append(measure(name, size, options.rounds))
            print(markdown(rows[-1:]).splitlines()[-1], flush=True)
            result = {"machine": machine, "rounds": options.rounds, "rows": rows}
            (options.out / "train_step.json").write_text(json.dumps(result, indent=1) + "\n")
            (options.out / "train_step.md").write_text(markdown(rows))


if __name__ == "__main__":
    main()
