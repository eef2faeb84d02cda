"""Fingerprints: those of the numbers, however they lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conformallayers.utils.fingerprint import fingerprint


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_numbers_have_one_fingerprint(dtype: torch.dtype) -> None:
    numbers = torch.arange(12.0, dtype=dtype).view(3, 4)
    for view in (numbers.T, numbers[:, ::2], numbers[:1, 1:2], numbers.view(-1)[::4][:1]):
        found = set()
        for held in (view, view.clone(memory_format=torch.contiguous_format)):
            model = nn.Module()
            model.weight = nn.Parameter(held)
            found.add(fingerprint(model))
        assert len(found) == 1
    assert fingerprint(model) != fingerprint(model.double().half())
