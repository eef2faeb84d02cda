"""The evaluation cache: it folds once, and notices whatever changes the model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import conformallayers as cl
from conformallayers.folding import cache
from conformallayers.recipe.torch.module import RecipeModule
from oracle import exact, oracle, randomise, relative_error
from support import samples

SHAPE = (2, 5, 5)
Model = cl.ConformalLayers
Made = list[RecipeModule]


def small() -> Model:
    model = cl.ConformalLayers(
        cl.Conv2d(2, 3, 3),
        cl.ReSPro("learned"),
        nn.Sequential(cl.Scale(), nn.Sequential(cl.Conv2d(3, 3, 2))),
        cl.ReSPro("spectral"),
        cl.Flatten(),
        cl.Linear(12, 4),
        cl.ReSPro(1.5),
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


# -- what is kept -----------------------------------------------------------------------------


def test_folds_once_for_each_shape(model: Model, x: Tensor, made: Made) -> None:
    model = model[:4].eval()  # takes images of any size
    larger = samples((2, 6, 7), torch.float32)
    for _ in range(3):
        assert_true(model, x)
        assert_true(model, x[:1])
        assert_true(model, torch.cat([x, x]))
        assert_true(model, larger)
    assert len(made) == 2
    assert [fold.input_shape for fold in made] == [SHAPE, (2, 6, 7)]


def test_the_cached_fold_is_what_runs(model: Model, x: Tensor, made: Made) -> None:
    assert_true(model, x)
    calls: list[Tensor] = []
    made[0].register_forward_hook(lambda module, arguments, output: calls.append(output))
    with torch.no_grad():
        y = model(x)
    assert len(calls) == 1
    assert y is calls[0]


def test_training_and_lost_gradients_do_not_fold(model: Model, x: Tensor, made: Made) -> None:
    model(x)  # gradients are enabled and parameters trainable
    with torch.no_grad():
        model.train()(x)
        with cl.layer_by_layer():
            model.eval()(x)
    assert made == []


def test_evaluation_keeps_gradients_to_parameters(model: Model, x: Tensor, made: Made) -> None:
    assert_true(model, x)  # a fold is there, and must not be used
    twin = exact(model)
    wanted = torch.autograd.grad(oracle(twin, x.double()).square().sum(), twin.parameters())
    model(x).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad.double(), gradient, rtol=1e-4, atol=1e-6)
    model.requires_grad_(False)
    model[5].weight.requires_grad_(True)  # one is enough
    assert model(x).requires_grad
    assert len(made) == 1


def test_frozen_parameters_fold_and_pass_gradients_on(model: Model, x: Tensor, made: Made) -> None:
    model.requires_grad_(False)
    x.requires_grad_()
    wide = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(oracle(exact(model), wide).square().sum(), wide)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
    assert torch.allclose(gradient.double(), wanted, rtol=1e-4, atol=1e-6)
    model.requires_grad_(True)
    assert_true(model, x.detach())
    assert len(made) == 1  # whether they are trainable changes no number


# -- what drops it ----------------------------------------------------------------------------


def step(optimiser: type[torch.optim.Optimizer], **options: object) -> Callable[[Model], None]:
    def action(model: Model) -> None:
        model(samples(SHAPE, torch.float32, seed=9)).sum().mul(50).backward()  # in eval()
        optimiser(model.parameters(), lr=0.1, **options).step()

    return action


def in_place(model: Model) -> None:
    with torch.no_grad():
        model[0].weight.mul_(torch.rand_like(model[0].weight))


def train_on(model: Model) -> None:
    model.train()
    with torch.no_grad():
        model[0].weight.add_(1)
    model(samples(SHAPE, torch.float32, seed=9))
    model.eval()


def nested_item(model: Model) -> None:
    model[2][1][0] = randomise(cl.Conv2d(3, 3, 2), 5)


def nested_attribute(model: Model) -> None:
    model[2][0].gain = nn.Parameter(torch.tensor(3.0))
    model[1].alpha = 0.7


def replace_first(model: Model) -> None:
    model[0] = randomise(cl.Conv2d(2, 3, 3), 6)


def delete_last(model: Model) -> None:
    del model[-1]


CHANGES: dict[str, Callable[[Model], object]] = {
    "in place": in_place,
    "SGD": step(torch.optim.SGD),
    "Adam": step(torch.optim.Adam),
    "Adam foreach": step(torch.optim.Adam, foreach=True),
    "Adam fused": step(torch.optim.Adam, fused=True),
    "load_state_dict": lambda m: m.load_state_dict(randomise(small(), 7).state_dict()),
    "load_state_dict assign": lambda m: m.load_state_dict(
        randomise(small(), 7).state_dict(), assign=True
    ),
    "data": lambda m: setattr(m[0].weight, "data", torch.rand(3, 2, 3, 3)),
    "parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.rand(3, 2, 3, 3))),
    "spectral norm": lambda m: m[3].norm.mul_(2),
    "gain": lambda m: nn.init.constant_(m[2][0].gain, 2.0),
    "reset_parameters": lambda m: m[5].reset_parameters(),
    "apply": lambda m: m.apply(
        lambda c: nn.init.normal_(c.weight) if hasattr(c, "weight") else None
    ),
    "append": lambda m: m.append(cl.ReSPro(0.5)),
    "extend": lambda m: m.extend([cl.ReSPro(0.5)]),
    "insert": lambda m: m.insert(1, cl.ReSPro(0.5)),
    "pop": lambda m: m.pop(-1),
    "delete": delete_last,
    "item": replace_first,
    "nested append": lambda m: m[2][1].append(cl.ReSPro(0.5)),
    "nested item": nested_item,
    "nested attribute": nested_attribute,
    "alpha": lambda m: setattr(m[6], "alpha", 4.0),
    "projective": lambda m: setattr(m[6], "projective", True),
    "parametrisation": lambda m: parametrize.register_parametrization(m[0], "weight", nn.Tanh()),
    "pruning": lambda m: prune.l1_unstructured(m[0], "weight", 0.5),
    "training": train_on,
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_every_change_is_noticed(name: str, model: Model, x: Tensor, made: Made) -> None:
    before = assert_true(model, x)
    CHANGES[name](model)
    after = assert_true(model, x) if name != "pruning" else model(x)
    assert relative_error(after, before) > 1e-3, "the change must matter, or the test shows nothing"
    with torch.no_grad():
        assert relative_error(model(x), after) <= 5e-6
        model(x)
    assert len(made) == (1 if name == "pruning" else 2)  # a hook computes pruned weights


# -- changes that leave no version behind -----------------------------------------------------


def fused_step(optimiser: type[torch.optim.Optimizer]) -> Callable[[Model], None]:
    def action(model: Model) -> None:
        x = samples(SHAPE, torch.float32, seed=9)
        model(x).sum().mul(50).backward()
        with torch.no_grad():
            model(x)  # folds after the gradients and before the step
        optimiser(model.parameters(), lr=0.1, fused=True).step()

    return action


def write_numpy(model: Model) -> None:
    model[0].weight.detach().numpy()[:] *= 3


def write_dlpack(model: Model) -> None:
    torch.from_dlpack(model[0].weight.detach()).neg_()


def vector_twice(model: Model) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    assert_true(model, samples(SHAPE, torch.float32))
    vector *= torch.linspace(0.5, 2, len(vector))


SILENT: dict[str, Callable[[Model], object]] = {
    "fused SGD": fused_step(torch.optim.SGD),
    "fused Adam": fused_step(torch.optim.Adam),
    "fused AdamW": fused_step(torch.optim.AdamW),
    "fused Adagrad": fused_step(torch.optim.Adagrad),
    "numpy": write_numpy,
    "dlpack": write_dlpack,
    "data": lambda m: m[0].weight.data.mul_(torch.rand(3, 2, 3, 3)),
    "vector_to_parameters": vector_twice,
}


@pytest.mark.parametrize("name", list(SILENT))
def test_changes_without_a_version_are_noticed(name: str, model: Model, x: Tensor) -> None:
    before = assert_true(model, x)
    SILENT[name](model)
    after = assert_true(model, x)
    assert relative_error(after, before) > 1e-3, "the change must matter, or the test shows nothing"


def test_a_fused_step_of_a_large_layer_is_noticed() -> None:
    model = randomise(cl.ConformalLayers(cl.Linear(300, 400), cl.ReSPro("learned")), 3).eval()
    x = samples((300,), torch.float32)
    before = assert_true(model, x)
    model(x).square().sum().mul(50).backward()
    assert_true(model, x)
    torch.optim.Adam(model.parameters(), lr=0.1, fused=True).step()
    assert relative_error(assert_true(model, x), before) > 1e-3


def test_a_fused_step_is_noticed_where_reading_waits(
    model: Model, x: Tensor, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other devices tensors are compared only after the step of an optimiser."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    before = assert_true(model, x)
    bits = cache._bits
    reads: list[object] = []
    monkeypatch.setattr(cache, "_bits", lambda probes: reads.append(probes) or bits(probes))
    for _ in range(3):
        assert_true(model, x)
    assert reads == []
    SILENT["fused Adam"](model)
    assert relative_error(assert_true(model, x), before) > 1e-3
    count = len(reads)
    assert count > 0
    assert_true(model, x)
    assert len(reads) == count


def test_a_child_of_a_nested_sequential_moved_to_the_end_is_noticed() -> None:
    inner = nn.Sequential(cl.Linear(4, 4, bias=True), cl.ReSPro(0.5), cl.Linear(4, 4))
    model = randomise(cl.ConformalLayers(inner, cl.ReSPro(1.0)), 2).eval()
    x = samples((4,), torch.float32)
    before = assert_true(model, x)
    inner._modules["0"] = inner._modules.pop("0")
    assert relative_error(assert_true(model, x), before) > 1e-3


def test_settings_of_layers_are_noticed() -> None:
    model = cl.ConformalLayers(
        cl.Conv2d(2, 3, 3), nn.BatchNorm2d(3), cl.ReSPro(1.0), cl.AvgPool2d(2), nn.Upsample(size=4)
    )
    randomise(model, 1).eval()
    x = samples((2, 7, 7), torch.float32)
    before = assert_true(model, x)
    for layer, name, value in (
        (model[0], "padding", (1, 1)),
        (model[1], "eps", 0.1),
        (model[2], "alpha", 0.3),
        (model[4], "mode", "bilinear"),
        (model[3], "stride", 1),
    ):
        setattr(layer, name, value)
        after = assert_true(model, x)
        assert relative_error(after, before) > 1e-3, name
        before = after


def test_a_forward_of_an_instance_is_noticed(model: Model, x: Tensor) -> None:
    assert_true(model, x)
    model[2][0].forward = lambda value: -value
    with torch.no_grad(), pytest.raises(cl.ConformalError, match=r"position 2\.0"):
        model(x)


def test_statistics_written_by_a_function_are_noticed() -> None:
    model = cl.ConformalLayers(cl.Linear(6, 5), nn.BatchNorm1d(5), cl.Gnomonic(1.0)).eval()
    x = torch.randn(8, 6) + 3
    before = assert_true(model, x)
    norm = model[1]
    nn.functional.batch_norm(
        model[0](x).detach(), norm.running_mean, norm.running_var, training=True
    )
    assert relative_error(assert_true(model, x), before) > 1e-3


def test_inference_tensors_written_in_place_are_noticed() -> None:
    with torch.inference_mode():
        model = cl.ConformalLayers(cl.Linear(3, 2), cl.ReSPro()).eval()
        x = samples((3,), torch.float32)
        before = model(x)
        model[0].weight.mul_(torch.tensor([[1.0], [-2.0]]))
        after = model(x)
    assert relative_error(after, oracle(exact(model), x.double())) <= 5e-6
    assert relative_error(after, before) > 1e-3


def test_plain_tensor_attributes_are_noticed() -> None:
    class Times(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = torch.tensor([1.0, 2.0, 3.0])

        def forward(self, input: Tensor) -> Tensor:
            return input * self.factors

    cl.register_linear(Times, lambda module, shape: float(module.factors.abs().max()))
    model = cl.ConformalLayers(Times(), cl.ReSPro(1.0)).eval()
    x = torch.tensor([[1.0, 2.0, -1.0]])
    changes = (
        lambda: model[0].factors.neg_(),
        lambda: setattr(model[0], "factors", torch.tensor([3.0, 2.0, 1.0])),
        lambda: setattr(model[0], "factors", torch.tensor(2.0)),
    )
    for change in changes:
        model(x)
        change()
        with cl.layer_by_layer():
            wanted = model(x)
        assert relative_error(model(x), wanted) <= 5e-6


def test_global_hooks_run(model: Model, x: Tensor) -> None:
    before = assert_true(model, x)
    calls: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: calls.append(m))
    try:
        with torch.no_grad():
            after = model(x)
    finally:
        handle.remove()
    assert [m for m in calls if isinstance(m, (nn.Conv2d, nn.Linear, cl.Scale))] == [
        model[0],
        model[2][0],
        model[2][1][0],
        model[5],
    ]
    assert relative_error(after, before) <= 5e-6


# -- limits -----------------------------------------------------------------------------------


def test_the_least_recently_used_folds_are_dropped(
    model: Model, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model[:4].eval()
    monkeypatch.setattr(cache, "MOST_FOLDS", 3)
    inputs = {size: samples((2, size, size), torch.float32) for size in (5, 6, 7, 8)}
    for size in (5, 6, 7, 5, 8, 5, 7, 8):  # 8 drops 6
        assert_true(model, inputs[size])
    assert len(made) == 4
    assert_true(model, inputs[6])
    assert_true(model, inputs[5])  # dropped by 6
    assert [fold.input_shape[1] for fold in made] == [5, 6, 7, 8, 6, 5]


def test_folds_are_dropped_by_their_bytes(
    model: Model, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model[:4].eval()
    small, large = (samples((2, size, size), torch.float32) for size in (5, 8))
    assert_true(model, small)
    assert_true(model, large)
    sizes = [sum(b.nbytes for b in fold.buffers()) for fold in made]
    monkeypatch.setattr(cache, "MOST_BYTES", sum(sizes) - 1)
    model.unfold()
    for x in (small, large, large):
        assert_true(model, x)
    assert len(made) == 4
    assert_true(model, small)
    assert len(made) == 5
    monkeypatch.setattr(cache, "MOST_BYTES", 1)  # the last one is kept whatever its size
    model.unfold()
    assert_true(model, large)
    assert_true(model, large)
    assert len(made) == 6


def test_another_dtype(model: Model, x: Tensor, made: Made) -> None:
    assert_true(model, x)
    assert_true(model.double(), x.double())
    assert_true(model.float(), x)
    assert len(made) == 3


def test_train_and_unfold_forget(model: Model, x: Tensor, made: Made) -> None:
    assert_true(model, x)
    model.train()
    model.eval()
    assert_true(model, x)
    assert len(made) == 2
    model.eval()  # changes nothing
    assert_true(model, x)
    assert len(made) == 2
    model.unfold()
    assert_true(model, x)
    assert len(made) == 3


def test_parts_of_a_larger_model_keep_their_own_folds(x: Tensor, made: Made) -> None:
    first, second = (
        small()[:2].eval(),
        cl.ConformalLayers(cl.Conv2d(3, 2, 2), cl.ReSPro(1.0)).eval(),
    )
    model = nn.Sequential(first, second)
    with torch.no_grad():
        model(x)
        in_place(second)
        model(x)
    assert [fold.input_shape for fold in made] == [SHAPE, (3, 3, 3), (3, 3, 3)]


def test_a_freed_address_that_comes_back(model: Model, x: Tensor) -> None:
    for value in range(20):
        model[0].weight = nn.Parameter(torch.rand(3, 2, 3, 3) + value)
        assert_true(model, x)
        model[0].weight.data = torch.rand(3, 2, 3, 3) - value
        assert_true(model, x)


def test_hooks_run_wherever_they_are(model: Model, x: Tensor, made: Made) -> None:
    before = assert_true(model, x)
    with torch.no_grad():
        for module in (model[0], model[2][0], model[2][1][0]):
            calls: list[nn.Module] = []
            handle = module.register_forward_hook(
                lambda m, arguments, output, calls=calls: calls.append(m) or -output
            )
            after = model(x)
            assert calls == [module]
            assert relative_error(after, -before) <= 5e-6  # every layer is odd
            handle.remove()
            handle = module.register_forward_pre_hook(
                lambda m, arguments, calls=calls: calls.append(m)
            )
            model(x)
            assert calls == [module] * 2
            handle.remove()
            folds = len(made)
            assert relative_error(model(x), before) <= 5e-6
            model(x)
            assert len(made) <= folds + 1
        calls = []
        model.register_forward_hook(lambda m, arguments, output: calls.append(m))
        model(x)
        model(x)
        assert calls == [model] * 2  # a hook on the whole needs no layers


# -- what it is no part of --------------------------------------------------------------------


def test_no_part_of_state_pickle_or_copies(model: Model, x: Tensor, made: Made) -> None:
    state, stored, text = list(model.state_dict()), len(pickle.dumps(model)), repr(model)
    assert_true(model, x)
    assert list(model.state_dict()) == state
    assert len(pickle.dumps(model)) == stored
    assert repr(model) == text
    assert not any(isinstance(module, RecipeModule) for module in model.modules())
    for other in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        count = len(made)
        assert_true(other, x)
        assert len(made) == count + 1
    count = len(made)
    assert_true(model, x)
    assert len(made) == count


# -- inference mode ---------------------------------------------------------------------------


def test_folds_made_in_inference_mode_serve_afterwards(model: Model, x: Tensor, made: Made) -> None:
    with torch.inference_mode():
        model(x)
        folded = cl.fold(model, SHAPE)
    assert_true(model, x)
    assert len(made) == 2  # one in the cache, one of fold
    model.requires_grad_(False)
    for path in (model, folded):
        leaf = x.clone().requires_grad_()
        path(leaf).sum().backward()
        assert leaf.grad.isfinite().all()
        assert leaf.grad.any()
    assert len(made) == 2


def test_inference_tensors_are_compared_by_identity(x: Tensor, made: Made) -> None:
    with torch.inference_mode():
        model = cl.ConformalLayers(cl.Linear(3, 2), cl.ReSPro()).eval()
        data = samples((3,), torch.float32)
        first = model(data)
        assert torch.equal(model(data), first)
        assert len(made) == 1
        model[0].weight = nn.Parameter(torch.rand(2, 3))
        second = model(data)
        assert len(made) == 2
    wanted = oracle(exact(model), data.double())
    assert relative_error(second, wanted) <= 5e-6


def test_dropout_left_in_training_keeps_the_layers() -> None:
    model = cl.ConformalLayers(cl.Linear(32, 32), cl.Dropout(0.5), cl.ReSPro()).eval()
    x = torch.rand(2, 32)
    with torch.no_grad():
        model(x)
        model[1].train()
        assert not torch.equal(model(x), model(x))


def test_a_normalisation_that_still_learns_is_not_folded_away() -> None:
    model = cl.ConformalLayers(cl.Linear(6, 5), nn.BatchNorm1d(5), cl.Gnomonic(1.0)).eval()
    x = torch.randn(8, 6) + 3
    with torch.no_grad():
        model(x)
        model[1].train()
        y = model(x)
        assert model[1].running_mean.abs().max() > 0
        with cl.layer_by_layer():
            assert torch.allclose(model(x), y)
