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

import conformallayers as cl
import conformallayers.numpy as cln
from nets import SHAPE, net
from oracle import relative_error
from support import samples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.safetensors"


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
