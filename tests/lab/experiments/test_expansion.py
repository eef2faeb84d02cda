"""Experiment 7: variants that differ as they say, rows that are kept, a line for each variant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import conformallayers as cl
from conformallayers.lab.data import datasets
from conformallayers.lab.experiments import expansion
from conformallayers.lab.experiments.cost import config_of
from conformallayers.lab.experiments.expansion import VARIANTS, Variant, run_expansion
from conformallayers.lab.options import ExpansionOptions
from training import few_digits


def test_rows_are_trained_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load", lambda *names, **options: few_digits())
    kinds = ("plain", "chain+branches, rate × 2")
    options = {"dataset": "digits", "only": ("LeNet",), "epochs": 1, "validation": 0.25}
    chosen = ExpansionOptions(variants=kinds, out=tmp_path, **options)  # type: ignore[arg-type]
    record = run_expansion(chosen)
    assert [(row["variant"], row["seed"]) for row in record["rows"]] == [(k, 0) for k in kinds]
    monkeypatch.setattr(expansion, "epoch_rows", None)  # nothing is left to train
    assert run_expansion(chosen)["rows"] == record["rows"]
    table = (tmp_path / "digits-1-epochs.md").read_text()
    assert "| variant | LeNet |" in table
    assert table.count("| chain+branches, rate × 2 |") == 1


def test_variants_begin_as_they_say() -> None:
    config = config_of("LeNet", "cifar10", 0).model_dump() | {"expand": True}
    weights = []
    for name in ("chain+branches", "chain+branches, from random terms", "branches"):
        torch.manual_seed(0)
        bigger = Variant(**config, **VARIANTS[name]).build()
        first = bigger[1].features[0]
        weights.append((first.counted_weights, any(term().any() for term in first.terms)))
        assert cl.collapse(bigger)(torch.rand(1, 3, 32, 32)).shape == (1, 10)
    (count, begins), (same, random), (fewer, _) = weights
    assert (begins, random) == (False, True)
    assert count == same > fewer
    for name, norms in (("norm", 2), ("BatchNorm of each term", 2 * 3)):
        module = Variant(**config, **VARIANTS[f"chain+branches, {name}"]).build()
        assert sum(isinstance(layer, torch.nn.BatchNorm2d) for layer in module.modules()) == norms
        assert module(torch.rand(2, 3, 32, 32)).shape == (2, 10)
