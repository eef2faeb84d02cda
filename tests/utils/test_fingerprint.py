"""Fingerprints: the bytes of tensors, however they lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformallayers.utils.fingerprint import tensor_bytes

LAYOUTS = {
    "transposed": torch.arange(6.0).view(2, 3).T,
    "every other": torch.arange(6.0)[::2],
    "one element of a column": torch.arange(12.0).view(3, 4)[:1, 1:2],
    "one element with a stride of its own": torch.arange(12.0)[::4][:1],
    "none": torch.empty(0, 3),
}


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_rows(tensor: Tensor, dtype: torch.dtype) -> None:
    expected = torch.tensor(tensor.tolist(), dtype=dtype).view(tensor.shape)
    assert bytes(tensor_bytes(tensor.to(dtype))) == bytes(
        expected.view(-1).view(torch.uint8).tolist()
    )
