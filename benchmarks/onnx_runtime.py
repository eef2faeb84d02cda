"""Print a markdown table: a folded LeNetCL in ONNX Runtime and in torch, and the nodes of its graph.

Both engines take turns with a pause between them, on the same number of threads; times are medians. Run it with
``python benchmarks/onnx_runtime.py`` on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import torch

import conformallayers as cl

SHAPE = (3, 32, 32)
PAUSE = 0.03  # seconds: the threads of one engine must not spin while the other one runs


def medians(runs: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median time of each function in milliseconds, measured in turns."""
    times: list[list[float]] = [[] for _ in runs]
    for index in range(rounds + 3):
        for run, found in zip(runs, times, strict=True):
            time.sleep(PAUSE)
            start = time.perf_counter()
            run()
            if index >= 3:
                found.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(found) for found in times]


def row(strategy: str, batch: int, rounds: int, path: Path) -> str:
    """Export, compare and measure one strategy at one batch size."""
    torch.manual_seed(0)
    folded = cl.fold(cl.networks.LeNetCL(), SHAPE, strategy=strategy)
    cl.export_onnx(folded, path)
    nodes = len(onnx.load(path).graph.node)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    x = torch.rand(batch, *SHAPE)
    feed = {"x": x.numpy()}

    def in_torch() -> object:
        with torch.inference_mode():
            return folded(x)

    actual = torch.from_numpy(session.run(["y"], feed)[0])
    error = cl.testing.relative_error(actual, folded(x))
    ort, eager = medians([lambda: session.run(["y"], feed), in_torch], rounds)
    size = path.stat().st_size / 2**20
    return (
        f"| {strategy} | {nodes} | {size:.2f} | {batch} | {eager:.3f} | {ort:.3f} "
        f"| {eager / ort:.2f} | {error:.1e} |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--strategies", nargs="+", default=["dense", "conv"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| strategy | nodes | MiB | batch | torch ms | ONNX Runtime ms | ratio | error |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for strategy in arguments.strategies:
            for batch in arguments.batches:
                line = row(strategy, batch, arguments.rounds, Path(folder) / "net.onnx")
                print(line, flush=True)


if __name__ == "__main__":
    main()
