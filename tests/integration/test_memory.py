"""Large batches run in pieces: memory beyond input and output stays below a limit, measured."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT = 64  # MiB

# A fresh process each: the peak of a process never falls.
SCRIPT = """
import sys, torch
import conformallayers as cl
from conformallayers import networks
from conformallayers.lab.measure import peak, settle

name, strategy, batch, side = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
torch.set_num_threads(2)
network = {"DkNetCL": lambda: networks.DkNetCL(1)}.get(name, getattr(networks, name))
model = network()
model.eval()
folded = cl.fold(model, (3, side, side), strategy=strategy)
with torch.inference_mode():
    x = torch.rand(batch, 3, side, side)
    folded(x[:64])
    before = settle()  # what folding took for a moment is not counted
    y = folded(x)
    print((peak() - before - y.numel() * 4) / 2**20)
    assert y.shape[0] == batch and bool(torch.isfinite(y).all())
"""


def beyond(name: str, strategy: str, batch: int, side: int = 32) -> float:
    """Return the MiB that a batch takes beside its input and output."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, strategy, str(batch), str(side)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of the process from /proc")
@pytest.mark.parametrize(
    ("name", "strategy", "batch", "side"),
    [
        ("LeNetCL", "conv", 8192, 32),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("LeNetCL", "conv", 32768, 32),
                ("LeNetCL", "layers", 16384, 32),
                ("D3ModNetCL", "conv", 16384, 32),
                ("DkNetCL", "banded", 8192, 32),
                ("DkNetCL", "layers", 8192, 32),
            )
        ),
    ],
)
def test_memory_beyond_input_and_output(name: str, strategy: str, batch: int, side: int) -> None:
    assert beyond(name, strategy, batch, side) < LIMIT
