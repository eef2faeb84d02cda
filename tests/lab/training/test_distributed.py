"""Two processes train one network as one process does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conformallayers.lab.training import run_folder
from conformallayers.lab.training.train import train
from training import QUIET, assert_same_weights, source_environment

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
    row = json.loads((tmp_path / "both" / run_folder.RESULT).read_text())
    assert row["processes"] == 2
    assert row["loss"] == pytest.approx(alone.row["loss"], rel=1e-5)
    assert row["accuracy"] == pytest.approx(alone.accuracy, abs=0.01)


# The second process is killed in the middle of the third epoch, on its first start.
KILLED = """
import os, signal
from pathlib import Path
import torch
from conformallayers.cli.app import main
step, steps = torch.optim.Adam.step, 0
def killed(*arguments, **options):
    global steps
    steps += 1
    if steps == 8 and os.environ["RANK"] == "1" and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*arguments, **options)
torch.optim.Adam.step = killed
main()
"""


@pytest.mark.slow
def test_a_killed_process_ends_all_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(KILLED)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "killed").touch()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "2", str(tmp_path / "worker.py")]
    words = ["train", "LeNetCL", "digits", "--epochs", "4", "--batch-size", "500", "--threads", "1"]
    words += ["--out", "run"]

    def started(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*launcher, *words, *more], cwd=folder, env=source_environment(),
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    assert started(tmp_path / "whole").returncode == 0
    broken = started(tmp_path)
    assert broken.returncode != 0
    assert run_folder.load_checkpoint(tmp_path / "run" / "checkpoint.safetensors").state.epoch == 2
    again = started(tmp_path, "--resume")
    assert again.returncode == 0, again.stderr
    assert_same_weights(tmp_path / "run", tmp_path / "whole" / "run")
