"""The networks of experiments 5 and 6: one budget for all."""

from __future__ import annotations

import pytest

pytest.importorskip("pydantic")

import conformallayers as cl
from conformallayers.lab.experiments.trained_networks import NETWORKS, config_of, named
from conformallayers.networks.stages import PRESETS


def test_all_have_one_budget_and_can_be_built() -> None:
    assert len(NETWORKS) == 4 + 3 * len(PRESETS) + 2 * (2 + 4 + 2) + 1
    configs = [config_of(one, "cifar10", seed=2) for one in NETWORKS.values()]
    budgets = {(c.epochs, c.batch_size, c.flips, c.shift, c.optimizer, c.centre) for c in configs}
    assert len(budgets) == 1
    assert {config.seed for config in configs} == {2}
    for config in configs:
        config.build()


def test_conformal_options_of_a_preset_are_kept() -> None:
    config = config_of(NETWORKS["LeNetCL"], "cifar10", 0, epochs=3)
    assert (config.projective, config.epochs) == (True, 3)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(cl.ConformalError, match='Did you mean "StageNet-micro"'):
        named("experiment 5 --only", ["StageNet-mikro"])
