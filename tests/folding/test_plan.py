"""Plans: the choice of a strategy, and its explanation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.nn import bounds

pytestmark = pytest.mark.usefixtures("seeded")


def test_explain_is_what_it_was() -> None:
    model = nn.Sequential(
        cl.ConformalLayers(cl.Conv2d(1, 8, 3), cl.ReSPro(3.0), cl.Conv2d(8, 8, 3), cl.ReSPro(3.0)),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    text = str(cl.fold(model, (1, 8, 8)).explain())
    assert text == SNAPSHOT, text


SNAPSHOT = """\
0
  strategy  multiply-adds  constants  estimate for 64  note
----------  -------------  ---------  ---------------  ----
→ dense            4.74 k   18.5 KiB        0.0241 ms
  banded           4.74 k   18.5 KiB        0.0375 ms
  conv             7.24 k   20.9 KiB        0.0586 ms
  layers           13.1 k   7.53 KiB        0.0709 ms
dense: expected 2.9 times as fast as the layers
head: 2 following layers absorbed into the matrix"""


def test_explain_has_a_block_for_each_radial_stage() -> None:
    first, second = (
        (cl.Conv2d(3, 3, 1), cl.ReSPro(), cl.Conv2d(3, 3, 1), cl.ReSPro()) for _ in range(2)
    )
    biased = cl.Conv2d(3, 3, 3, bias=True), nn.ReLU()
    folded = cl.fold(cl.ConformalLayers(*first, *biased, *second), (3, 16, 16))
    assert list(folded.explain()) == ["stage 1", "stage 3"]


def test_a_named_strategy_is_used_where_it_applies() -> None:
    image = cl.Conv2d(2, 3, 3), cl.ReSPro(), cl.Flatten(), cl.Linear(108, 4)
    model = cl.ConformalLayers(*image, nn.ReLU(), cl.Linear(4, 4), cl.ReSPro())
    plans = cl.fold(model, (2, 8, 8), strategy="banded").explain()
    assert [plan.strategy for plan in plans.values()] == ["banded", "layers"]


def test_a_named_strategy_that_applies_nowhere_is_refused() -> None:
    radial = cl.Linear(4, 4), cl.ReSPro(), cl.Linear(4, 4)
    for layers in (radial, (*radial, nn.ReLU(), cl.Linear(4, 2))):
        with pytest.raises(cl.ConformalError, match="one where a sample has no image rows"):
            cl.fold(cl.ConformalLayers(*layers), (4,), strategy="banded")


def test_a_module_that_computes_something_else_is_no_plain_convolution() -> None:
    class Shifted(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            ramp = torch.linspace(0, 1, input.shape[-1] - 2, dtype=input.dtype)
            return super().forward(input) * ramp

    cl.register_linear(Shifted, bound=bounds.conv_bound)
    model = cl.ConformalLayers(
        Shifted(1, 8, 3, bias=False), cl.ReSPro(), cl.AvgPool2d(2), cl.ReSPro()
    )
    cl.testing.assert_folds(model, (1, 12, 12))
    with pytest.raises(
        cl.ConformalError, match="one where Shifted, the first layer, is not a conv"
    ):
        cl.fold(model, (1, 12, 12), strategy="conv")


def test_layers_with_branches_and_a_head_keep_their_numbers() -> None:
    torch.manual_seed(0)
    block = cl.Residual(cl.Conv2d(8, 8, 3, padding=1), cl.Gnomonic())
    part = cl.ConformalLayers(cl.Conv2d(2, 8, 3, padding=1), cl.Gnomonic(), block)
    head = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 1, 7, padding=3)
    model = nn.Sequential(part, *head)
    x = torch.rand(2, 2, 8, 8)
    for strategy in ("auto", "layers", "dense"):
        folded = cl.fold(model, (2, 8, 8), strategy=strategy)
        assert cl.fold_error(model, folded, x) <= 5e-6, strategy
