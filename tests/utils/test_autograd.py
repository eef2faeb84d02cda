"""Functions of autograd, applied with and without transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conformallayers.utils.autograd import apply


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, times: float) -> Tensor:
        return x * times

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.times = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.times, None


def test_applies_with_a_gradient_in_eager_mode_and_in_transforms() -> None:
    x = torch.arange(3.0, requires_grad=True)
    y = apply(Doubled, x, 2.0)
    assert torch.equal(y, Doubled.apply(x, 2.0))
    assert "Doubled" in type(y.grad_fn).__name__
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [2.0] * 3
    assert (
        torch.func.jacrev(lambda x: apply(Doubled, x, 2.0))(x.detach()).diag().tolist() == [2.0] * 3
    )
    assert torch.func.vmap(lambda x: apply(Doubled, x, 3.0))(x).tolist() == [0.0, 3.0, 6.0]


def test_applies_to_what_a_transform_has_left_behind() -> None:
    kept = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(torch.ones(2))
    assert (apply(Doubled, kept[0], 2.0) + 0).tolist() == [2.0, 2.0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_applies_in_a_compiled_graph() -> None:
    compiled = torch.compile(lambda x: apply(Doubled, x, 2.0) + 1, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2, requires_grad=True)).tolist() == [3.0, 3.0]
