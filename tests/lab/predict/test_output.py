"""Predictions as text."""

from __future__ import annotations

import os

import numpy as np

from conformallayers.lab.predict.output import likeliest, printable


def test_equal_scores_keep_the_order_of_the_classes() -> None:
    found = likeliest("x", np.array([1.0, 3.0, 3.0, 1.0]), 3, str)
    assert [choice.index for choice in found.choices] == [1, 2, 0]
    huge = likeliest("x", np.array([1e30, -1e30], np.float32), 2, str)
    assert [choice.probability for choice in huge.choices] == [1.0, 0.0]


def test_names_that_are_no_text_are_printable() -> None:
    assert printable(os.fsdecode(b"\xff.png")) == "\\udcff.png"
