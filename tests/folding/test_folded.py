"""The module that a fold returns."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from nets import POOLED_SHAPE, pooled_net
from support import folds, samples


@pytest.fixture
def x() -> Tensor:
    return samples(POOLED_SHAPE, torch.float32, batch=5).abs()


def test_folded_has_buffers_alone_and_one_mode(x: Tensor) -> None:
    for folded in folds(
        nn.Sequential(pooled_net(), nn.Dropout(0.5), nn.Linear(4, 2)), POOLED_SHAPE
    ).values():
        assert list(folded.parameters()) == []
        assert sum(b.numel() for b in folded.buffers()) > 0
        y = folded(x)
        assert folded.train() is folded
        assert not any(module.training for module in folded.modules())
        assert torch.equal(folded(x), y)
        for copied in (
            copy.deepcopy(folded),
            pickle.loads(pickle.dumps(folded)),
            folded.share_memory(),
        ):
            assert torch.equal(copied(x), y)
