"""Measure exported C programs: bytes, nanoseconds and cycles per image, beside torch at batch 1.

    python benchmarks/c99.py [--rounds 300] [--out results/benchmarks]

LeNetCL with random weights on 1×28×28 images, with its own head and with a linear one, folded with
tolerance 1e-2. Bytes are what ``size`` says of the object file. Times are the fastest of many
short rounds on one core; cycles are those of the time-stamp counter, where the processor has one.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import conformallayers as cl

SHAPE = (1, 28, 28)
FLAGS = {"-O2": ["-O2"], "-O3 native": ["-O3", "-march=native"]}
MAIN = """
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <time.h>
#include "cl_model.h"
#if defined(__x86_64__) || defined(__i386__)
#include <x86intrin.h>
#define TICKS() ((double)__rdtsc())
#else
#define TICKS() 0.0
#endif

static double now(void)
{{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}}

int main(void)
{{
    static float x[64 * CL_INPUT_SIZE], y[CL_OUTPUT_SIZE];
    double best = 1e300, ticks = 1e300;
    int round, i, sum = 0;
    if (fread(x, sizeof x, 1, stdin) != 1)
        return 1;
    for (round = 0; round < {rounds}; round++) {{
        const double t = now(), c = TICKS();
        for (i = 0; i < {images}; i++)
            sum += cl_predict(x + (i % 64) * CL_INPUT_SIZE, y);
        if (TICKS() - c < ticks)
            ticks = TICKS() - c;
        if (now() - t < best)
            best = now() - t;
    }}
    printf("%.17g %.17g %d\\n", best / {images}, ticks / {images}, sum);
    return 0;
}}
"""


def models() -> dict[str, nn.Module]:
    """Return the networks: as in the paper, and with a linear head."""
    torch.manual_seed(0)
    whole, other = cl.networks.LeNetCL(), cl.networks.LeNetCL()
    ends = {
        "LeNetCL": [whole],
        "LeNetCL, linear head": [other.features, nn.Flatten(), nn.Linear(400, 10)],
    }
    return {
        name: nn.Sequential(nn.ZeroPad2d(2), cl.RepeatChannels(3), *end).eval()
        for name, end in ends.items()
    }


def compiled(folder: Path, flags: list[str], data: bytes) -> tuple[dict[str, int], float, float]:
    """Compile and run; return the sizes of the object, and nanoseconds and cycles per image."""
    command = ["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", *flags]
    subprocess.run([*command, "-c", "cl_model.c"], cwd=folder, check=True)
    said = subprocess.run(["size", "cl_model.o"], cwd=folder, capture_output=True, text=True)
    sizes = dict(zip(("text", "data", "bss"), map(int, said.stdout.split()[6:9]), strict=True))
    main = ["cc", "-std=c99", "-O2", "main.c", "cl_model.o", "-lm", "-o", "program"]
    subprocess.run(main, cwd=folder, check=True)
    done = subprocess.run([str(folder / "program")], input=data, capture_output=True, check=True)
    nanoseconds, cycles, _ = done.stdout.split()
    return sizes, float(nanoseconds), float(cycles)


def eager(folded: cl.Folded, x: torch.Tensor, images: int, rounds: int) -> float:
    """Return nanoseconds of one image at batch 1 in torch."""
    best = float("inf")
    with torch.inference_mode():
        for _ in range(rounds):
            start = time.perf_counter_ns()
            for image in x[:images].split(1):
                folded(image)
            best = min(best, (time.perf_counter_ns() - start) / images)
    return best


def measure(name: str, model: nn.Module, strategy: str, images: int, rounds: int) -> list[Any]:
    """Return a row for each dtype and set of compiler flags."""
    folded = cl.fold(model, SHAPE, strategy=strategy, tolerance=1e-2, max_norm=28.0)
    x = torch.rand(64, *SHAPE)
    torch_ns, rows = eager(folded, x, images, rounds), []
    for dtype in ("float32", "int8"):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            export = cl.export_c(folded, folder, dtype=dtype, samples=x)
            (folder / "main.c").write_text(MAIN.format(rounds=rounds, images=images))
            for label, flags in FLAGS.items():
                sizes, ns, cycles = compiled(folder, flags, x.numpy().astype("<f4").tobytes())
                row: dict[str, Any] = {"network": name, "strategy": folded.strategy, "dtype": dtype}
                row |= {"flags": label, "constants": export.constant_bytes, **sizes}
                row |= {"work": export.work_bytes, "multiply_adds": export.multiply_adds}
                row |= {
                    "us": round(ns / 1e3, 2),
                    "cycles": round(cycles),
                    "torch_us": round(torch_ns / 1e3, 1),
                }
                row |= {"output_error": export.output_error, "agreement": export.agreement}
                rows.append(row)
                print(markdown([row]).splitlines()[-1], flush=True)
    return rows


def markdown(rows: list[Any]) -> str:
    """Return a table."""
    keys = ["network", "strategy", "dtype", "flags", "text", "bss", "multiply_adds", "us", "cycles"]
    keys += ["torch_us", "output_error"]
    names = ["network", "strategy", "weights", "compiler", "code and constants, bytes"]
    names += ["work memory, bytes", "multiply-adds", "µs per image", "cycles per image"]
    names += ["torch, batch 1, µs", "error against the fold"]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * 4 + "---:|" * 7]
    for row in rows:
        cells = [f"{row[k]:.1e}" if k == "output_error" else str(row[k]) for k in keys]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--strategies", nargs="+", default=["auto", "dense", "conv"])
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    options = parser.parse_args()
    if shutil.which("cc") is None or shutil.which("size") is None:
        raise SystemExit("a C compiler and the command size are needed")
    torch.set_num_threads(1)
    rows = []
    for name, model in models().items():
        for strategy in options.strategies:
            rows += measure(name, model, strategy, options.images, options.rounds)
    compiler = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True)
    machine = {
        "processor": platform.machine(),
        "compiler": compiler.stdout.splitlines()[0],
        "torch": torch.__version__,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine, "images": options.images, "rows": rows}
    (options.out / "c99.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "c99.md").write_text(markdown(rows))


if __name__ == "__main__":
    main()
