"""Two processes train one network as one process does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conformallayers.lab.training.train import train
from training import QUIET, source_environment

WORKER = """
import os
from safetensors.torch import save_file
from conformallayers.lab.training.train import train
result = train("LeNetCL", "digits", out="both", epochs=2, batch_size=1346, alpha="spectral",
               learning_rate=3e-3, validation=0, threads=1, flips=True, shift=2, warn=True)
state = {name: tensor.clone() for name, tensor in result.model.state_dict().items()}
state |= {name: tensor.clone() for name, tensor in result.model.named_buffers()}
save_file(state, f"rank{os.environ['RANK']}.safetensors", {"accuracy": str(result.accuracy)})
"""


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Of 1347 images the last batch has one: the first process then has none."""
    (tmp_path / "worker.py").write_text(WORKER)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", "worker.py"],
        cwd=tmp_path, env=source_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no homogeneous map") == 1  # one of them prints the warnings
    ranks = [load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(2)]
    assert "features.1.vector" in ranks[0]
    for name, tensor in ranks[0].items():
        assert torch.equal(tensor, ranks[1][name]), name
    options = {"epochs": 2, "batch_size": 1346, "alpha": "spectral", "learning_rate": 3e-3}
    options |= {"flips": True, "shift": 2}
    alone = train("LeNetCL", "digits", out=tmp_path / "one", console=QUIET, threads=1, **options)
    for name, tensor in alone.model.state_dict().items():
        torch.testing.assert_close(tensor, ranks[0][name], rtol=1e-4, atol=1e-5)
    row = json.loads((tmp_path / "both" / "result.json").read_text())
    assert row["processes"] == 2
    assert row["loss"] == pytest.approx(alone.row["loss"], rel=1e-5)
    assert row["accuracy"] == pytest.approx(alone.accuracy, abs=0.01)
