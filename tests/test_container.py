"""ConformalLayers: whatever works on an nn.Sequential works on it."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, vmap
from torch.nn.utils import parametrizations, parametrize, prune

import conformallayers as cl
from cases import ALPHAS
from conformallayers import container
from nets import POOLED_SHAPE, pooled_net
from oracle import exact_output, oracle, randomise, relative_error
from support import folds, samples

pytestmark = pytest.mark.usefixtures("seeded")


def twin() -> nn.Sequential:
    """Return the plain torch.nn modules of the same sizes."""
    convolution, linear = nn.Conv2d(1, 3, 3, bias=False), nn.Linear(27, 4, bias=False)
    return nn.Sequential(convolution, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), linear, nn.ReLU())


@pytest.fixture
def x() -> Tensor:
    return samples(POOLED_SHAPE, torch.float32, batch=5).abs()


def test_reading_as_nn_sequential() -> None:
    layers = [cl.Linear(3, 3), cl.ReSPro(), cl.Linear(3, 2), cl.ReSPro()]
    model, plain = cl.ConformalLayers(*layers), nn.Sequential(*layers)
    assert len(model) == len(plain) == 4
    assert list(model) == list(plain) == layers
    assert model[1] is plain[1]
    assert model[-1] is plain[-1]
    for piece in (slice(2), slice(1, None), slice(None, None, 2), slice(0, 0)):
        assert isinstance(model[piece], cl.ConformalLayers)
        assert list(model[piece].named_children()) == list(plain[piece].named_children())
    assert layers[2] in list(model)
    named = OrderedDict([("first", layers[0]), ("second", layers[1])])
    model = cl.ConformalLayers(named)
    assert list(model.state_dict()) == ["first.weight"]
    assert model.first is layers[0]
    with pytest.raises(IndexError):
        model[7]


def test_changing_as_nn_sequential() -> None:
    a, b, c, d = (cl.Linear(2, 2) for _ in range(4))
    model, plain = cl.ConformalLayers(a), nn.Sequential(a)
    for stack in (model, plain):
        assert stack.append(b) is stack
        assert stack.insert(1, c) is stack
        assert stack.extend([d]) is stack
        assert stack.pop(0) is a
        del stack[0]
        stack[0] = c
        stack += nn.Sequential(a)
    assert list(model) == list(plain) == [c, d, a]
    assert list(model.named_children()) == list(plain.named_children())
    for result, wanted in (
        (model + [b], plain + nn.Sequential(b)),  # noqa: RUF005
        (model * 2, plain * 2),
        (2 * model, 2 * plain),
    ):
        assert isinstance(result, cl.ConformalLayers)
        assert list(result) == list(wanted)
        assert [name for name, _ in result.named_modules()] == [
            name for name, _ in wanted.named_modules()
        ]


def test_state_dict_is_that_of_the_plain_twin(x: Tensor) -> None:
    model, plain = pooled_net(), twin()
    assert list(model.state_dict()) == list(plain.state_dict()) == ["0.weight", "4.weight"]
    model.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(model[0].weight, plain[0].weight)
    assert relative_error(model(x), exact_output(model, x)) <= 5e-6


COMPUTED: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", nn.Tanh()),
}


@pytest.mark.parametrize("name", list(COMPUTED))
def test_computed_weights_fold(name: str, x: Tensor) -> None:
    model = pooled_net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old forms announce their end
        for layer in (model[0], model[4]):
            COMPUTED[name](layer)
    model.train()(x)
    for _ in range(2):  # the second time shows what the first one did to the model
        model.eval()
        with torch.enable_grad(), cl.layer_by_layer():
            wanted = model(x).detach().double()
        plain = pooled_net()
        with torch.no_grad():
            plain[0].weight.copy_(model[0].weight)
            plain[4].weight.copy_(model[4].weight)
        assert relative_error(wanted, exact_output(plain, x)) <= 5e-6
        with torch.no_grad():
            assert relative_error(model(x), wanted) <= 5e-6
            for folded in folds(model, POOLED_SHAPE).values():
                assert relative_error(folded(x), wanted) <= 5e-6
        model.train()(x).sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_functional_call(x: Tensor) -> None:
    model, other = pooled_net("learned"), randomise(pooled_net("learned"), 8)
    for mode in (True, False):
        result = functional_call(model.train(mode), dict(other.named_parameters()), (x,))
        assert relative_error(result, exact_output(other, x)) <= 5e-6
        with torch.no_grad():
            result = functional_call(model, dict(other.named_parameters()), (x,))
            assert relative_error(result, exact_output(other, x)) <= 5e-6
            assert relative_error(model(x), exact_output(model, x)) <= 5e-6
    computed = {name: 1.0 * value for name, value in other.named_parameters()}
    with torch.no_grad():
        assert relative_error(functional_call(model, computed, (x,)), result) <= 5e-6


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients_of_each_sample(alpha: str | float | None, x: Tensor) -> None:
    model = pooled_net(alpha).double().eval()
    x = x.double()
    names = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, parameters, (sample.unsqueeze(0),)).square().sum()

    found = vmap(grad(loss), (None, 0))(names, x)
    for index, sample in enumerate(x):
        single = oracle(model, sample.unsqueeze(0)).square().sum()
        for name, wanted in zip(names, torch.autograd.grad(single, names.values()), strict=True):
            assert torch.allclose(found[name][index], wanted, rtol=1e-9, atol=1e-12)


# Views of overlapping rows (strategy "banded") run under vmap, one by one.
@pytest.mark.filterwarnings("ignore:There is a performance drop.*unfold_backward")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch's forward mode
def test_jacobians(x: Tensor) -> None:
    model, x = pooled_net().double(), x.double()[:2]
    (wanted,) = (torch.autograd.functional.jacobian(lambda v: oracle(model, v), x),)
    frozen = copy.deepcopy(model).requires_grad_(False).eval()
    for function in (model, frozen, *folds(model, POOLED_SHAPE).values()):
        assert torch.allclose(jacrev(function)(x), wanted, rtol=1e-9, atol=1e-12)
        rows = torch.autograd.functional.jacobian(function, x, vectorize=True)
        assert torch.allclose(rows, wanted, rtol=1e-9, atol=1e-12)
        assert torch.allclose(jacfwd(function)(x), wanted, rtol=1e-9, atol=1e-12)
        columns = vmap(lambda v, function=function: function(v.unsqueeze(0)))(x)
        assert torch.allclose(columns[:, 0], oracle(model, x), rtol=1e-9, atol=1e-12)


def test_a_spectral_activation_stands_once() -> None:
    shared = cl.ReSPro("spectral")
    with pytest.raises(cl.ConformalError, match="used twice"):
        cl.ConformalLayers(cl.Linear(8, 8), shared, cl.Linear(8, 8), shared)


def test_a_write_during_a_fold_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cl.ConformalLayers(cl.Linear(8, 8), cl.ReSPro(), cl.Linear(8, 3), cl.ReSPro()).eval()
    original = container.fold_layers

    def slow(*arguments, **options):
        with torch.no_grad():
            model[0].weight[0] *= 3
        monkeypatch.setattr(container, "fold_layers", original)
        return original(*arguments, **options)

    monkeypatch.setattr(container, "fold_layers", slow)
    x = torch.rand(2, 8)
    with torch.no_grad():
        model(x)
        with cl.layer_by_layer():
            expected = model(x)
        assert cl.testing.relative_error(model(x), expected) < 5e-6


def test_eval_does_not_build_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer for i in range(6) for layer in (cl.Conv2d(32 if i else 3, 32, 3), cl.ReSPro())]
    model = cl.ConformalLayers(*layers, cl.AdaptiveAvgPool2d(1)).eval()
    module = importlib.import_module("conformallayers.folding.forms")
    monkeypatch.setattr(module, "dense_matrix", lambda *_: pytest.fail("built a large matrix"))
    with torch.no_grad():
        model(torch.rand(1, 3, 224, 224))


def test_load_by_assignment_from_meta(x: Tensor) -> None:
    model, empty = pooled_net("learned"), pooled_net("learned", device="meta")
    assert empty(x.to("meta")).shape == (5, 4)
    assert empty.eval()(x.to("meta")).is_meta
    empty.load_state_dict(model.state_dict(), assign=True)
    assert relative_error(empty(x), exact_output(model, x)) <= 5e-6
    with torch.no_grad():
        assert relative_error(empty(x), exact_output(model, x)) <= 5e-6
