"""The ablation and the cells of the paper's tables follow from the recipe."""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

import conformallayers as cl
from conformallayers.lab.data.datasets import Dataset, load
from conformallayers.lab.data.sources import find_source
from conformallayers.lab.experiments import paper
from conformallayers.lab.experiments.accuracy import accuracy_table, config_of, run_accuracy
from conformallayers.lab.report.report import write_report
from conformallayers.lab.training import evaluate, recipes
from conformallayers.lab.training.recipes import FAMILIES, RECIPES
from conformallayers.utils import memory
from support import run_command
from training import QUIET

SOURCES = sys.modules[find_source.__module__]  # by a path, a test that imports anew would hide it


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
    monkeypatch.setattr(SOURCES, "load", lambda *_, **__: small)
    brief = {"epochs": 1, "batch_size": 75}
    tiny = {key: {**row, **brief} for key, row in RECIPES["modern"].items()}
    monkeypatch.setitem(recipes.RECIPES, "modern", tiny)
    for name in paper.ABLATION.values():
        monkeypatch.setitem(paper.VARIANTS[name].options, "epochs", 1)
    assert run_command("experiment", "ablation", "--threads", 1) == 0
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
    families = FAMILIES["LeNet"], FAMILIES["Base"]  # the networks of the paper
    pairs = itertools.product(families, paper.DATASETS)
    named = {(cell.network, cell.dataset) for cell in paper.CELLS}
    for networks, dataset in pairs:
        assert {(network, dataset) for network in networks} <= named
