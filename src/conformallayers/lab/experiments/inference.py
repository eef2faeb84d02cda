"""Measure time and memory of one path of D3ModNet at one batch size, in a process of its own.

``python -m conformallayers.lab.experiments.inference`` reads options as JSON and prints a row.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch
from torch import nn

from ... import networks
from ...folding.fold import fold
from ...nn.container import layer_by_layer
from ...utils.memory import peak, settle
from ...utils.timing import Timing, call_seconds
from .records import Row

RELU, LAYERS = "D3ModNet", "D3ModNetCL, layer by layer"
FOLDED = "D3ModNetCL, folded: "  # followed by the strategy


def measure_alone(path: str, batch: int, **options: Any) -> Row:
    """Return the row of :func:`measure_here` from a new process; ``failed`` has the reason of a failure."""
    wanted = json.dumps({"path": path, "batch": batch, **options})
    command = [sys.executable, "-m", "conformallayers.lab.experiments.inference", wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        row: Row = json.loads(done.stdout.splitlines()[-1])
        return row
    lines = done.stderr.strip().splitlines()
    reason = lines[-1] if lines else f"the process ended with {done.returncode}"
    return {"path": path, "batch": batch, "failed": reason[:200]}


def measure_here(
    path: str,
    batch: int,
    *,
    executions: int,
    seconds: float,
    seed: int = 0,
    threads: int | None = None,
) -> Row:
    """Return time and memory of a path in this process.

    The memory is the peak growth of the process after imports, network, fold and one warm-up
    image: the batch, the activations between the layers, and the scores.

    Args:
        path: RELU, LAYERS, or FOLDED and a strategy.
        batch: number of images.
        executions: timed calls.
        seconds: time limit; slow paths are called less often, but at least once.
        seed: of weights and images.
        threads: of torch; None keeps the current number.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = _network(path)
    with torch.inference_mode(), layer_by_layer():
        model(torch.rand(1, *networks.IMAGE_SHAPE))
        before = settle()
        x = torch.rand(batch, *networks.IMAGE_SHAPE)
        model(x)
        times: list[float] = []
        while len(times) < executions and (not times or sum(times) < seconds):
            times.append(call_seconds(lambda: model(x)))
        grown = peak() - before
    return {
        "path": path,
        "batch": batch,
        "milliseconds": Timing.of(times).milliseconds,
        "executions": len(times),
        "peak_bytes": grown,
    }


def _network(path: str) -> nn.Module:
    if path == RELU:
        return networks.D3ModNet().eval()
    model = networks.D3ModNetCL().eval()
    if path == LAYERS:
        return model
    return fold(model, networks.IMAGE_SHAPE, strategy=path.removeprefix(FOLDED))


if __name__ == "__main__":
    print(json.dumps(measure_here(**json.loads(sys.argv[1]))))
