"""The numpy runtime: every strategy and layer against torch, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import conformallayers as cl
import conformallayers.numpy as cln
from cases import LINEAR_CASES, Case
from nets import DTYPES, NETS, SHAPE, folds, net
from oracle import randomise, relative_error
from support import samples

LIMITS = {torch.float64: 1e-13, torch.float32: 1e-6}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.safetensors"


def error(folded: nn.Module, net: cln.Network, x: torch.Tensor) -> float:
    y = net(x.numpy())
    assert y.dtype == net.dtype
    return relative_error(torch.from_numpy(y), folded(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(NETS))
@pytest.mark.sampled(5)
def test_numbers_are_those_of_torch(name: str, dtype: torch.dtype, path: Path) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    x = samples(SHAPE, wide, batch=6)
    x[1], x[2, 0, 0, 0], x[3, 1, 2, 3] = 0, float("nan"), float("inf")
    x[4] *= 1e6
    for folded in folds(name, dtype):
        cl.save(folded, path)
        net, reference = cln.load(path), cl.load(path).to(wide)  # the same constants
        assert error(reference, net, x) < LIMITS[wide], folded.strategy
        assert np.isnan(net(x.numpy())[2:4]).all()


# The classes of this package are torch's own: one row of both is enough.
OURS = "cl.Conv", "cl.Avg", "cl.Adaptive"
ROWS = [c for c in LINEAR_CASES if not c.name.startswith(OURS) and "linear" not in c.name]


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.sampled(5)
def test_every_layer_is_there(case: Case, path: Path) -> None:
    model = cl.ConformalLayers(randomise(case.build()), cl.ReSPro(3.0))
    # In float32 a mean of numbers of both signs has few digits in common with another order.
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        folded = cl.fold(model, case.input_shape, strategy="layers", dtype=dtype)
        cl.save(folded, path)
        x = samples(case.input_shape, dtype)
        assert torch.equal(cl.load(path)(x), folded(x))
        assert error(folded, cln.load(path), x) < limit


def test_what_the_network_says_of_itself(path: Path) -> None:
    folded = cl.fold(net("chain"), SHAPE, strategy="banded")
    cl.save(folded, path)
    runtime = cln.load(path)
    assert (runtime.input_shape, runtime.output_shape) == (SHAPE, folded.output_shape)
    assert (runtime.strategy, runtime.origin) == ("banded", folded.origin)
    assert runtime.dtype == np.float32
    assert repr(runtime) == "Network((2, 6, 6) → (4, 3, 3), dtype=float32, strategy='banded')"
    whole = np.arange(72, dtype=np.int32).reshape(1, *SHAPE)
    assert np.array_equal(runtime(whole), runtime(whole.astype(np.float64)))
    cl.save(folded, path, about={"white": 1.0})
    with pytest.raises(cl.ConformalError, match=r"Network: .*from 0 to 1, got bytes\. Divide"):
        cln.load(path)(whole.astype(np.uint8))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(SHAPE), r"an unbatched array.*x\[None\]"),
        (np.zeros((1, 3)), "Fold for this shape"),
        (np.float32(1), "an array of shape"),
        (np.zeros((1, *SHAPE), complex), "expected an array of real numbers, got complex128"),
    ],
)
def test_wrong_inputs_are_refused(x: Any, message: str, path: Path) -> None:
    cl.save(cl.fold(net("chain"), SHAPE), path)
    with pytest.raises(cl.ConformalError, match=message):
        cln.load(path)(x)


PROGRAM = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "scipy"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Forbidden())
import numpy as np
import conformallayers.numpy as cln

net = cln.load(sys.argv[1])
np.save(sys.argv[2], net(np.load(sys.argv[3])))
"""


@pytest.mark.parametrize("name", ["several", "circular"])
def test_it_runs_where_torch_is_not(name: str, path: Path, tmp_path: Path) -> None:
    folded = cl.fold(net(name), SHAPE)
    cl.save(folded, path)
    x = samples(SHAPE, torch.float32)
    np.save(tmp_path / "x.npy", x.numpy())
    source = str(Path(cl.__file__).parents[1])
    command = [sys.executable, "-c", PROGRAM, str(path), "y.npy", "x.npy"]
    environment = {**os.environ, "PYTHONPATH": source}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    y = torch.from_numpy(np.load(tmp_path / "y.npy"))
    assert relative_error(y, folded(x)) < 1e-6
