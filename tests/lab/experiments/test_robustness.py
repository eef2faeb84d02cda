"""Experiment 6: rows that are kept, the table, and the contrast that a projective network does not see."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import conformallayers as cl
from conformallayers.errors import MissingExtra
from conformallayers.lab.data.batches import as_input
from conformallayers.lab.data.datasets import load
from conformallayers.lab.experiments import robustness
from conformallayers.lab.experiments.cost import NETWORKS, config_of
from conformallayers.lab.experiments.records import Row
from conformallayers.lab.experiments.robustness import (
    CORRUPTIONS,
    NAMES,
    _scaling,
    cells,
    corrupted,
    run_robustness,
)
from conformallayers.lab.options import RobustnessOptions
from conformallayers.lab.training.saved_models import load_model
from conformallayers.lab.training.train import train
from training import QUIET, few_digits

SEEN = ("StageNet-micro", "StageReLUNet-micro")  # networks that see contrast
UNSEEN = ("LeNetCL", "StageNet-micro-no-offset")
Run = Callable[..., list[Row]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("robust") / "runs"
    for name in (*SEEN, *UNSEEN):
        options = config_of(name, "digits", 0, epochs=1).model_dump()
        del options["dataset"]
        train(dataset=few_digits(), out=folder / f"{name}-digits-seed0", console=QUIET, **options)
    return folder


@pytest.fixture
def run(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(robustness, "load", lambda *names, **options: few_digits())
    monkeypatch.chdir(runs.parent)

    def run_digits(*kinds: str, images: int = 40, **options: Any) -> list[Row]:
        monkeypatch.setattr(robustness, "KINDS", kinds)
        chosen = RobustnessOptions(dataset="digits", out=tmp_path, images=images, **options)
        return list(run_robustness(chosen)["rows"])

    return run_digits


def test_a_projective_network_without_offset_does_not_see_contrast(run: Run, runs: Path) -> None:
    rows = run("scaled", only=(*SEEN, *UNSEEN))
    assert len(rows) == 4 * (1 + 5)
    clean = {row["name"]: row["accuracy"] for row in rows if row["corruption"] == "none"}
    for row in rows:
        if row["corruption"] == "scaled" and row["name"] in UNSEEN:
            assert row["accuracy"] == clean[row["name"]]
    x = as_input(few_digits().test_images[:40])
    for name, strength in product((*SEEN, *UNSEEN), range(1, 6)):
        model = load_model(runs / f"{name}-digits-seed0", "test").module
        with torch.no_grad():
            change = cl.testing.relative_error(_scaling(model, strength)(x), model(x))
        assert change < 1e-4 if name in UNSEEN else change > 1e-2


@pytest.mark.usefixtures("package")
def test_corruptions_are_measured_one_by_one_and_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robustness, "STRENGTHS", (1, 5))
    first = run("pixelate", only=SEEN)
    kinds = [(row["corruption"], row["strength"]) for row in first]
    assert kinds == [("none", 0)] * 2 + [("pixelate", 1)] * 2 + [("pixelate", 5)] * 2
    both = run("contrast", "pixelate", only=SEEN)
    assert both[:6] == first
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"digits.{suffix}" for suffix in ("json", "md", "png")}
    header, _, *table = (tmp_path / "digits.md").read_text().splitlines()
    assert header == "| network | mean of corruptions | none | contrast | pixelate |"
    assert [line.split()[1] for line in table] == list(SEEN)
    with pytest.raises(cl.ConformalError, match="--images: expected 40 as before, got 20"):
        run("pixelate", only=SEEN, images=20)


def test_wrong_options_are_refused(run: Run) -> None:
    message = "a finished run in .*MLP-digits-seed0, .* experiment 5 --dataset digits --only MLP --seeds 0"
    with pytest.raises(cl.ConformalError, match=message):
        run(only=("MLP",))
    assert set(NAMES) <= set(NETWORKS)


def test_table_has_the_mean_over_strengths() -> None:
    shares = {("none", 0): 0.9, ("fog", 1): 0.7, ("fog", 5): 0.5, ("snow", 1): 0.4}
    rows = [
        {"corruption": kind, "strength": strength, "name": "A", "accuracy": share}
        for (kind, strength), share in [*shares.items(), (("scaled", 1), 0.9)]
    ]
    assert cells(rows)[1] == [["A", "50.0", "90.0", "40.0", "60.0", "90.0"]]


# Enlarged four times; moved, as "pixelate" would leave blocks of four where they are.
IMAGES = as_input(load("digits").test_images[:4]).mul(255).byte().roll((1, 2), (2, 3))


@pytest.fixture
def package() -> None:
    try:
        robustness._package()
    except MissingExtra as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_repeat_and_depend_on_nothing_but_the_image(name: str) -> None:
    found = corrupted(IMAGES, name, 5)
    assert (found.shape, found.dtype) == ((4, 3, 32, 32), torch.uint8)
    assert not torch.equal(found, IMAGES)
    torch.rand(3)
    assert torch.equal(corrupted(IMAGES[:2], name, 5), found[:2])
    weak = corrupted(IMAGES, name, 1).float() - IMAGES
    if name not in ("elastic_transform", "jpeg_compression", "frost"):  # not ordered by energy
        assert weak.norm() < (found.float() - IMAGES).norm()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    robustness._package.cache_clear()
    with pytest.raises(MissingExtra, match=r"pip install 'conformallayers\[robustness\]'"):
        corrupted(IMAGES, "fog", 1)
    robustness._package.cache_clear()
