"""Recipes: one table, options that beat it, images that are moved alike wherever a run goes on."""

from __future__ import annotations

import functools
import itertools
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")

import torch
from rich.console import Console
from safetensors.torch import load_file

import conformallayers as cl
from conformallayers.cli import app as cli
from conformallayers.lab.data.batches import Batches, as_input, mean_image, moved
from conformallayers.lab.data.datasets import Dataset, load
from conformallayers.lab.experiments import paper
from conformallayers.lab.experiments.accuracy import accuracy_table, config_of, run_accuracy
from conformallayers.lab.report.report import write_report
from conformallayers.lab.training import checkpoint, evaluate, memory, recipes
from conformallayers.lab.training.config import DEFAULTS, TrainConfig, make_config
from conformallayers.lab.training.recipes import FAMILIES, RECIPES, resolved
from conformallayers.lab.training.train import Stopped, train
from support import stops_after

QUIET = Console(quiet=True)
TRAINING = sys.modules[train.__module__]  # by a path, a test that imports anew would hide it
ROWS = [
    (name, network, dataset)
    for name, table in RECIPES.items()
    for family, dataset in table
    for network in FAMILIES[family]
]


def modern(network: str = "LeNetCL", dataset: str = "digits", **options: Any) -> TrainConfig:
    given = {"network": network, "dataset": dataset, "recipe": "modern", **options}
    return make_config(**resolved(given))


@pytest.fixture(scope="module")
def small() -> Dataset:
    full = load("digits")
    images, labels = full.train_images[:150], full.train_labels[:150]
    return Dataset("digits", images, labels, full.test_images[:50], full.test_labels[:50])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in a folder of its own, and fold in no time: other tests have the matrices."""
    monkeypatch.setattr(evaluate, "fold", functools.partial(cl.fold, strategy="layers"))
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: False)
    monkeypatch.chdir(tmp_path)


# -- the table --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "network", "dataset"), ROWS)
def test_every_row_is_a_setting_that_train_takes(name: str, network: str, dataset: str) -> None:
    config = make_config(**resolved({"network": network, "dataset": dataset, "recipe": name}))
    assert config.recipe == name
    assert config.command({}) == f"conformallayers train {network} {dataset} --recipe {name}"
    assert make_config(**resolved(config.model_dump())) == config
    twin = {"LeNet": "LeNetCL", "BaseReLUNet": "BaseReSProNet"}.get(network)
    if twin:  # both get the same budget, and differ in the activation alone
        other = modern(twin, dataset).model_dump()
        differing = {key for key, value in config.model_dump().items() if value != other[key]}
        assert differing == {"network", "projective", "alpha", "gain"}


def test_given_options_beat_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert modern().projective
    for name, value in (("projective", False), ("gain", 0.0), ("epochs", 3), ("alpha", "young")):
        config = modern(**{name: value})
        assert getattr(config, name) == value
        differing = {k for k, v in modern().model_dump().items() if v != getattr(config, k)}
        assert differing == {name}
        words = shlex.split(config.command({}))
        options: dict[str, Any] = {}
        monkeypatch.setattr(memory, "keep_freed_memory", lambda: False)
        with monkeypatch.context() as patch:
            patch.setattr(TRAINING, "train", options_of(options))
            with pytest.raises(KeyboardInterrupt):
                cli._app()(words[1:], result_action="return_value")
        fields = {key: value for key, value in options.items() if key in TrainConfig.model_fields}
        assert make_config(**resolved(fields)) == config
    assert modern(gain=None) == modern()


def options_of(found: dict[str, Any]) -> Any:
    def stopping(**options: Any) -> None:
        found.update(options)
        raise KeyboardInterrupt

    return stopping


def test_zero_has_no_hidden_layer_and_no_gain() -> None:
    with torch.device("meta"):
        plain, full = (modern("BaseReSProNet", hidden=n, gain=n).build().network for n in (0, 5))
    assert isinstance(plain.head, torch.nn.Linear)
    assert not any(isinstance(module, cl.Scale) for module in plain.modules())
    assert full.head[0].out_features == 5
    assert full.features[-1].initial == 5.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "old"}, "train --recipe: expected one of modern, got 'old'"),
        (
            {"network": "D3ModNetCL"},
            "one of LeNet, LeNetCL, .* on digits, .*got D3ModNetCL on digi",
        ),
        ({"dataset": "svhn"}, "got LeNetCL on svhn"),
        ({"shift": 17}, "--shift: expected a value less than or equal to 16, got 17"),
        ({"gain": -1.0}, "--gain: expected a value greater than or equal to 0, got -1.0"),
        ({"momentum": 0.9}, "--momentum: expected none for adamw"),
        ({"dropout": 1.0}, "--dropout: expected a value less than 1, got 1.0"),
        ({"network": "BaseReLUNet", "dropout": 0.1}, "--dropout: expected no such option for Base"),
        ({"network": "LeNet", "gain": 2.0}, "--gain: expected no such option for LeNet, got 2.0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        modern(**options)


# -- images that are moved --------------------------------------------------------------------------


def test_moved_images_are_those_of_rolled_and_mirrored_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 3, 32, 32), generator=generator, dtype=torch.uint8)
    flipped = torch.randint(0, 2, (40,), generator=generator) > 0
    down, right = torch.randint(-3, 4, (2, 40), generator=generator)
    result = moved(images, flipped, down, right)
    for k, image in enumerate(images):
        mirrored = image.flip(2) if flipped[k] else image
        y, x = int(down[k]), int(right[k])
        expected = torch.zeros_like(image)
        inside = [slice(max(0, n), 32 + min(0, n)) for n in (y, x)]
        source = [slice(max(0, -n), 32 + min(0, -n)) for n in (y, x)]
        expected[:, inside[0], inside[1]] = mirrored[:, source[0], source[1]]
        assert torch.equal(result[k], expected)


def test_moves_hang_on_seed_and_epoch_alone_and_ranks_share_them() -> None:
    digits = load("digits")
    images, labels = digits.train_images[:17], digits.train_labels[:17]
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True, "flips": True, "shift": 2}
    whole = Batches(images, labels, **options)
    state = torch.get_rng_state()
    first, second, again = (torch.cat([x for x, _ in whole.at(e)]) for e in (0, 1, 0))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    shares = [Batches(images, labels, **options, rank=rank, world=2) for rank in range(2)]
    for (x, _), *parts in zip(whole, *shares, strict=True):  # of the last batch one rank has none
        assert torch.equal(torch.cat([share for share, _ in parts]), x)
    still = {**options, "flips": False, "shift": 0}
    plain = torch.cat([x for x, _ in Batches(images, labels, **still)])
    assert torch.equal(plain, as_input(images[whole._order()]))
    assert not torch.equal(first, plain)
    assert not torch.equal(second, first)
    only_flips = torch.cat([x for x, _ in Batches(images, labels, **{**options, "shift": 0})])
    kinds = [
        (torch.equal(a, b), torch.equal(a, b.flip(2)))
        for a, b in zip(only_flips, plain, strict=True)
    ]
    assert {(True, False), (False, True)} == set(kinds)


def test_run_with_a_recipe_resumes_in_the_same_bits(
    small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"recipe": "modern", "epochs": 4, "flips": True, "console": QUIET}
    whole = train("LeNetCL", small, out=tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", stops_after(2, checkpoint.save))
        with pytest.raises(Stopped, match=r"--recipe modern --flips --epochs 4 --out .* --resume"):
            train("LeNetCL", small, out=tmp_path / "broken", **options)
    train("LeNetCL", small, out=tmp_path / "broken", resume=True, **options)
    first, second = (load_file(tmp_path / n / evaluate.CHECKPOINT) for n in ("whole", "broken"))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    row = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert (row["recipe"], row["epochs"], row["optimizer"]) == ("modern", 4, "adamw")
    assert row["accuracy_folded"] == row["accuracy_layers"]  # the gain folds as well
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["shift"] == row["shift"]
    assert evaluate.evaluate(whole.folder, small)["layers"] == row["accuracy_layers"]
    torch.testing.assert_close(first["model.centre.mean"], as_input(small.train_images).mean(0))


@pytest.mark.parametrize("dataset", ["digits", "cifar"])
def test_centre_is_the_mean_of_what_the_network_would_see(dataset: str, small: Dataset) -> None:
    images = small.train_images
    if dataset == "cifar":
        generator = torch.Generator().manual_seed(1)
        images = torch.randint(0, 256, (9, 3, 32, 32), generator=generator, dtype=torch.uint8)
    before = images.clone()
    centre = cl.Centre((3, 32, 32))
    centre.fit(mean_image(images))
    assert torch.equal(images, before)
    torch.testing.assert_close(centre.mean, as_input(images, torch.float64).mean(0).float())
    assert float(centre(as_input(images)).mean(0).abs().max()) < 1e-6


def test_run_of_before_the_options_goes_on(small: Dataset, tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path / "run", "epochs": 1, "console": QUIET}
    train("LeNet", small, **options)
    path = tmp_path / "run" / "config.json"
    old = json.loads(path.read_text())
    for name in ("recipe", "gain", "flips", "shift", "centre", "dropout"):
        assert old.pop(name) == DEFAULTS[name]
    path.write_text(json.dumps(old))
    assert len(train("LeNet", small, resume=True, **options).history) == 1
    with pytest.raises(cl.ConformalError, match=r"--shift: expected 0 as before, got 1"):
        train("LeNet", small, resume=True, shift=1, **options)


# -- weight decay and gain --------------------------------------------------------------------------


def test_adamw_decays_matrices_and_kernels_alone(small: Dataset, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 1e-12, "epochs": 1}
    options |= {"alpha": "learned", "gain": 2.0, "console": QUIET, "batch_size": 150}
    free, held = (
        train("LeNetCL", small, out=tmp_path / str(decay), weight_decay=decay, **options).model
        for decay in (0.0, 1e11)
    )
    for (name, weight), other in zip(free.named_parameters(), held.parameters(), strict=True):
        # One step of torch's AdamW: w ← w − rate · decay · w, and a gradient too small to see.
        left = 0.9 if weight.dim() > 1 else 1.0
        torch.testing.assert_close(other, left * weight, rtol=1e-5, atol=1e-7, msg=name)
    assert free.features[-1].gain.item() == pytest.approx(2.0)


@pytest.mark.parametrize("projective", [False, True])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("BaseReSProNet", (2, 7)), ("LeNetCL", ()), ("DkNetCL", (2,)), ("D3ModNetCL", ())],
)
def test_gain_is_a_factor_on_the_features_and_folds(
    name: str, arguments: tuple[int, ...], projective: bool
) -> None:
    network = getattr(cl.networks, name)
    torch.manual_seed(0)
    without = network(*arguments, projective=projective).double()
    torch.manual_seed(0)
    model = network(*arguments, projective=projective, gain=20.0).double()
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model.features(x), 20 * without.features(x))
        folded = cl.fold(model, (3, 32, 32), strategy="layers")
        torch.testing.assert_close(folded(x), model(x))


# -- experiments ------------------------------------------------------------------------------------


def test_ablation_is_every_combination_with_fewer_epochs_and_the_papers_head() -> None:
    cell = next(cell for cell in paper.CELLS if cell.name == paper.ABLATION_CELL)
    assert len(set(paper.ABLATION.values())) == 12
    whole = config_of(cell, "modern", 0)
    for (form, alpha, gain), variant in paper.ABLATION.items():
        config = config_of(cell, variant, 0)
        found = (config.projective, config.alpha, config.gain or 0)
        assert found == (form == "projective", alpha, gain * whole.gain)
        same = ("projective", "alpha", "gain", "epochs", "hidden")
        update = {name: getattr(whole, name) for name in same}
        assert config.model_copy(update=update) == whole
        assert config.epochs < whole.epochs
        assert config.hidden == 0  # the paper's head


@pytest.mark.usefixtures("quick")
def test_ablation_and_seeds_make_rows_and_tables(
    small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TRAINING, "load", lambda *_, **__: small)
    brief = {"epochs": 1, "batch_size": 75}
    tiny = {key: {**row, **brief} for key, row in RECIPES["modern"].items()}
    monkeypatch.setitem(recipes.RECIPES, "modern", tiny)
    for name in paper.ABLATION.values():
        monkeypatch.setitem(paper.VARIANTS[name].options, "epochs", 1)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["experiment", "ablation", "--threads", "1"])
    assert not leaving.value.code
    names = {path.stem for path in Path("results/accuracy").iterdir()}
    assert names == {f"{paper.ABLATION_CELL}-{name}" for name in paper.ABLATION.values()}
    cells = [paper.ABLATION_CELL, "LeNet-fashion-mnist"]
    rows = run_accuracy(2, cells=cells, variant="modern", seed=(0, 1), threads=1, console=QUIET)
    assert [row["seed"] for row in rows] == [0, 0, 1, 1]
    assert all(row["recipe"] == "modern" for row in rows)
    line = accuracy_table(rows).splitlines()[-1]
    a, b = (100 * row["accuracy"] for row in rows if row["network"] == "LeNetCL")
    shown = f"{(a + b) / 2:.2f} ± {abs(a - b) / 2**0.5:.2f} %"
    assert line.split()[:3] == ["LeNetCL", "fashion-mnist", "modern"]
    assert shown in line
    text = write_report(Path("results")).read_text("utf-8")
    assert "Ablation: LeNetCL, fashion-mnist" in text
    assert text.count(shown) == 1  # in Table II; the ablation has rows of its own
    assert text.count(">published<") == 3
    assert "2 seeds" in text


def test_every_recipe_cell_has_rows_of_both_networks() -> None:
    pairs = itertools.product(FAMILIES.values(), paper.DATASETS)
    named = {(cell.network, cell.dataset) for cell in paper.CELLS}
    for networks, dataset in pairs:
        assert {(network, dataset) for network in networks} <= named
