"""cl.fold: its arguments, its choice, the layers that it absorbs, and the model that it leaves alone."""

from __future__ import annotations

import copy
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import conformallayers as cl
from blocks import Written
from conformallayers.folding.fold import fingerprint
from conformallayers.recipe.layer_operations import Pad
from nets import conv_stack
from oracle import oracle, randomise
from support import operations, samples

pytestmark = pytest.mark.usefixtures("seeded")


@settings(max_examples=25, deadline=None)
@given(
    depth=st.integers(1, 3),
    alpha=st.sampled_from(["young", "spectral", "learned", 2.5]),
    projective=st.booleans(),
    training=st.booleans(),
    double=st.booleans(),
    strategy=st.sampled_from(["auto", "dense", "banded", "conv", "layers"]),
)
def test_folding_never_changes_the_model(
    depth: int,
    alpha: str | float,
    projective: bool,
    training: bool,
    double: bool,
    strategy: str,
) -> None:
    torch.manual_seed(depth)
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [cl.Conv2d(4 if index else 2, 4, 3, padding=1), cl.Dropout(0.3)]
        layers.append(cl.ReSPro(alpha, projective=projective))
    model = nn.Sequential(cl.ConformalLayers(*layers), nn.Flatten(), nn.Linear(4 * 36, 3))
    model = (model.double() if double else model).train(training)
    x = torch.rand(3, 2, 6, 6, dtype=torch.float64 if double else torch.float32)
    before = copy.deepcopy(model)
    versions = {name: tensor._version for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    folded = cl.fold(model, (2, 6, 6), strategy=strategy)
    folded(x)
    assert torch.equal(random, torch.get_rng_state())
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert [p.requires_grad for p in model.parameters()] == [True] * len(list(before.parameters()))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before.state_dict()[name])
        assert tensor._version == versions[name]
    shared = {t.data_ptr() for t in model.state_dict().values()}
    assert not shared & {t.data_ptr() for t in folded.buffers() if t.numel()}
    with cl.layer_by_layer():
        assert torch.equal(model.eval()(x), before.eval()(x))


def test_a_model_with_several_conformal_parts_folds_each() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        features = torch.relu(m.middle(m.first(x).flatten(1)))
        return m.second(features) + features[:, :10]

    second = cl.ConformalLayers(cl.Linear(20, 10), cl.ReSPro())
    parts = {"first": conv_stack(2, padding=1), "second": second}
    model = Written(forward, middle=nn.Linear(6 * 64, 20), **parts)
    folded = cl.fold(model, (3, 8, 8))
    assert set(folded.explain()) == {"first", "second"}
    x = torch.rand(4, 3, 8, 8)
    assert cl.fold_error(model, folded, x) < cl.testing.TOLERANCES[torch.float32]


def test_refusals_of_odd_arguments() -> None:
    model = conv_stack(2, channels=8, padding=1)
    folded = cl.fold(model, (3, 8, 8))
    x = torch.rand(2, 3, 8, 8)
    for act, text in (
        (lambda: cl.fold(model, x), "got a Tensor"),
        (lambda: cl.fold(model, (4, 3, 8, 8)), "Leave the batch axis out"),
        (lambda: cl.fold_error(folded, model, x), "The order is fold_error"),
        (lambda: folded(None), "a tensor, got NoneType"),
        (lambda: folded(x.to("meta")), "an input on cpu"),
        (lambda: model(x.numpy()), "torch.as_tensor"),
        (lambda: cl.ReSPro(3.0)(torch.rand(3)), "a batch of points"),
    ):
        with pytest.raises(cl.ConformalError, match=text):
            act()


def test_a_tail_that_is_not_linear_is_not_absorbed() -> None:
    model = nn.Sequential(
        cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro()),
        nn.ConstantPad2d(1, 5.0),
        nn.Flatten(),
        nn.Linear(128, 100),
    )
    for name in ("auto", "dense", "banded", "conv", "layers"):
        cl.testing.assert_folds(model, (1, 8, 8), strategy=name)


@pytest.mark.parametrize("strategy", ["auto", "layers"])
def test_a_part_with_a_bias_of_nan_is_refused_by_its_path(strategy: str) -> None:
    model = nn.Sequential(cl.ConformalLayers(cl.ReSPro(1.0), nn.Linear(4, 2)))
    model.get_parameter("0.1.bias").data[1] = torch.nan
    with pytest.raises(cl.ConformalError, match=r"at 0: .* torch.float32 .* NaN .* Check its w"):
        cl.fold(model, (4,), strategy=strategy)


@pytest.mark.parametrize("name", ["2.weight", "2.bias"])
def test_a_layer_with_nan_is_not_absorbed(name: str) -> None:
    part = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro())
    model = nn.Sequential(part, nn.Flatten(), nn.Linear(144, 3)).eval()
    model.get_parameter(name).data[1] = torch.nan
    x = torch.rand(2, 1, 8, 8)
    with torch.no_grad():
        y, expected = cl.fold(model, (1, 8, 8))(x), model(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_container_with_its_own_forward_is_refused() -> None:
    class Doubled(cl.ConformalLayers):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    with pytest.raises(cl.ConformalError, match="Doubled, which overrides it"):
        cl.fold(Doubled(cl.Linear(4, 3), cl.ReSPro()), (4,))


def test_only_what_keeps_the_norm_folds_before_the_part() -> None:
    shape = (1, 6, 6)
    inner = cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro())
    for before in (nn.ReflectionPad2d(1), nn.ConstantPad2d(1, 2.0)):
        model = randomise(nn.Sequential(before, inner))
        folded = cl.fold(model, shape)
        assert operations(folded, Pad), "the pad is gone"
        assert cl.fold_error(model, folded, samples(shape, torch.float32)) <= 5e-6


CANCELLING = (2, 20, 20)


def cancelling(kernel: int = 1) -> cl.ConformalLayers:
    """Return layers whose second convolution cancels most of what the first one gives.

    In float32 the map between them has lost the digits that are left; M in float64 has not.
    """
    torch.manual_seed(0)
    first = cl.Conv2d(2, 16, kernel, padding=kernel // 2)
    second = cl.Conv2d(16, 2, 3, padding=1, padding_mode="reflect")
    with torch.no_grad():
        a = first.weight[:, :, kernel // 2, kernel // 2].double()
        first.weight.zero_()
        first.weight[:, :, kernel // 2, kernel // 2] = a.float()
        inverse = torch.linalg.pinv(a)
        null = torch.eye(16).double() - a @ inverse
        centre = torch.randn(2, 16).double() @ null * 1e3 + torch.randn(2, 2).double() @ inverse
        second.weight.zero_()
        second.weight[:, :, 1, 1] = centre.float()
    return cl.ConformalLayers(first, cl.ReSPro(), second, cl.ReSPro())


def test_auto_leaves_out_what_is_not_accurate() -> None:
    model, x = cancelling(), torch.rand(4, *CANCELLING)
    assert cl.fold_error(model, cl.fold(model, CANCELLING, strategy="layers"), x) > 1e-4
    folded = cl.fold(model, CANCELLING)
    assert folded.explain()[""].reason == "layers is not accurate enough"
    assert cl.fold_error(model, folded, x) < 5e-6
    cl.testing.assert_folds(model, CANCELLING)


def test_without_an_accurate_strategy_the_first_choice_stays() -> None:
    model = cancelling(kernel=3)
    shape = (2, 100, 100)  # nothing else can be composed or written out
    assert cl.fold(model, shape).strategy == "layers"


@torch.no_grad()
@pytest.mark.parametrize("strategy", ["auto", "layers", "conv", "dense"])
@pytest.mark.parametrize("size", [1.0, 1e6])
@pytest.mark.parametrize("bias", [False, True])
def test_tiny_points_after_a_published_activation_keep_their_squares(
    bias: bool, size: float, strategy: str
) -> None:
    # t of the first activation is of the size of ‖x‖², so the points are of the size of 1/‖x‖.
    torch.manual_seed(0)
    block = cl.Parallel(
        nn.Sequential(cl.Conv2d(2, 2, 1), cl.ReSPro(1.0), cl.Abs()), cl.Conv2d(2, 2, 1)
    )
    layers = cl.Conv2d(2, 3, 1, bias=True) if bias else block
    model = cl.ConformalLayers(
        *(cl.Conv2d(2, 2, 1), cl.ReSPro(1.0), cl.Abs()),
        *(layers, cl.Abs(), cl.Conv2d(3 if bias else 2, 2, 1), cl.ReSPro(1.0)),
    )
    if bias:
        nn.init.zeros_(model[3].bias)
    model[-2].weight.mul_(size)
    x = torch.rand(3, 2, 4, 4) * torch.tensor([1.0, 1e6, 1e12]).view(-1, 1, 1, 1)
    expected = oracle(copy.deepcopy(model).double(), x.double())
    result = cl.fold(model, (2, 4, 4), strategy=strategy)(x)
    error = (result - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert float(error.max()) < 5e-6


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


def kinds(folded: cl.Folded) -> list[str]:
    return [operation.kind for operation in folded.recipe.operations]


def test_models_on_meta_are_refused() -> None:
    with pytest.raises(cl.ConformalError, match="a model with values, got one on meta"):
        cl.fold(nn.Linear(2, 2, device="meta"), (2,))


def test_a_fold_inside_a_model_becomes_part_of_its_fold() -> None:
    part = cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro(), cl.Conv2d(2, 2, 1))
    net = nn.Sequential(randomise(part, 1), nn.ReLU(), nn.Conv2d(2, 3, 1))
    model = nn.Sequential(cl.fold(net, (1, 6, 6)), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Softmax(1))
    folded, x = cl.fold(model, (1, 6, 6)), samples((1, 6, 6), torch.float32)
    assert "call" not in kinds(folded)
    assert list(folded.plans) == ["0 0"]
    torch.testing.assert_close(folded(x), model(x))
    small = cl.quantize(model[0], torch.rand(8, 1, 6, 6))
    assert kinds(cl.fold(nn.Sequential(small), (1, 6, 6))) == ["call"]  # integers stay integers


def test_explain_names_layers_and_those_that_only_torch_has() -> None:
    layers = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1)
    model = nn.Sequential(nn.Sequential(*layers), nn.Conv2d(4, 2, 3))
    explained = cl.fold(model, (2, 8, 8)).explain()
    assert [region.start for region in explained.regions] == ["0.0", "0.3"]
    assert "ONNX, C and int8 refuse: GroupNorm at 0.2." in str(explained)
    whole = cl.fold(
        cl.ConformalLayers(cl.Conv2d(2, 4, 3), nn.ReLU(), cl.Conv2d(4, 4, 3)), (2, 8, 8)
    )
    assert {region.start for region in whole.explain().regions} == {""}
