"""Trained networks are measured; files that hold none are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import conformallayers as cl
from conformallayers.lab.training import checkpoint, evaluate
from support import run_command


def test_evaluate_gives_the_accuracy_of_the_run(
    finished: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluate.evaluate(finished.folder)
    assert found["folded"] == found["layers"] == finished.accuracy
    assert (found["epoch"], found["images"]) == (8, 450)
    path = finished.folder / evaluate.CHECKPOINT
    assert run_command("evaluate", path, "--dataset", "digits") == 0
    assert f"folded         {100 * finished.accuracy:.2f} %" in capsys.readouterr().out


def test_files_that_are_no_checkpoints_are_refused(finished: Any, tmp_path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=r"got a folder without checkpoint\.safetensors"):
        evaluate.evaluate(tmp_path)
    path = tmp_path / evaluate.CHECKPOINT
    whole = (finished.folder / evaluate.CHECKPOINT).read_bytes()
    for content in (b"", b"nothing", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(
            cl.ConformalError,
            match=r"expected a whole file of cl\.save or conformallayers train, got",
        ):
            evaluate.evaluate(tmp_path)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(cl.ConformalError, match="got another safetensors file"):
        evaluate.evaluate(tmp_path)
    found = checkpoint.load(finished.folder / evaluate.CHECKPOINT)
    with pytest.raises(cl.ConformalError, match="expected weights of D3ModNetCL"):
        checkpoint.restore(found, cl.networks.D3ModNetCL(alpha="spectral"))
