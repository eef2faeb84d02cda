"""Experiment 6: rows that are kept, the table, and the contrast that a projective network does not see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import conformallayers as cl
from conformallayers.errors import MissingExtra
from conformallayers.lab.experiments import corruptions, robustness
from conformallayers.lab.experiments.robustness import NAMES, cells, run_robustness
from conformallayers.lab.experiments.trained_networks import NETWORKS, config_of
from conformallayers.lab.training.train import train
from runs import few_digits
from training import QUIET

SEEN = ("StageNet-micro", "StageReLUNet-micro-max")  # networks that see contrast
UNSEEN = ("LeNetCL", "StageNet-micro-no-offset")
OPTIONS: dict[str, Any] = {"dataset": "digits", "epochs": 1, "images": 40}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in (*SEEN, *UNSEEN):
        options = config_of(NETWORKS[name], "digits", 0, epochs=1).model_dump()
        del options["dataset"]
        train(dataset=few_digits(), out=folder / f"{name}-digits-seed0", console=QUIET, **options)
    return folder


@pytest.fixture
def options(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(robustness, "load", lambda *names, **options: few_digits())
    lines: list[str] = []
    return {**OPTIONS, "runs": runs, "out": tmp_path / "out", "say": lines.append}


def test_a_projective_network_without_offset_does_not_see_contrast(
    options: dict[str, Any],
) -> None:
    names = (*SEEN, *UNSEEN)
    rows = run_robustness(**options, only=names, corruptions=("scaled",))["rows"]
    assert len(rows) == 4 * (1 + 5)
    clean = {row["name"]: row["accuracy"] for row in rows if row["corruption"] == "none"}
    for row in rows:
        if row["corruption"] == "scaled" and row["name"] in UNSEEN:
            assert row["accuracy"] == clean[row["name"]]
            assert row["change_of_scores"] < 1e-4
        elif row["corruption"] == "scaled":
            assert row["change_of_scores"] > 1e-2


def test_corruptions_are_measured_one_by_one_and_kept(options: dict[str, Any]) -> None:
    try:
        corruptions._package()
    except MissingExtra as error:
        pytest.skip(str(error))
    options = {**options, "only": SEEN, "strengths": (1, 5)}
    first = run_robustness(**options, corruptions=("pixelate",))["rows"]
    kinds = [(row["corruption"], row["strength"]) for row in first]
    assert kinds == [("none", 0)] * 2 + [("pixelate", 1)] * 2 + [("pixelate", 5)] * 2
    options["say"] = (lines := []).append
    both = run_robustness(**options, corruptions=("contrast", "pixelate"))["rows"]
    assert both[:6] == first
    assert ["corruption contrast" in line for line in lines] == [True] * 4
    names = {path.name for path in options["out"].iterdir()}
    assert names == {f"digits.{suffix}" for suffix in ("json", "md", "png")}
    header, _, *table = (options["out"] / "digits.md").read_text().splitlines()
    assert header == "| network | mean of corruptions | none | contrast | pixelate |"
    assert [line.split()[1] for line in table] == list(SEEN)
    with pytest.raises(cl.ConformalError, match="--images: expected 40 as before, got 20"):
        run_robustness(**{**options, "images": 20})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"corruptions": ("fogg",)}, 'Did you mean "fog"'),
        ({"strengths": (6,)}, "--strengths: expected 1 to 5, got 6"),
        (
            {"only": ("MLP",)},
            "a finished run in .*MLP-digits-seed0, .* experiment 5 --only MLP --seeds 0",
        ),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, Any], wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        run_robustness(**{**options, **wrong})


def test_every_network_of_the_experiment_is_known() -> None:
    assert set(NAMES) <= set(NETWORKS)


def test_table_has_the_mean_over_strengths_and_seeds() -> None:
    rows = [
        {"corruption": kind, "strength": strength, "name": "A", "run_seed": seed, "accuracy": share}
        for kind, strength, seed, share in [
            ("none", 0, 0, 0.9),
            ("fog", 1, 0, 0.8),
            ("fog", 1, 1, 0.6),
            ("fog", 5, 0, 0.5),
            ("snow", 1, 0, 0.4),
            ("scaled", 1, 0, 0.9),
        ]
    ]
    assert cells(rows)[1] == [["A", "50.0", "90.0", "40.0", "60.0", "90.0"]]
