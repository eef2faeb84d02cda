"""The evaluation cache: it folds once, and notices whatever changes the model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import conformallayers as cl
from conformallayers import container
from conformallayers.recipe.torch.module import RecipeModule
from oracle import exact, oracle, randomise, relative_error
from support import samples

SHAPE = (2, 5, 5)
Model = Any
Made = list[RecipeModule]


class Times(nn.Module):
    """A linear layer whose factors are a plain tensor, and an array in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.factors, self.more = torch.tensor([1.0, 2.0, 3.0]), [np.array([1.0, 2.0])]
        self.unread = torch.tensor([float("nan")])

    def forward(self, input: Tensor) -> Tensor:
        return input * self.factors * float(self.more[0][0])


def small() -> Model:
    model = cl.ConformalLayers(
        *(cl.Conv2d(2, 3, 3), cl.ReSPro("learned"), nn.BatchNorm2d(3)),
        nn.Sequential(cl.Scale(), nn.Sequential(cl.Conv2d(3, 3, 2))),
        *(cl.ReSPro("spectral"), cl.Flatten(), cl.Linear(12, 4), cl.ReSPro(1.5)),
        offset="learned",
    )
    randomise(model, 1)
    model(samples(SHAPE, torch.float32))  # gives the spectral activation its norm
    return model.eval()


@pytest.fixture
def model() -> Model:
    return small()


@pytest.fixture
def x() -> Tensor:
    return samples(SHAPE, torch.float32)


def assert_true(model: Model, x: Tensor) -> Tensor:
    """Assert that evaluation without gradients gives the model's own numbers; return them."""
    with torch.no_grad():
        y = model(x)
    wanted = oracle(exact(model).eval(), x.double()).detach()
    assert relative_error(y, wanted) <= cl.testing.TOLERANCES[x.dtype]
    return y


def test_folds_once_for_each_shape_and_dtype(model: Model, x: Tensor, made: Made) -> None:
    model = model[:4].eval()  # takes images of any size
    for _ in range(3):
        for batch in (x, x[:1], torch.cat([x, x]), samples((2, 6, 7), torch.float32)):
            assert_true(model, batch)
    assert [fold.input_shape for fold in made] == [SHAPE, (2, 6, 7)]
    calls: list[Tensor] = []
    made[0].register_forward_hook(lambda module, arguments, output: calls.append(output))
    assert assert_true(model, x) is calls[0]
    assert_true(model.double(), x.double())
    assert len(made) == 3


def step(model: Model) -> None:
    x = samples(SHAPE, torch.float32, seed=9)
    model(x).sum().mul(50).backward()  # in eval()
    with torch.no_grad():
        model(x)  # folds after the gradients and before the step
    torch.optim.Adam(model.parameters(), lr=0.1, fused=True).step()


def train_on(model: Model) -> None:
    model.train()(3 + samples(SHAPE, torch.float32, seed=9))
    model.eval()


def move_first(model: Model) -> None:
    model[3]._modules["0"] = model[3]._modules.pop("0")
    model[3]._modules["1"].append(cl.Scale(2.0))


def assign(target: str, value: Callable[[], Any]) -> Callable[[Model], None]:
    path, name = target.rsplit(".", 1)
    return lambda model: setattr(model.get_submodule(path), name, value())


def weight() -> Tensor:
    return torch.rand(3, 2, 3, 3)


def other_state() -> dict[str, Tensor]:
    return randomise(small(), 7).state_dict()


# The whole state is compared, so it does not matter what writes to it.
CHANGES: dict[str, Callable[[Model], object]] = {
    "one entry through data": lambda m: m[6].weight.data[2, 7].fill_(9.0),
    "numpy": lambda m: m[0].weight.detach().numpy().__imul__(3),
    "an optimizer": step,
    "load_state_dict": lambda m: m.load_state_dict(other_state(), assign=True),
    "parameter in the table": lambda m: m[0]._parameters.update(weight=nn.Parameter(weight())),
    "offset": lambda m: setattr(m, "offset", 20.0),
    "unit": lambda m: setattr(m, "unit", "rms"),
    "spectral norm": lambda m: m[4].norm.mul_(2),
    "statistics": lambda m: m[2].running_mean.add_(3),
    "eps": assign("2.eps", lambda: 0.3),
    "append": lambda m: m.append(cl.ReSPro(0.5)),
    "delete": lambda m: m.__delitem__(-1),
    "nested item": lambda m: m[3][1].__setitem__(0, randomise(cl.Conv2d(3, 3, 2), 5)),
    "nested order": move_first,
    "alpha": assign("7.alpha", lambda: 4.0),
    "projective": assign("7.projective", lambda: True),
    "dilation": lambda m: (setattr(m[0], "dilation", (2, 2)), setattr(m[0], "padding", (1, 1))),
    "parametrisation": lambda m: parametrize.register_parametrization(m[0], "weight", nn.Tanh()),
    "pruning": lambda m: prune.l1_unstructured(m[0], "weight", 0.5),
    "hook": lambda m: m[3][0].register_forward_hook(lambda *values: 3 * values[-1]),
    "pre-hook": lambda m: m[0].register_forward_pre_hook(lambda _, values: (3 * values[0],)),
    "training": train_on,
}
BY_HOOKS = "pruning", "hook", "pre-hook"  # the layers run


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_noticed(name: str, model: Model, x: Tensor, made: Made) -> None:
    before = assert_true(model, x)
    CHANGES[name](model)
    with torch.no_grad(), cl.layer_by_layer():
        wanted = model(x)
    with torch.no_grad():
        after = model(x)
        folds = len(made)
        assert torch.equal(model(x), after)
    assert relative_error(after, wanted) <= 5e-6
    assert relative_error(after, before) > 1e-3, "the change must matter"
    assert folds == len(made)  # kept again
    assert folds >= 2 or name in BY_HOOKS


def test_values_that_are_no_parameters_are_compared(made: Made) -> None:
    cl.register_linear(Times, lambda module, shape: float(module.factors.abs().max()) * 10)
    model: Model = cl.ConformalLayers(Times(), cl.ReSPro(1.0)).eval()
    x = torch.tensor([[1.0, 2.0, -1.0]])
    changes = (
        lambda: model[0].factors.neg_(),
        lambda: setattr(model[0], "factors", torch.tensor(2.0)),
        lambda: model[0].more[0].__setitem__(0, 5.0),
        lambda: setattr(model[0], "unread", object()),
    )
    for count, change in enumerate(changes, 1):
        model(x), model(x)
        assert len(made) == count
        change()
        with cl.layer_by_layer():
            wanted = model(x)
        assert relative_error(model(x), wanted) <= 5e-6


def test_a_forward_of_an_instance_is_noticed(model: Model, x: Tensor) -> None:
    assert_true(model, x)
    model[3][0].forward = lambda value: -value
    with torch.no_grad(), pytest.raises(cl.ConformalError, match=r"position 3\.0"):
        model(x)


def test_inference_tensors(made: Made) -> None:
    with torch.inference_mode():
        model: Model = cl.ConformalLayers(cl.Linear(3, 2), cl.ReSPro()).eval()
        x = samples((3,), torch.float32)
        before = model(x)
        assert torch.equal(model(x), before)
        model[0].weight.mul_(torch.tensor([[1.0], [-2.0]]))
        after = model(x)
    assert relative_error(after, oracle(exact(model), x.double())) <= 5e-6
    assert relative_error(after, before) > 1e-3
    leaf = x.clone().requires_grad_()  # a fold made in inference mode serves outside it
    model.requires_grad_(False)(leaf).sum().backward()
    assert leaf.grad.any()
    assert len(made) == 2


def test_global_hooks_run(model: Model, x: Tensor) -> None:
    before = assert_true(model, x)
    calls: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: calls.append(m))
    try:
        with torch.no_grad():
            assert relative_error(model(x), before) <= 5e-6
    finally:
        handle.remove()
    assert {model[0], model[3][0], model[3][1][0], model[6]} <= set(calls)


def test_layers_in_training_mode_run(model: Model, x: Tensor) -> None:
    dropout: Model = cl.ConformalLayers(cl.Linear(32, 32), cl.Dropout(0.5), cl.ReSPro()).eval()
    with torch.no_grad():
        dropout(torch.ones(2, 32))
        dropout[1].train()
        assert not torch.equal(dropout(torch.ones(2, 32)), dropout(torch.ones(2, 32)))
        model(x)
        model[2].train()
        mean = model[2].running_mean.clone()
        model(x)
        assert not torch.equal(model[2].running_mean, mean)


def test_the_oldest_folds_are_dropped(
    model: Model, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (container.MOST_FOLDS, container.MOST_BYTES) == (32, 64 * 2**20)  # as documented
    model = model[:4].eval()
    inputs = {size: samples((2, size, size), torch.float32) for size in (5, 6, 7, 8)}
    monkeypatch.setattr(container, "MOST_FOLDS", 3)
    for size in (5, 6, 7, 5, 8, 6, 7, 8, 5):  # 8 drops 5
        assert_true(model, inputs[size])
    assert [fold.input_shape[1] for fold in made] == [5, 6, 7, 8, 5]
    monkeypatch.setattr(container, "MOST_BYTES", 1)  # the newest one is kept whatever its size
    for size in (6, 6, 7, 7, 7):
        assert_true(model, inputs[size])
    assert [fold.input_shape[1] for fold in made][5:] == [6, 7]


def test_training_frees_the_folds(model: Model, x: Tensor, made: Made) -> None:
    assert_true(model, x)
    model.train().eval()
    assert_true(model, x)
    assert len(made) == 2


def test_no_part_of_state_pickle_or_copies(model: Model, x: Tensor, made: Made) -> None:
    state, stored, text = list(model.state_dict()), len(pickle.dumps(model)), repr(model)
    assert_true(model, x)
    assert (list(model.state_dict()), len(pickle.dumps(model)), repr(model)) == (
        *(state, stored, text),
    )
    assert not any(isinstance(module, RecipeModule) for module in model.modules())
    for count, other in enumerate(
        (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))), 2
    ):
        assert_true(other, x)
        assert len(made) == count
    with torch.no_grad():
        other[0].weight.mul_(2)
    assert_true(other, x)
    assert_true(model, x)
    assert len(made) == 5


def test_threads_share_a_cache_while_weights_change(model: Model, x: Tensor, made: Made) -> None:
    def work(batch: Tensor) -> Tensor:
        with torch.no_grad():
            return model(batch)

    with ThreadPoolExecutor(8) as pool:
        for turn in range(4):
            with torch.no_grad():
                model[0].weight.data.mul_(torch.rand(3, 2, 3, 3))
            wanted = oracle(exact(model).eval(), x.double()).detach()
            for y in pool.map(work, [x] * 16):
                assert relative_error(y, wanted) <= 5e-6
            assert len(made) == turn + 1
