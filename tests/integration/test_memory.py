"""Memory, measured: large batches run in pieces, and folding keeps no feature maps."""

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


# A network whose feature maps take more memory than its weights, as those of phones do.
FOLDING = """
import torch
import conformallayers as cl
from conformallayers.lab.measure import peak, settle
from torch import nn

def block(inputs, outputs, stride):
    wide = 6 * inputs
    convs = nn.Conv2d(inputs, wide, 1), nn.Conv2d(wide, wide, 3, stride, 1, groups=wide), nn.Conv2d(wide, outputs, 1)
    for conv in convs:
        yield from (conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU6())

sizes = [16, 16, 24, 32, 64, 96, 160, 240]
blocks = [layer for a, b in zip(sizes, sizes[1:]) for layer in block(a, b, 1 + (a < b))]
model = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(240, 8000))
cl.fold(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (3, 8, 8))
before = settle()
cl.fold(model, (3, 224, 224))
print((peak() - before) / 2**20, sum(t.numel() for t in model.state_dict().values()) * 4 / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of the process from /proc")
def test_folding_takes_three_times_the_weights() -> None:
    command = [sys.executable, "-c", FOLDING]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, weights = map(float, done.stdout.split())
    assert grown <= 3 * weights
