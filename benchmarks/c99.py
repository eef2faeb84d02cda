"""Compare exported C with emx-onnx-cgen, which writes C from ONNX files, and with ONNX Runtime on one thread.

    pip install emx-onnx-cgen
    python benchmarks/c99.py [--networks LeNetCL "StageNet micro"] [--rounds 20] [--cc gcc]

All take the same image and the same ONNX file, and compilers the same flags. They take turns; what counts is the
shortest time of each, since a busy moment of the machine makes times longer only. Without emx-onnx-cgen its
columns stay empty. Untrained networks take as long as trained ones.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

import conformallayers as cl
from conformallayers.networks import LeNetCL, ResNet8, StageNet

SHAPE = (3, 32, 32)
FLAGS = {"-O2": ["-O2"], "-O3 -march=native": ["-O3", "-march=native"]}
SECONDS = 0.02  # of one turn
# Repeat a function of (image, out), and return the shortest time in microseconds.
TIMER = """
#include <time.h>
double shortest(int (*run)(const float *, float *), const float *image, float *out, double most)
{
    double best = 1e30, all = 0;
    while (all < most) {
        struct timespec a, b;
        double took;
        clock_gettime(CLOCK_MONOTONIC, &a);
        run(image, out);
        clock_gettime(CLOCK_MONOTONIC, &b);
        took = 1e6 * (double)(b.tv_sec - a.tv_sec) + 1e-3 * (double)(b.tv_nsec - a.tv_nsec);
        best = took < best ? took : best;
        all += took;
    }
    return best;
}
"""


def depthwise() -> nn.Module:
    """Return a small network of depthwise and pointwise convolutions."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU()]
    for before, after, stride in ((16, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2)):
        layers += [nn.Conv2d(before, before, 3, stride, 1, groups=before), nn.ReLU()]
        layers += [nn.Conv2d(before, after, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "LeNetCL": LeNetCL,
    "StageNet micro": lambda: StageNet("micro"),
    "StageNet small": lambda: StageNet("small"),
    "StageNet large": lambda: StageNet("large"),
    "ResNet-8": ResNet8,
    "depthwise": depthwise,
}


def library(compiler: str, source: Path, flags: list[str]) -> ctypes.CDLL:
    """Compile a source in strict ISO mode and load it."""
    target = source.with_name(f"{source.stem}-{''.join(flags)}.so")
    command = [compiler, "-std=c99", *flags, "-shared", "-fPIC", str(source), "-lm", "-o"]
    subprocess.run([*command, str(target)], check=True)
    return ctypes.CDLL(str(target))


def generated(model: Path) -> Path | None:
    """Return C of emx-onnx-cgen for an ONNX file, or None if it is not installed or refuses the file."""
    tool = shutil.which("emx-onnx-cgen")
    if tool is None:
        return None
    source = model.with_name("emx.c")
    options = ["--large-weight-threshold", "0", "--input-dim", "batch=1", "--model-name", "emx"]
    command = [tool, "compile", *options, str(model), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return source if done.returncode == 0 and source.exists() else None


def measure(network: nn.Module, folder: Path, compiler: str, rounds: int) -> dict[str, float]:
    """Return the shortest times of one image in microseconds."""
    folded = cl.fold(network.eval(), SHAPE)
    model = folder / "model.onnx"
    cl.export_onnx(folded, model)
    (folder / "timer.c").write_text(TIMER)
    timer = library(compiler, folder / "timer.c", ["-O2", "-D_POSIX_C_SOURCE=199309L"])
    timer.shortest.restype = ctypes.c_double
    functions: dict[str, Any] = {}
    emx = generated(model)
    made = cl.export_c(folded, folder)
    for name, flags in FLAGS.items():
        functions[f"ours {name}"] = library(compiler, made.source, flags).cl_predict
        if emx is not None:
            functions[f"emx {name}"] = library(compiler, emx, flags).emx
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options)
    image = np.random.default_rng(0).random((1, *SHAPE), dtype=np.float32)
    feed, out = {session.get_inputs()[0].name: image}, np.zeros(10, np.float32)
    expected = session.run(None, feed)[0].ravel()
    ends = [ctypes.c_void_p(array.ctypes.data) for array in (image, out)]
    best = dict.fromkeys([*functions, "ONNX Runtime"], float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            took = timer.shortest(function, *ends, ctypes.c_double(1e6 * SECONDS))
            best[name] = min(best[name], took)
            error = np.abs(out - expected).max() / np.abs(expected).max()
            assert error < 1e-5, f"{name} differs by {error:.2g}"
        stop = time.perf_counter() + SECONDS
        while (start := time.perf_counter()) < stop:
            session.run(None, feed)
            took = 1e6 * (time.perf_counter() - start)
            best["ONNX Runtime"] = min(best["ONNX Runtime"], took)
    return best


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cc", default="gcc")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    columns = [f"{who} {flags}" for flags in FLAGS for who in ("ours", "emx")] + ["ONNX Runtime"]
    print(f"| µs for one image | {' | '.join(columns)} | native / ONNX Runtime |")
    print("| --- |" + " --- |" * (len(columns) + 1))
    for name in chosen.networks:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(NETWORKS[name](), Path(folder), chosen.cc, chosen.rounds)
        cells = [f"{found[column]:.1f}" if column in found else "" for column in columns]
        share = found["ours -O3 -march=native"] / found["ONNX Runtime"]
        print(f"| {name} | {' | '.join(cells)} | {share:.2f} |", flush=True)


if __name__ == "__main__":
    main()
