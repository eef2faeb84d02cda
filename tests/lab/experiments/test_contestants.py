"""The contestants: one budget for all, and runs that are found by their options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

import conformallayers as cl
from conformallayers.lab.experiments.contestants import (
    CONTESTANTS,
    Runs,
    config_of,
    identity,
    named,
)
from conformallayers.lab.training.config import make_config
from conformallayers.networks.stages import PRESETS
from runs import few_digits
from training import QUIET


def test_all_have_one_budget_and_can_be_built() -> None:
    assert len(CONTESTANTS) == 4 + 5 * len(PRESETS) + 2 * (2 + 4 + 2) + 1
    configs = [config_of(one, "cifar10", seed=2) for one in CONTESTANTS.values()]
    budgets = {(c.epochs, c.batch_size, c.flips, c.shift, c.optimizer, c.centre) for c in configs}
    assert len(budgets) == 1
    assert {config.seed for config in configs} == {2}
    assert len({identity(config) for config in configs}) == len(configs) - 1
    same = (CONTESTANTS[name] for name in ("StageNet-micro", "StageNet-micro-depth2-norm"))
    assert len({identity(config_of(one, "cifar10", 0)) for one in same}) == 1


def test_conformal_options_of_a_recipe_are_kept() -> None:
    config = config_of(CONTESTANTS["LeNetCL"], "cifar10", 0, epochs=3)
    assert (config.recipe, config.projective, config.epochs) == ("modern", True, 3)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(cl.ConformalError, match='Did you mean "StageNet-micro"'):
        named("experiment 5 --only", ["StageNet-mikro"])


def test_finished_runs_are_found_by_their_options(tmp_path: Path) -> None:
    from conformallayers.lab.training.train import train

    config = config_of(CONTESTANTS["StageNet-micro"], "digits", 0, epochs=1)
    spelt = config.model_dump() | {"depth": 2, "preset": None, "recipe": None, "threads": 1}
    assert Runs(tmp_path).find(config) is None
    train(dataset=few_digits(), out=tmp_path / "any name", console=QUIET, **_options(spelt))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "result.json").write_text("{}")
    found = Runs(tmp_path)
    assert found.find(config) == tmp_path / "any name"
    assert found.find(make_config(**config.model_dump() | {"seed": 1})) is None
    assert found.find(make_config(**config.model_dump() | {"respro": False})) is None
    (tmp_path / "any name" / "result.json").unlink()
    assert json.loads((tmp_path / "any name" / "config.json").read_text())["depth"] == 2
    assert Runs(tmp_path).find(config) is None


def _options(spelt: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in spelt.items() if key != "dataset"}
