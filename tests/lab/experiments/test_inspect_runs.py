"""The inspection of a run: its record, its figures, and accuracies with other denominators."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.lab.experiments import inspect_runs as inspecting
from conformallayers.lab.training import checkpoint
from conformallayers.lab.training.config import make_config
from conformallayers.lab.training.train import train
from oracle import randomise
from support import both_forms, run_command, samples

FIGURES = {"spectrum", "terms", "receptive-field", "eigenimages", "templates"}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "tiny"
    options = {"epochs": 2, "batch_size": 64, "alpha": "learned", "learning_rate": 0.01}
    return train("LeNetCL", "digits", out=out, console=Console(quiet=True), **options).folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the spectrum of 3072 coefficients, which takes most of the time, by the diagonal."""

    def diagonal(form: Tensor) -> tuple[Tensor, Tensor]:
        values, order = form.diagonal().sort()
        return values, torch.eye(len(form), dtype=form.dtype)[:, order]

    monkeypatch.setattr(torch.linalg, "eigh", diagonal)


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_command_writes_a_record_and_figures(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "seen"
    arguments = ("inspect", run_folder, "--samples", 450, "--out", out)
    assert run_command(*arguments) == 0
    assert "features.1, features.4" in capsys.readouterr().out
    files = {f"{name}.{suffix}" for name in FIGURES for suffix in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == files | {"inspect.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]  # nothing unfinished is left
    record = json.loads((out / "inspect.json").read_text())
    assert {"command", "commit", "machine", "untrained"} <= set(record)
    assert record["command"].startswith(f"conformallayers inspect {run_folder} --dataset digits")
    assert record["trained"].startswith("conformallayers train LeNetCL digits")
    (part,) = record["parts"]
    accuracy = json.loads((run_folder / "result.json").read_text())["accuracy_layers"]
    assert part["accuracy"]["network"] == accuracy
    assert sum(term["share"]["mean"] for term in part["terms"]) == pytest.approx(1)
    assert len(part["template_norms"]) == 120
    (form,) = part["forms"]
    assert sum(form["falloff"]) == pytest.approx(1, abs=1e-4)
    assert len(form["eigenvalues"]) == 3072
    assert record["untrained"][0]["forms"][0]["trace"] != form["trace"]

    for term in part["terms"][1:]:
        classes = term["gain"]["by_class"]
        assert sorted(classes) == [str(n) for n in range(10)]
        assert min(classes.values()) < term["gain"]["mean"] < max(classes.values())
        assert 0 < term["gain"]["between_classes"] < 1

    # Python gives the same, and a folder that is finished stays as it is.
    found = checkpoint.load(run_folder / "checkpoint.safetensors")
    _, model = checkpoint.trained(found)
    assert record["epoch"] == found.state.epoch == 2
    assert cl.inspect(model, (3, 32, 32)).parts[0].forms[0].trace == form["trace"]
    before = (out / "inspect.json").stat().st_mtime_ns
    assert run_command(*arguments, "--resume") == 0
    assert "already" in capsys.readouterr().out
    assert (out / "inspect.json").stat().st_mtime_ns == before
    with pytest.raises(cl.ConformalError, match="--resume, --samples: expected 450 as before"):
        inspecting.run_inspect(run_folder, samples=3, out=out, resume=True)


def test_untrained_network_is_the_one_that_training_begins_with() -> None:
    config = make_config(network="LeNetCL", dataset="digits", seed=3)
    built = inspecting._initial(config).state_dict()
    torch.manual_seed(3)
    for name, tensor in cl.networks.LeNetCL().state_dict().items():
        assert torch.equal(tensor, built[name])


def test_interruption_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "seen"
    inspecting._write(out, {"terms": Figure()}, {"number": 1})
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(before) == {"terms.png", "terms.svg", "inspect.json"}

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspecting, "write_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        inspecting._write(out, {"terms": Figure(), "other": Figure()}, {"number": 2})
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert list(tmp_path.iterdir()) == [out]


def test_command_refuses_in_one_line(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for arguments, message in (
        ((tmp_path / "none",), "no such file"),
        ((file,), "a whole file of cl.save or conformallayers train"),
        ((run_folder, "--samples", 0), "from 1 to 450"),
        ((run_folder, "--samples", 451), "from 1 to 450"),
        ((run_folder, "--out", file), "expected a folder"),
        ((run_folder, "--dataset", "letters"), "letters"),
    ):
        assert run_command("inspect", *arguments) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


@both_forms
def test_accuracies_replace_the_denominator_alone(projective: bool) -> None:
    alpha, conv, head = 1.2, cl.Conv2d(1, 1, 5), nn.Linear(16, 4)
    features = cl.ConformalLayers(conv, cl.ReSPro(alpha, projective=projective))
    model = randomise(nn.Sequential(features, nn.Flatten(), head).double())
    with torch.no_grad():  # scores and bias must be of one size for the denominator to matter
        head.bias.mul_(0.5 if projective else 0.05)
    x = samples((1, 8, 8), torch.float64, 400) * torch.logspace(-2, 2, 400)[:, None, None, None]
    (part,) = cl.inspect(model, (1, 8, 8), x).parts
    with torch.no_grad():
        norm, u = x.flatten(1).norm(dim=1), conv(x).flatten(1)
        quotient = u.square().sum(1) / alpha**2 / norm**2
        exact, isotropic = (
            norm + q * (norm if projective else norm**2) for q in (quotient, quotient.mean())
        )
        meant = {
            "network": exact,
            "multiple_of_identity": isotropic,
            "constant_denominator": exact.mean().expand(400),
        }
        labels = {n: head(u * 2 / alpha / d[:, None]).argmax(1) for n, d in meant.items()}
    for name, wanted in labels.items():
        found = inspecting.accuracies(model, part, x, wanted)
        assert found[name] == 1
        assert all(value < 1 for other, value in found.items() if other != name)
    (part,) = cl.inspect(model, (1, 8, 8)).parts
    with pytest.raises(cl.ConformalError, match="data=x"):
        inspecting.accuracies(model, part, x, wanted)


def test_stages_have_rows_and_figures_of_their_own() -> None:
    features = cl.ConformalLayers(
        *(cl.Conv2d(3, 4, 3), cl.ReSPro(), nn.LPPool2d(2, 2), cl.Flatten(), cl.Linear(36, 8)),
        *(cl.ReSPro(), nn.ReLU()),
    )
    model = randomise(nn.Sequential(features, nn.Linear(8, 5)))
    x, labels = samples((3, 8, 8), torch.float32, batch=20), torch.arange(20) % 5
    found = cl.inspect(model, (3, 8, 8), x)
    rows = inspecting._results(model, found, found, x, labels)["parts"]
    assert [row["path"] for row in rows] == ["0 stage 1", "0 stage 2", "0 stage 3"]
    right = cl.testing.reference(model, x).argmax(1) == labels
    assert all(row["accuracy"] == {"network": float(right.double().mean())} for row in rows)
    assert "eigenimage_frequencies" in rows[0]["forms"][0]
    figures = inspecting.inspection_figures(found, found, "net", 5)
    assert {*FIGURES, "terms-2", "spectrum-2", "terms-3"} <= set(figures)


@pytest.mark.parametrize("depth", [2, 12])
def test_legends_are_beside_the_curves_and_inside_the_figure(depth: int) -> None:
    """Labels are words, no paths of modules; the shares of the terms are one bar."""
    layers = [m for _ in range(depth) for m in (cl.Conv2d(1, 1, 3, padding=1), cl.ReSPro(1.0))]
    model = randomise(cl.ConformalLayers(*layers))
    found = cl.inspect(model, (1, 8, 8), samples((1, 8, 8), torch.float32, batch=20))
    drawn = inspecting.inspection_figures(found, found, "net", 5)
    for name in ("terms", "spectrum", "receptive-field"):
        drawn[name].draw_without_rendering()
        (legend,), (axes,) = drawn[name].legends, drawn[name].axes
        box = legend.get_window_extent()
        assert box.y1 <= axes.get_window_extent().y0
        assert box.x0 >= 0
        assert box.x1 <= drawn[name].bbox.x1
    labels = [text.get_text() for text in drawn["terms"].legends[0].get_texts()]
    assert [label.split(":")[0] for label in labels[:2]] == ["‖x‖", "activation 1"]
    assert len(labels) == min(depth + 1, 8)
    bars = drawn["terms"].axes[0].patches
    assert abs(sum(bar.get_width() for bar in bars) - 100) < 1e-4


@pytest.mark.slow  # the eigenvalues of a form of 3072 rows
def test_networks_of_the_zoo_are_inspected_by_name(tmp_path: Path) -> None:
    out = tmp_path / "seen"
    assert run_command("inspect", "digits-lenetcl", "--samples", "20", "--out", out) == 0
    record = json.loads((out / "inspect.json").read_text())
    assert record["network"] == "LeNetCL"
    assert record["trained"].startswith("conformallayers train LeNetCL digits")
    assert record["untrained"] == []
    assert record["parts"][0]["accuracy"]["network"] > 0.8
    assert {f"{name}.png" for name in FIGURES} <= {path.name for path in out.iterdir()}


def test_folds_are_not_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fold = tmp_path / "fold.safetensors"
    cl.save(cl.zoo.load("digits-micro"), fold)
    assert run_command("inspect", fold) == 1
    assert "got a fold. Name what it was folded from" in capsys.readouterr().err
