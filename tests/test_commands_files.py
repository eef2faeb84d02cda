"""MODEL on the command line: what it may be, folds for images as they are stored, and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.cli import app as cli
from conformallayers.lab.data.batches import Centre, as_input, mean_image
from conformallayers.lab.data.catalogue import LABELS, NAMES, SHAPES
from conformallayers.lab.data.datasets import Dataset, load
from conformallayers.lab.data.inputs import from_images, native_shape
from conformallayers.lab.training import evaluate
from conformallayers.lab.training.saved_models import fold_model, load_model, locate
from conformallayers.lab.training.train import train
from nets import SHAPE, net
from oracle import randomise, relative_error

RECIPE = {"centre": True, "projective": True, "gain": 20.0, "alpha": "spectral"}


@pytest.fixture(scope="module")
def small() -> Dataset:
    full = load("digits")
    rows = slice(200), slice(50)
    return Dataset(
        "digits",
        *(tensor[rows[0]] for tensor in (full.train_images, full.train_labels)),
        *(tensor[rows[1]] for tensor in (full.test_images, full.test_labels)),
    )


@pytest.fixture(scope="module")
def folder(small: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    options: dict[str, Any] = {**RECIPE, "epochs": 3, "batch_size": 20, "learning_rate": 0.01}
    return train("LeNetCL", small, out=out, console=Console(quiet=True), **options).folder


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as leaving:
        cli.main([str(argument) for argument in arguments])
    return int(leaving.value.code or 0)


def pictures(shape: tuple[int, ...], count: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8)


def centred(images: Tensor) -> nn.Sequential:
    """Return a network of the paper behind the mean of some images."""
    torch.manual_seed(0)
    centre = cl.Centre((3, 32, 32))
    centre.fit(mean_image(images))
    network = randomise(cl.networks.LeNetCL(projective=True, gain=3.0))
    return nn.Sequential(centre, network).eval()


# -- images as they are stored ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [*sorted(set(SHAPES.values())), (1, 32, 32), (3, 28, 28), (1, 9, 20), (3, 5, 7)],
    ids=str,
)
@pytest.mark.parametrize("with_centre", [True, False])
def test_folds_of_stored_images_equal_the_evaluation(
    shape: tuple[int, ...], with_centre: bool
) -> None:
    images = pictures(shape)
    model = centred(images).double()
    model = model if with_centre else model[1]
    adapted = from_images(model, shape)
    folded = cl.fold(adapted, shape, dtype=torch.float64)
    with torch.no_grad(), cl.layer_by_layer():
        expected = model(as_input(images, torch.float64))
        x = images.double() / 255
        assert torch.equal(adapted(x), expected)
    assert relative_error(folded(x), expected) < 1e-12


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 8, 8)], ids=str)
def test_margins_grey_and_enlarging_fold_away_behind_the_mean(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    model = from_images(centred(pictures(shape)), shape)
    folded = cl.fold(model, shape, strategy="dense")
    assert isinstance(folded.body, nn.Sequential)
    centre, part = folded.body[0], folded.body[1]
    assert isinstance(centre, cl.Centre)
    assert centre.shape == shape
    assert part.core.matrix.shape[1] == shape[1] * shape[2]
    assert shape[1] > 8 or bool(cl.verify(folded, model))
    cl.save(folded, tmp_path / "net.safetensors")
    x = pictures(shape).float() / 255
    y = cln.load(tmp_path / "net.safetensors")(x.numpy())
    assert relative_error(torch.from_numpy(y), folded(x)) < 1e-6


def test_a_mean_of_coloured_images_stays_behind_the_channels() -> None:
    model = centred(pictures((3, 32, 32)))
    grey = from_images(model, (1, 32, 32))
    images = pictures((1, 32, 32))
    with torch.no_grad(), cl.layer_by_layer():
        assert torch.equal(grey(images / 255), model(as_input(images)))
    assert [type(module).__name__ for module in grey] == ["RepeatChannels", "Sequential"]
    folded = cl.fold(grey, (1, 32, 32), strategy="layers")
    assert cl.fold_error(grey, folded, images / 255) < 1e-5


@pytest.mark.parametrize(
    ("upsample", "folds"),
    [
        (nn.Upsample(scale_factor=(2, 3), mode="nearest"), True),
        (nn.Upsample(scale_factor=(2.0, 2.0), mode="nearest-exact"), True),
        (nn.Upsample(scale_factor=2, mode="nearest"), False),
        (nn.Upsample(scale_factor=(1.5, 2), mode="nearest"), False),
        (nn.Upsample(size=(8, 8), mode="nearest"), False),
        (nn.Upsample(scale_factor=(2, 2), mode="bilinear"), False),
    ],
    ids=str,
)
def test_repeated_pixels_fold_away(upsample: nn.Module, folds: bool) -> None:
    stages = cl.Conv2d(1, 3, 3), cl.ReSPro(), cl.Conv2d(3, 2, 3), cl.ReSPro()
    model = randomise(nn.Sequential(upsample, cl.ConformalLayers(*stages)))
    folded = cl.fold(model.double(), (1, 4, 4), strategy="dense")
    x = torch.rand(5, 1, 4, 4, dtype=torch.float64)
    assert cl.fold_error(model, folded, x) < 1e-12
    assert isinstance(folded.body, nn.Sequential) == (not folds)


def test_centre_is_refused_inside_and_where_shapes_differ() -> None:
    with pytest.raises(cl.ConformalError, match=r"got Centre\. Put it before the ConformalLayers"):
        cl.ConformalLayers(cl.Centre((2,)), cl.ReSPro())
    with pytest.raises(cl.ConformalError, match=r"samples \(N, 2,\), N > 0, got \(3, 4\)"):
        cl.Centre((2,)).fit(torch.zeros(3, 4))
    with pytest.raises(cl.ConformalError, match=r"N > 0, got \(0, 2\)"):
        cl.Centre((2,)).fit(torch.zeros(0, 2))
    assert repr(cl.Centre((1, 28, 28))) == "Centre((1, 28, 28))"
    assert Centre is cl.Centre


def test_shapes_that_no_image_has_are_refused() -> None:
    model = cl.networks.LeNetCL()
    for shape in ((1, 33, 32), (2, 28, 28), (1, 28), (1, 0, 4)):
        with pytest.raises(cl.ConformalError, match=r"images \(1 or 3, H, W\)"):
            from_images(model, shape)
    with pytest.raises(cl.ConformalError, match=r"samples of shape \(2,\)"):
        from_images(cl.Centre((2,)), (3,))
    own = cl.ConformalLayers(cl.Linear(3, 2))
    assert from_images(own, (3,)) is own
    assert native_shape(own) is None


# -- labels and notes ---------------------------------------------------------------------------------


def test_every_set_has_labels_and_a_shape() -> None:
    assert set(LABELS) == set(SHAPES) == set(NAMES)
    assert all(len(set(labels)) == 10 for labels in LABELS.values())
    assert LABELS["fashion-mnist"][9] == "Ankle boot"
    assert LABELS["cifar10"][3] == "cat"
    assert tuple(load("digits").test_images.shape[1:]) == SHAPES["digits"]


def test_labels_and_notes_come_back(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    model = nn.Sequential(net("chain"), nn.Flatten(), nn.Linear(36, 2))
    folded = cl.fold(model, SHAPE)
    cl.save(folded, path)
    assert (cl.load(path).labels, cl.load(path).about) == (None, None)
    labels, about = ("ä", "b"), {"white": 255, "who": ["me", None]}
    cl.save(folded, path, labels=labels, about=about)
    for loaded in (cl.load(path), cln.load(path)):
        assert (loaded.labels, loaded.about) == (labels, about)
    first = path.read_bytes()
    cl.save(cl.load(path), path)
    assert path.read_bytes() == first
    cl.save(model, path, labels=labels, about=about)
    found = load_model(path, "test")
    assert (found.labels, found.about) == (labels, about)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": ["a"]}, "got 1 labels for 2 outputs"),
        ({"labels": ["a", 2]}, "labels that are no words"),
        ({"labels": "ab"}, "expected a list of words, got the word 'ab'"),
        ({"about": {"x": float("nan")}}, "JSON"),
        ({"about": {"x": object()}}, "not JSON serializable"),
    ],
)
def test_wrong_labels_and_notes_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folded = cl.fold(nn.Sequential(net("chain"), nn.Flatten(), nn.Linear(36, 2)), SHAPE)
    with pytest.raises(cl.ConformalError, match=message):
        cl.save(folded, tmp_path / "net.safetensors", **options)
    assert not list(tmp_path.iterdir())


# -- what MODEL may be --------------------------------------------------------------------------------


def test_runs_checkpoints_models_and_folds_are_found(folder: Path, tmp_path: Path) -> None:
    assert locate(folder, "test") == (folder / evaluate.CHECKPOINT, "checkpoint")
    found = load_model(folder / evaluate.CHECKPOINT, "test")
    assert not found.module.training
    assert (found.labels, found.dataset, found.shape) == (LABELS["digits"], "digits", (1, 8, 8))
    assert found.about["network"] == "LeNetCL"
    cl.save(found.module, path := tmp_path / "model.safetensors")
    saved = load_model(path, "test")
    assert (saved.shape, saved.dataset, saved.labels) == ((3, 32, 32), None, None)
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(saved.module(x), found.module(x))
    cl.save(fold_model(found, "test"), path)
    assert locate(path, "test")[1] == "saved"
    assert load_model(path, "test").shape == (1, 8, 8)


def test_what_is_no_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        cl.ConformalError, match=r"^fold .*nothing: expected a file of cl\.save, .*got no such"
    ):
        locate(tmp_path / "nothing", "fold")
    with pytest.raises(cl.ConformalError, match=r"got a folder without checkpoint\.safetensors"):
        locate(tmp_path, "fold")
    path = tmp_path / "file"
    checkpoint = (folder / evaluate.CHECKPOINT).read_bytes()
    for content in (b"", b"PK\3\4 a zip", b"\xff" * 100, checkpoint[:50], b"\2\0\0\0\0\0\0\0[]"):
        path.write_bytes(content)
        with pytest.raises(cl.ConformalError, match="got a file that is none of them"):
            locate(path, "fold")
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(cl.ConformalError, match="got another safetensors file"):
        locate(path, "fold")
    path.write_bytes(checkpoint[:-5])
    with pytest.raises(cl.ConformalError, match="expected a training checkpoint, got"):
        load_model(path, "fold")


# -- the commands -------------------------------------------------------------------------------------


def test_fold_writes_a_file_that_evaluates_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.safetensors"
    assert run("fold", folder, "--out", path) == 0
    shown = capsys.readouterr().out
    assert "→" in shown
    assert f"Wrote {path}, " in shown
    folded = cl.load(path)
    assert (folded.input_shape, folded.labels) == ((1, 8, 8), LABELS["digits"])
    assert folded.about == {"network": "LeNetCL", "dataset": "digits", "epoch": 3, "white": 1.0}
    assert run("evaluate", path) == 0
    of_file = capsys.readouterr().out
    assert run("evaluate", folder) == 0
    of_run = capsys.readouterr().out
    assert of_file.splitlines()[0] == of_run.splitlines()[0] == "LeNetCL after epoch 3, digits"
    assert of_file.splitlines()[-1] == of_run.splitlines()[-1]
    assert "layer by layer" not in of_file


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_fold_takes_the_options_of_cl_fold(folder: Path, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    names = tmp_path / "names.txt"
    names.write_text("\n".join("abcdefghij") + "\n")
    options = ["--strategy", "layers", "--tolerance", "0.01", "--max-norm", "60", "--dtype", dtype]
    shape = ["--input-shape", 3, 32, 32]
    assert run("fold", folder, "--out", path, *shape, *options, "--labels", names) == 0
    folded = cl.load(path)
    assert (folded.strategy, folded.input_shape) == ("layers", (3, 32, 32))
    assert (str(folded.dtype), folded.labels) == (f"torch.{dtype}", tuple("abcdefghij"))
    images = pictures((1, 8, 8), 3)
    data = Dataset("digits", images, torch.zeros(3), images, torch.tensor([0, 1, 2]))
    found = evaluate.evaluate(path, data)
    assert found["folded"] == evaluate.evaluate(folder, data)["layers"]


def test_models_of_ones_own_fold_and_evaluate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "model.safetensors", tmp_path / "net.safetensors"
    stages = cl.Conv2d(1, 4, 3), cl.ReSPro(), cl.Flatten()
    cl.save(nn.Sequential(cl.ConformalLayers(*stages), nn.Linear(144, 10)), path)
    assert run("fold", path, "--out", out) == 1
    assert "--input-shape: expected the shape of one sample, got none" in capsys.readouterr().err
    assert run("fold", path, "--out", out, "--input-shape", 1, 8, 8) == 0
    assert cl.load(out).labels is None
    assert run("evaluate", path, "--dataset", "digits") == 1
    assert "expected a network of the paper, got Sequential" in capsys.readouterr().err
    assert run("evaluate", out) == 1
    assert "--dataset: expected the set of the test images, got none" in capsys.readouterr().err
    assert run("evaluate", out, "--dataset", "digits") == 0
    assert capsys.readouterr().out.startswith("Folded, digits\naccuracy folded ")
    cl.save(cl.networks.LeNetCL(), path)
    assert run("evaluate", path, "--dataset", "digits") == 0
    assert "accuracy layer by layer" in capsys.readouterr().out


def test_white_of_a_file_counts(small: Dataset, tmp_path: Path) -> None:
    """A network for pixels from 0 to 255 is measured on those."""
    path = tmp_path / "net.safetensors"
    model = nn.Sequential(net("chain"), nn.Flatten(), nn.Linear(36, 10))
    stages = cl.Conv2d(1, 4, 3), cl.ReSPro(alpha=2.0), cl.Flatten(), cl.Linear(144, 10)
    model = randomise(cl.ConformalLayers(*stages))
    folded = cl.fold(model, (1, 8, 8))
    cl.save(folded, path, about={"white": 255})
    expected = (folded(small.test_images.float()).argmax(1) == small.test_labels).sum() / 50
    assert evaluate.evaluate(path, small)["folded"] == pytest.approx(float(expected))
    cl.save(folded, path, about={"white": "much"})
    with pytest.raises(cl.ConformalError, match="expected a number for white, got 'much'"):
        evaluate.evaluate(path, small)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grey", "--input-shape", 1, 8, 8], "--grey or --input-shape, got both"),
        (["--dtype", "int8"], "--dtype: expected one of float64, float32"),
        (["--strategy", "magic"], "got 'magic'"),
        (["--input-shape", 1, 64, 64], "with sides of at most 32"),
        (["--tolerance", "-1"], "got -1.0"),
    ],
)
def test_wrong_options_of_fold_are_refused(
    arguments: list[Any],
    message: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("fold", folder, "--out", tmp_path / "net", *arguments) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_grey_is_for_grey_images(folder: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "model.safetensors", tmp_path / "net.safetensors"
    cl.save(cl.networks.LeNetCL(), path)
    assert run("fold", path, "--out", out, "--grey") == 0
    assert cl.load(out).input_shape == (1, 28, 28)
    assert run("fold", folder, "--out", out, "--grey") == 0
    assert cl.load(out).input_shape == (1, 8, 8)


def test_folds_and_plain_networks_do_not_fold(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.safetensors"
    assert run("fold", folder, "--out", path) == 0
    assert run("fold", path, "--out", tmp_path / "again") == 1
    assert "A fold cannot be folded again" in capsys.readouterr().err
    cl.save(cl.networks.LeNet(), path)
    assert run("fold", path, "--out", tmp_path / "again") == 1
    assert "got LeNet in" in capsys.readouterr().err


def test_export_for_numpy_is_run_before_it_is_there(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "net.safetensors"
    assert run("export", folder, "--format", "numpy", "--out", path, "--strategy", "dense") == 0
    assert "numpy and torch differ by" in capsys.readouterr().out
    network = cln.load(path)
    assert (network.strategy, network.labels) == ("dense", LABELS["digits"])
    assert run("export", path, "--format", "numpy", "--out", tmp_path / "copy") == 0
    kept = cl.fold(net("chain"), SHAPE, strategy="layers")
    cl.save(kept, path)
    monkeypatch.setattr(cln, "WINDOWS_LIMIT", 100)
    assert run("export", path, "--format", "numpy", "--out", tmp_path / "other") == 1
    assert "elements of windows, and 100 are the most" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "tflite"], "--format: expected one of c, onnx, numpy, got 'tflite'"),
        (["--format", "numpy", "--opset", 3], "it for --format onnx alone, got 3 for numpy"),
        (["--format", "onnx", "--weights", "int8"], "it for --format c alone, got int8 for onnx"),
        (["--format", "c", "--strategy", "dense"], "A fold cannot be folded again"),
        (["--format", "c", "--samples", "nothing.npy"], "nothing.npy: expected samples"),
    ],
)
def test_wrong_options_of_export_are_refused(
    arguments: list[Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.safetensors"
    cl.save(cl.fold(net("torus head"), SHAPE), path)
    assert run("export", path, "--out", tmp_path / "out", *arguments) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_export_to_c(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "net.safetensors", tmp_path / "c"
    cl.save(cl.fold(net("torus head"), SHAPE, strategy="dense"), path)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((8, *SHAPE), np.float32))
    options = ["--name", "tiny", "--weights", "int8", "--samples", tmp_path / "x.npy"]
    assert run("export", path, "--format", "c", "--out", out, *options) == 0
    assert {file.suffix for file in out.iterdir()} == {".c", ".h"}
    assert capsys.readouterr().out
    assert run("export", path, "--format", "c", "--out", path) == 1
    assert "expected a folder, got the file" in capsys.readouterr().err
    other = tmp_path / "other"
    assert run("export", path, "--format", "c", "--out", other, "--weights", "int3") == 1
    assert not other.exists()


def test_export_of_a_run_to_c(folder: Path, tmp_path: Path) -> None:
    """The mean image is part of it."""
    out = tmp_path / "c"
    assert run("export", folder, "--format", "c", "--out", out, "--strategy", "dense") == 0
    assert "offset" in (out / "cl_model.c").read_text()


def test_export_of_a_run_to_onnx(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("conformallayers.export.onnx", reason="not part of this version")
    pytest.importorskip("onnx", reason="the extra onnx is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    path, saved = tmp_path / "net.onnx", tmp_path / "net.safetensors"
    assert run("export", folder, "--format", "onnx", "--out", path, "--strategy", "dense") == 0
    assert run("fold", folder, "--out", saved, "--strategy", "dense") == 0
    x = pictures((1, 8, 8)).float() / 255
    (y,) = runtime.InferenceSession(str(path)).run(None, {"x": x.numpy()})
    assert relative_error(torch.from_numpy(y), cl.load(saved)(x)) < 1e-5


def test_documents_of_files_have_the_notes(folder: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    path = tmp_path / "net.safetensors"
    assert run("fold", folder, "--out", path) == 0
    with safe_open(path, "np") as file:
        document = json.loads(file.metadata()["conformallayers"])
    assert document["labels"][3] == "3"
    assert document["about"]["white"] == 1.0
