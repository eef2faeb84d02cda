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

name, strategy, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
torch.set_num_threads(2)
model = networks.DkNetCL(1) if name == "DkNetCL" else getattr(networks, name)()
folded = cl.fold(model, (3, 32, 32), strategy=strategy)
with torch.inference_mode():
    x = torch.rand(batch, 3, 32, 32)
    folded(x[:64])
    before = settle()  # what folding took for a moment is not counted
    y = folded(x)
    print((peak() - before - y.numel() * 4) / 2**20)
    assert y.shape[0] == batch and bool(torch.isfinite(y).all())
"""


CASES = [
    ("LeNetCL", "conv", 8192),
    ("LeNetCL", "conv", 32768),
    ("LeNetCL", "layers", 16384),
    ("D3ModNetCL", "conv", 16384),
    ("DkNetCL", "banded", 8192),
    ("DkNetCL", "layers", 8192),
]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of the process from /proc")
@pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_memory_beyond_input_and_output(case: tuple[str, str, int]) -> None:
    command = [sys.executable, "-c", SCRIPT, *map(str, case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < LIMIT
