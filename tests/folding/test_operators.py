"""One linear layer: its multiply-adds and its norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.folding.operators import Operator

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("kernel", [3, (3,), (3, 3)])
def test_multiply_adds_of_windows_count_every_axis(kernel: int | tuple[int, ...]) -> None:
    operator = Operator(nn.AvgPool2d(kernel), (2, 6, 6), (2, 2, 2))
    assert operator.multiply_adds() == 2 * 2 * 2 * 9


def test_the_operator_norm_is_a_bound_and_a_close_one() -> None:
    for weight_shape in ((5, 3, 3, 3), (3, 6, 5, 1), (4, 4, 2, 3)):
        conv = (
            cl.Conv2d(weight_shape[1], weight_shape[0], weight_shape[2:], padding=1)
            .double()
            .requires_grad_(False)
        )
        nn.init.normal_(conv.weight)
        shape = (weight_shape[1], 9, 9)
        size = math.prod(shape)
        columns = conv(torch.eye(size, dtype=torch.float64).view(size, *shape)).flatten(1).detach()
        out = tuple(conv(torch.zeros(1, *shape).double()).shape[1:])
        bound = Operator(conv, shape, out).norm
        true = float(torch.linalg.matrix_norm(columns, 2))
        assert true <= bound <= 1.5 * true
