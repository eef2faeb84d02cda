"""cl.fold: its arguments, models with several parts, and the model it leaves alone."""

from __future__ import annotations

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import conformallayers as cl
from nets import POOLED_SHAPE, SHAPE, circular_net, conv_stack, pooled_net
from oracle import exact, exact_output, relative_error
from support import samples

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
    with cl.layer_by_layer():
        assert torch.equal(model.eval()(x), before.eval()(x))


def test_a_model_with_several_conformal_parts_folds_each() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = conv_stack(2, padding=1)
            self.second = cl.ConformalLayers(cl.Linear(20, 10), cl.ReSPro())
            self.middle = nn.Linear(6 * 64, 20)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = torch.relu(self.middle(self.first(x).flatten(1)))
            return self.second(features) + features[:, :10]

    model = Two()
    folded = cl.fold(model, (3, 8, 8))
    assert set(folded.explain()) == {"first", "second"}
    x = torch.rand(4, 3, 8, 8)
    assert cl.fold_error(model, folded, x) < cl.testing.TOLERANCES[torch.float32]


@pytest.fixture
def x() -> Tensor:
    return samples(POOLED_SHAPE, torch.float32, batch=5).abs()


@pytest.mark.parametrize("training", [True, False])
def test_fold_leaves_the_model_alone(training: bool, x: Tensor) -> None:
    model = nn.Sequential(pooled_net("spectral"), nn.Dropout(0.5), nn.Linear(4, 2)).train(training)
    before = {
        name: (t, t._version, t.clone()) for name, t in model.state_dict(keep_vars=True).items()
    }
    modules = list(model.modules())
    folded = cl.fold(model, POOLED_SHAPE)
    assert list(model.modules()) == modules
    assert all(module.training == training for module in modules)
    for name, tensor in model.state_dict(keep_vars=True).items():
        same, version, value = before[name]
        assert tensor is same
        assert tensor._version == version
        assert torch.equal(tensor, value)
    wanted = exact(model[2])(exact_output(model[0], x))  # evaluation semantics whatever the mode
    assert relative_error(folded(x), wanted) <= 5e-6
    shared = {t.data_ptr() for t in model.state_dict().values()}
    assert not shared & {t.data_ptr() for t in folded.buffers() if t.numel()}


def inputs(batch: int = 5, seed: int = 0) -> Tensor:
    return samples(SHAPE, torch.float32, batch, seed).abs()


def test_fold_to_another_dtype() -> None:
    model = circular_net()
    for dtype in (torch.float64, torch.float16):
        folded = cl.fold(model, SHAPE, dtype=dtype)
        assert folded.dtype == dtype
        x = inputs().to(dtype)
        assert relative_error(folded(x), exact_output(model, x)) <= cl.testing.TOLERANCES[dtype]


def test_refusals_of_odd_arguments() -> None:
    model = conv_stack(2, channels=8, padding=1)
    folded = cl.fold(model, (3, 8, 8))
    x = torch.rand(2, 3, 8, 8)
    for act, text in (
        (lambda: cl.fold(model, x), "got a Tensor"),
        (lambda: folded(None), "a tensor, got NoneType"),
        (lambda: folded(x.to("meta")), "an input on cpu"),
        (lambda: model(x.numpy()), "torch.as_tensor"),
        (lambda: cl.ReSPro(3.0)(torch.rand(3)), "a batch of points"),
    ):
        with pytest.raises(cl.ConformalError, match=text):
            act()


def test_messages_of_common_mistakes() -> None:
    model = conv_stack(4, channels=4, inputs=1, padding=1)
    with pytest.raises(cl.ConformalError, match="Leave the batch axis out"):
        cl.fold(model, (4, 1, 10, 10))
    with pytest.raises(cl.ConformalError, match=r"torch\.dtype"):
        cl.fold(model, (1, 10, 10), dtype="float64")
    folded = cl.fold(model, (1, 10, 10))
    with pytest.raises(cl.ConformalError, match="The order is fold_error"):
        cl.fold_error(folded, model, torch.rand(2, 1, 10, 10))
