"""conformallayers fold, evaluate and export: one MODEL, every runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import conformallayers as cl
import conformallayers.numpy as cln
from blocks import randomised
from conformallayers.lab.data.catalogue import LABELS
from conformallayers.lab.data.datasets import Dataset
from conformallayers.lab.training import evaluate
from nets import SHAPE, net
from oracle import relative_error
from support import run_command
from training import train_few_digits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_few_digits(tmp_path_factory.mktemp("runs") / "run")


def pictures(shape: tuple[int, ...], count: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8)


def test_fold_writes_a_file_that_evaluates_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.safetensors"
    assert run_command("fold", folder, "--out", path) == 0
    shown = capsys.readouterr().out
    assert "→" in shown
    assert f"Wrote {path}, " in shown
    folded = cl.load(path)
    assert (folded.input_shape, folded.labels) == ((1, 8, 8), LABELS["digits"])
    assert folded.about == {"network": "LeNetCL", "dataset": "digits", "epoch": 3, "white": 1.0}
    assert run_command("evaluate", path) == 0
    of_file = capsys.readouterr().out
    assert run_command("evaluate", folder) == 0
    of_run = capsys.readouterr().out
    assert of_file.splitlines()[0] == of_run.splitlines()[0] == "LeNetCL after epoch 3, digits"
    assert of_file.splitlines()[-1] == of_run.splitlines()[-1]
    assert "layer by layer" not in of_file


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_fold_takes_the_options_of_cl_fold(folder: Path, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    names = tmp_path / "names.txt"
    names.write_text("\n".join("abcdefghij") + "\n")
    options = ["--strategy", "layers", "--dtype", dtype, "--labels", names]
    command = ["fold", folder, "--out", path, "--shape", "3,32,32", *options]
    assert run_command(*command) == 0
    folded = cl.load(path)
    assert (folded.strategy, folded.input_shape) == ("layers", (3, 32, 32))
    assert (str(folded.dtype), folded.labels) == (f"torch.{dtype}", tuple("abcdefghij"))
    images = pictures((1, 8, 8), 3)
    data = Dataset("digits", images, torch.zeros(3), images, torch.tensor([0, 1, 2]))
    found = evaluate.evaluate(path, data)
    assert found["folded"] == evaluate.evaluate(folder, data)["layers"]


@pytest.mark.parametrize("kind", ["file.py", "package"])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_fold_takes_any_network_and_its_weights(
    kind: str,
    suffix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "own_package.py").write_text(
        "from torch import nn\ndef Net():\n    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()\n"
        "    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    model = randomised(nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 10)))
    weights, out = tmp_path / f"weights{suffix}", tmp_path / "net.safetensors"
    (torch.save if suffix == ".pt" else save_file)(model.state_dict(), weights)
    name = f"own_package{'.py' * (kind == 'file.py')}:Net"
    given = [name, "--weights", weights, "--shape", "1,8,8"]
    assert run_command("fold", *given, "--out", out) == 0
    assert run_command("export", *given, "--format", "onnx", "--out", tmp_path / "net.onnx") == 0
    x, folded = torch.randn(3, 1, 8, 8), cl.load(out)
    assert relative_error(folded(x), model(x)) < 1e-6
    assert run_command("fold", name, "--out", out) == 1
    capsys.readouterr()
    assert run_command("fold", name, "--weights", out, "--shape", "1,8,8", "--out", out) == 1
    keys = "missing keys, such as 0.weight, 0.bias, 1.weight. Save"
    assert keys in capsys.readouterr().err


def test_folds_of_ones_own_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.safetensors"
    stages = cl.Conv2d(1, 4, 3), cl.ReSPro(), cl.Flatten()
    model = nn.Sequential(cl.ConformalLayers(*stages), nn.Linear(144, 10))
    cl.save(cl.fold(model, (1, 8, 8)), path)
    assert run_command("evaluate", path) == 1
    assert "--dataset: expected the set of the test images, got none" in capsys.readouterr().err
    assert run_command("evaluate", path, "--dataset", "digits") == 0
    assert capsys.readouterr().out.startswith("Folded, digits\ntest accuracy folded ")


def test_wrong_options_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "net.safetensors", tmp_path / "out"
    cl.save(cl.fold(net("torus head"), SHAPE), path)
    for words, message in (
        (("fold", folder, "--dtype", "int8"), '"int8"'),
        (("fold", folder, "--strategy", "magic"), "got 'magic'"),
        (("fold", folder, "--shape", "1,64,64"), "with sides of at most 32"),
        (("fold", folder, "--shape", "1,x"), "expected sizes with commas, got '1,x'"),
        (("fold", path), "expected a network with layers, got the fold"),
        (("fold", path, "--strategy", "layers"), "It is folded already and takes --labels alone"),
        (("export", path, "--format", "tflite"), '"tflite"'),
        (
            ("export", path, "--format", "c", "--shape", "3,8,8"),
            "It is folded already and takes --labels alone",
        ),
    ):
        assert run_command(*words, "--out", out) == 1
        assert message in capsys.readouterr().err
        assert not out.exists()


def test_export_reports_a_program_in_c_without_writing_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.safetensors"
    cl.save(cl.fold(net("torus head"), SHAPE, strategy="dense"), path)
    monkeypatch.chdir(tmp_path)
    assert run_command("export", path, "--format", "c", "--report") == 0
    told = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]
    words = "--out", "c", "--example", "--name", "tiny"
    assert run_command("export", path, "--format", "c", *words) == 0
    assert capsys.readouterr().out.split("\n", 1)[1] == told
    assert run_command("export", path, "--format", "c", "--report", "--out", "both") == 0
    assert capsys.readouterr().out == f"both/cl_model.h, both/cl_model.c\n{told}"
    assert len(list((tmp_path / "both").iterdir())) == 2
    files = {"tiny.c", "tiny.h", "tiny.mk", "tiny_example.c"}
    assert {file.name for file in (tmp_path / "c").iterdir()} == files
    assert run_command("export", path, "--format", "c") == 1
    assert "export --out: expected a folder or file to write" in capsys.readouterr().err
    assert run_command("export", path, "--format", "onnx", "--report") == 1
    assert "export --format: expected c for --report, got onnx" in capsys.readouterr().err


def test_export_of_a_run_to_onnx(folder: Path, tmp_path: Path) -> None:
    import onnxruntime as runtime

    path, saved = tmp_path / "net.onnx", tmp_path / "net.safetensors"
    for words in (("export", "--format", "onnx", "--out", path), ("fold", "--out", saved)):
        assert run_command(words[0], folder, *words[1:], "--strategy", "dense") == 0
    assert (cln.load(saved).strategy, cln.load(saved).labels) == ("dense", LABELS["digits"])
    x = pictures((1, 8, 8)).float() / 255
    (y,) = runtime.InferenceSession(str(path)).run(None, {"x": x.numpy()})
    assert relative_error(torch.from_numpy(y), cl.load(saved)(x)) < 1e-5
