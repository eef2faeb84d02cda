"""The record of a health check: immutable, and printed with its remedies."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.diagnosis.record import HealthWarning


def diagnosis() -> cl.Diagnosis:
    torch.manual_seed(0)
    layers = cl.Conv2d(1, 4, 3), cl.ReSPro(500.0), nn.BatchNorm2d(4), cl.Flatten()
    model = nn.Sequential(cl.ConformalLayers(*layers), nn.Linear(144, 3))
    return cl.diagnose(model, torch.rand(8, 1, 8, 8))


def test_it_prints_tables_and_every_warning_with_its_remedy() -> None:
    found = diagnosis()
    text = str(found)
    assert repr(found) == text
    for part in found.parts:
        assert str(part) in text
    assert "0.1   ReSPro" in text
    assert "fold of" in text
    assert f"{len(found.warnings)} warnings on 8 samples" in text
    for warning in found.warnings:
        assert all(piece in text for piece in (warning.seen, warning.why, warning.remedy))
        assert str(warning) in text


def test_it_cannot_be_changed() -> None:
    found = diagnosis()
    assert isinstance(found.warnings, tuple)
    for record, name in (
        (found, "warnings"),
        (found.parts[0], "layers"),
        (found.parts[0].layers[0], "length"),
        (found.warnings[0], "remedy"),
    ):
        with pytest.raises(FrozenInstanceError):
            setattr(record, name, ())


def test_columns_without_numbers_are_left_out() -> None:
    part = cl.ConformalLayers(cl.Linear(4, 4), nn.ReLU())
    text = str(cl.diagnose(part, torch.rand(4, 4)).parts[0])
    assert "dead" in text
    assert "alpha" not in text
    assert "variance" not in text


def test_paths_are_listed_up_to_three() -> None:
    paths = ("a", "", "c", "d", "e")
    warning = HealthWarning("kind", paths, "seen", "why", "Remedy.")
    assert warning.path == "a, model, c and 2 more"
    assert warning.line == "a, model, c and 2 more: seen; why. Remedy."
    assert str(warning) == "a, model, c and 2 more: seen\n  why: why\n  remedy: Remedy."
