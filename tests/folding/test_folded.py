"""The module that a fold returns."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import conformallayers as cl
from models import Generator
from nets import POOLED_SHAPE, pooled_net
from support import error_of_all, folds, samples


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


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_other_sizes_give_the_numbers_of_the_model_or_are_refused(seed: int) -> None:
    model, shape = Generator(seed).plain()
    folded = cl.fold(model, shape)
    x = torch.randn(2, shape[0], *(n + 3 for n in shape[1:]), dtype=torch.float64)
    takes, expected = "other spatial sizes" in str(folded.explain()), None
    with torch.no_grad(), contextlib.suppress(RuntimeError):  # a linear layer of another size
        expected = model(x)
    assume(expected is None or bool(expected.isfinite().all()))
    message, found = "", x
    try:
        found = folded(x)
    except cl.ConformalError as error:
        message = str(error)
    if message:
        assert "Fold again for this shape" in message
        assert expected is None or not takes
    else:  # strides may give maps of the same size
        assert expected is not None
        assert error_of_all(found, expected) < 1e-10


class ReadsSize(nn.Module):
    """Cut a value at a place that is computed from a size which a layer has made."""

    def forward(self, x: Tensor) -> Tensor:
        z = nn.functional.interpolate(x, scale_factor=1.3, mode="bilinear")
        return z[..., : z.shape[-1] - 1 + 1]


class FirstMap(nn.Module):
    """Take the first map out of a tuple of them."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unbind(1)[0]


FOLLOWING: list[tuple[nn.Module, bool]] = [
    (nn.AdaptiveMaxPool2d((4, None)), False),
    (ReadsSize(), True),
    (FirstMap(), True),
    (nn.Sequential(FirstMap(), nn.Unflatten(1, (1, 5))), False),
    (nn.LayerNorm(5), False),
    # A pooling of one pixel, which merges into a factor.
    (
        nn.Sequential(nn.Conv2d(2, 2, 5), nn.ReLU(), nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(1)),
        False,
    ),
]


@pytest.mark.parametrize(("layer", "follows"), FOLLOWING)
def test_explain_says_whether_other_sizes_are_right_or_refused(
    layer: nn.Module, follows: bool
) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), layer).eval()
    folded, x = cl.fold(model, (2, 7, 7)), torch.randn(1, 2, 9, 9)
    assert ("other spatial sizes" in str(folded.explain())) == follows
    if follows:
        with torch.no_grad():
            assert error_of_all(folded(x), model(x)) < 1e-6
    else:
        with pytest.raises(cl.ConformalError, match="Fold again for this shape"):
            folded(x)


def test_explain_prints_nothing_by_itself(capfd: pytest.CaptureFixture[str]) -> None:
    class Largest(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.maximum(x, torch.zeros(7, 7))

    assert "(2, 7, 7) only" in str(cl.fold(Largest(), (2, 7, 7)).explain())
    assert capfd.readouterr() == ("", "")


def test_other_channels_are_refused() -> None:
    folded = cl.fold(nn.Conv2d(3, 2, 3), (3, 8, 8))
    assert folded(torch.rand(1, 3, 9, 9)).shape == (1, 2, 7, 7)
    with pytest.raises(
        cl.ConformalError, match=r"shape \(2, 1, 8, 8\)\. Give samples of that shape"
    ):
        folded(torch.rand(2, 1, 8, 8))
