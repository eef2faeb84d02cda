"""Print a markdown table: a folded LeNetCL in ONNX Runtime and in torch, and the nodes of its graph.

Times are medians of calls in turns, on the same number of threads. Run it with ``python benchmarks/onnx_runtime.py`` on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import onnx
import torch

import conformallayers as cl
from conformallayers.testing import reference, relative_error
from conformallayers.utils.timing import interleave

SHAPE = (3, 32, 32)


def row(strategy: str, batch: int, executions: int, path: Path) -> str:
    """Export, compare and measure one strategy at one batch size."""
    torch.manual_seed(0)
    model = cl.networks.LeNetCL()
    folded = cl.fold(model, SHAPE, strategy=strategy)
    cl.export_onnx(folded, path)
    nodes, size = len(onnx.load(path).graph.node), path.stat().st_size / 2**20
    x = torch.rand(batch, *SHAPE)
    session = cl.Session(folded, engine="onnxruntime")
    runs = {"torch": torch.inference_mode()(lambda: folded(x)), "ort": lambda: session(x)}
    times = interleave(runs, executions)
    eager, ort = (1e3 * times[name].median for name in ("torch", "ort"))
    error = relative_error(session(x), reference(model, x))
    return (
        f"| {strategy} | {nodes} | {size:.2f} | {batch} | {eager:.3f} | {ort:.3f} "
        f"| {eager / ort:.2f} | {error:.1e} |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--strategies", nargs="+", default=["dense", "conv"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--executions", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| strategy | nodes | MiB | batch | torch ms | ONNX Runtime ms | ratio | error |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for strategy in arguments.strategies:
            for batch in arguments.batches:
                line = row(strategy, batch, arguments.executions, Path(folder) / "net.onnx")
                print(line, flush=True)


if __name__ == "__main__":
    main()
