"""Formulas that numpy and torch share, against sums written out by hand."""

from __future__ import annotations

import numpy as np
import torch

from conformallayers.recipe.arithmetic import along, coordinate_behind, energy_of_parts
from conformallayers.recipe.point_operations import Grow

OP = Grow(
    ("m", "tau", "dots", "n_1", "n_2", "n_3", "g_1", "g_2"),
    ("g",),
    rule="published",
    linear=((), (0,)),
    constant_parts=((1,),),
    coordinate=(0, 1),
    gram="gram",
)


def test_the_energy_of_a_sum_of_parts() -> None:
    """The second sample is zero: its parts have no coefficients."""
    dots = np.array([[0.5, -0.25], [0.5, -0.25]])
    forms, growths = [np.array([n, n]) for n in (2.0, 3.0, 5.0)], [np.full(2, 2.0), np.full(2, 4.0)]
    inverse, alive, gram = np.array([0.5, 0.0]), np.array([1.0, 0.0]), np.array([[7.0]])
    values = [dots, *forms, *growths]
    k, other, c = 0.5, 0.25, 0.25  # 1/τ, over the first growth; 1 over the second
    linear = k * k * 2.0 + 2 * k * other * 3.0 + other * other * 5.0
    expected = linear + c * c * 7.0 + 2 * c * (k * 0.5 - other * 0.25)
    found = energy_of_parts(OP, values, inverse, alive, gram, np.stack)
    assert found.tolist() == [expected, 0.0]
    tensors = [torch.from_numpy(value) for value in values]
    scalars = [torch.from_numpy(value) for value in (inverse, alive, gram)]
    assert energy_of_parts(OP, tensors, *scalars, torch.stack).tolist() == found.tolist()


def test_coordinates_stay_finite() -> None:
    growths = [np.array([2.0, 1e200]), np.array([4.0, 1e200])]
    with np.errstate(all="ignore"):  # as networks of numpy run
        assert coordinate_behind(OP, np.array([3.0, 1.0]), growths).tolist() == [24.0, 1.7e308]
        assert along((0, 1), np.array([8.0, 1.0]), growths).tolist() == [1.0, 0.0]
