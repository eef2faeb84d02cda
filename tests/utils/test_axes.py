"""Sizes per axis, against the pooling of torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from conformallayers.utils.axes import windows


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_windows_are_counted_as_by_torch(ceil_mode: bool) -> None:
    for n, kernel, stride, padding in itertools.product(range(3, 9), (1, 2, 3), (1, 2, 4), (0, 1)):
        if padding <= kernel // 2:
            pool = nn.AvgPool1d(kernel, stride, padding, ceil_mode)
            expected = pool(torch.zeros(1, 1, n)).shape[-1]
            assert windows(n, kernel, stride, padding, ceil_mode) == expected
