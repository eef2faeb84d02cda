"""The habits of torch.nn: whatever works on a plain module works here."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.utils import parametrizations, parametrize, prune

import conformallayers as cl
from oracle import exact, oracle, randomise, relative_error
from support import folds, samples

SHAPE = (1, 8, 8)


def small(alpha: str | float | None = None, **factory: object) -> cl.ConformalLayers:
    model = cl.ConformalLayers(
        cl.Conv2d(1, 3, 3, **factory),
        cl.ReSPro(alpha, **factory),
        cl.AvgPool2d(2),
        cl.Flatten(),
        cl.Linear(27, 4, **factory),
        cl.ReSPro(alpha, projective=True, **factory),
    )
    return model if factory.get("device") == "meta" else randomise(model, 4)


def twin() -> nn.Sequential:
    """Return the plain torch.nn modules of the same sizes."""
    convolution, linear = nn.Conv2d(1, 3, 3, bias=False), nn.Linear(27, 4, bias=False)
    return nn.Sequential(convolution, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), linear, nn.ReLU())


@pytest.fixture
def x() -> Tensor:
    return samples(SHAPE, torch.float32, batch=5).abs()


def expected(model: cl.ConformalLayers, x: Tensor) -> Tensor:
    return oracle(exact(model).eval(), x.double()).detach()


# -- construction -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        lambda **f: cl.Conv1d(2, 3, 1, **f),
        lambda **f: cl.Conv2d(2, 3, 1, **f),
        lambda **f: cl.Conv3d(2, 3, 1, **f),
        lambda **f: cl.ConvTranspose1d(2, 3, 1, **f),
        lambda **f: cl.ConvTranspose2d(2, 3, 1, **f),
        lambda **f: cl.ConvTranspose3d(2, 3, 1, **f),
        lambda **f: cl.Linear(2, 3, **f),
        lambda **f: cl.Scale(2.0, **f),
        lambda **f: cl.ReSPro("learned", **f),
        lambda **f: cl.ReSPro("spectral", **f),
    ],
)
def test_factory_keywords_and_skip_init(build: Callable[..., nn.Module]) -> None:
    state = build(device="meta", dtype=torch.float64).state_dict()
    assert len(state) == 1
    assert all(t.is_meta and t.dtype == torch.float64 for t in state.values())
    kept = nn.utils.skip_init(type(build()), *arguments(build())).state_dict()
    assert {k: v.shape for k, v in kept.items()} == {k: v.shape for k, v in state.items()}


def arguments(layer: nn.Module) -> tuple[object, ...]:
    """Return the positional arguments that build the same layer again."""
    if isinstance(layer, (cl.Scale, cl.ReSPro)):
        return (getattr(layer, "initial", None) or layer.alpha,)
    return (2, 3) if isinstance(layer, nn.Linear) else (2, 3, 1)


def test_repr_takes_one_line_and_equals_that_of_torch() -> None:
    for case in cl.testing.LINEAR_CASES:
        layer = case.build()
        if type(layer) in (cl.Residual, cl.Parallel):
            continue  # they show what they hold, as nn.Sequential does
        assert "\n" not in repr(layer)
        namesake = getattr(nn, type(layer).__name__, None)
        if case.name.startswith("cl.") and namesake is not None:
            plain = copy.deepcopy(layer)
            plain.__class__ = namesake
            assert repr(layer) == repr(plain)
    assert repr(cl.ReSPro()) == "ReSPro()"
    assert repr(cl.ReSPro(2.5, projective=True)) == "ReSPro(alpha=2.5, projective=True)"
    assert repr(cl.ReSPro("learned")) == "ReSPro(alpha='learned')"
    assert repr(cl.Scale()) == "Scale()"


# -- nn.Sequential ----------------------------------------------------------------------------


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


# -- state ------------------------------------------------------------------------------------


def test_state_dict_is_that_of_the_plain_twin(x: Tensor) -> None:
    model, plain = small(), twin()
    assert list(model.state_dict()) == list(plain.state_dict()) == ["0.weight", "4.weight"]
    model.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(model[0].weight, plain[0].weight)
    assert relative_error(model(x), expected(model, x)) <= 5e-6


@pytest.mark.parametrize("alpha", cl.testing.ALPHAS)
def test_strict_round_trip_through_a_file(alpha: str | float | None, x: Tensor) -> None:
    model, other = small(alpha), small(alpha)
    model(x)  # gives a spectral activation its norm
    nn.init.normal_(other[0].weight)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )
    with torch.no_grad():
        assert torch.equal(model.eval()(x), other.eval()(x))


def test_load_by_assignment_from_meta(x: Tensor) -> None:
    model, empty = small("learned"), small("learned", device="meta")
    assert empty(x.to("meta")).shape == (5, 4)
    assert empty.eval()(x.to("meta")).is_meta
    empty.load_state_dict(model.state_dict(), assign=True)
    assert relative_error(empty(x), expected(model, x)) <= 5e-6
    with torch.no_grad():
        assert relative_error(empty(x), expected(model, x)) <= 5e-6


def test_to_meta(x: Tensor) -> None:
    for alpha in cl.testing.ALPHAS:
        assert small(alpha).to("meta")(x.to("meta")).is_meta
    for folded in folds(small(), SHAPE).values():
        assert folded.to("meta")(x.to("meta")).shape == (5, 4)


@pytest.mark.parametrize("alpha", cl.testing.ALPHAS)
def test_copies(alpha: str | float | None, x: Tensor) -> None:
    model = small(alpha)
    model(x)
    model.eval()
    wanted = expected(model, x)
    with torch.no_grad():
        model(x)  # so that there is a fold that must not be copied
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert relative_error(other(x), wanted) <= 5e-6
            nn.init.normal_(other[0].weight)
            assert relative_error(model(x), wanted) <= 5e-6
            assert relative_error(other(x), expected(other, x)) <= 5e-6


def test_averaged_model(x: Tensor) -> None:
    model = small()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    randomise(model, 9)
    averaged.update_parameters(model)
    mean = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in mean.named_parameters():
            parameter.copy_((dict(small().named_parameters())[name] + parameter) / 2)
        assert relative_error(averaged.eval()(x), expected(mean, x)) <= 5e-6


# -- fold and Folded --------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_fold_leaves_the_model_alone(training: bool, x: Tensor) -> None:
    model = nn.Sequential(small("spectral"), nn.Dropout(0.5), nn.Linear(4, 2)).train(training)
    before = {
        name: (t, t._version, t.clone()) for name, t in model.state_dict(keep_vars=True).items()
    }
    modules = list(model.modules())
    folded = cl.fold(model, SHAPE)
    assert list(model.modules()) == modules
    assert all(module.training == training for module in modules)
    for name, tensor in model.state_dict(keep_vars=True).items():
        same, version, value = before[name]
        assert tensor is same
        assert tensor._version == version
        assert torch.equal(tensor, value)
    wanted = exact(model[2])(expected(model[0], x))  # evaluation semantics whatever the mode
    assert relative_error(folded(x), wanted) <= 5e-6
    shared = {t.data_ptr() for t in model.state_dict().values()}
    assert not shared & {t.data_ptr() for t in folded.buffers() if t.numel()}


def test_folded_has_buffers_alone_and_one_mode(x: Tensor) -> None:
    for folded in folds(nn.Sequential(small(), nn.Dropout(0.5), nn.Linear(4, 2)), SHAPE).values():
        assert list(folded.parameters()) == []
        assert sum(b.numel() for b in folded.buffers()) > 0
        y = folded(x)
        assert folded.train() is folded
        assert not any(module.training for module in folded.modules())
        assert torch.equal(folded(x), y)
        other = cl.fold(
            nn.Sequential(small(), nn.Dropout(0.5), nn.Linear(4, 2)),
            SHAPE,
            strategy=folded.strategy,
        )
        other.load_state_dict(folded.state_dict(), strict=True)
        for copied in (
            copy.deepcopy(folded),
            pickle.loads(pickle.dumps(folded)),
            folded.share_memory(),
        ):
            assert torch.equal(copied(x), y)


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
    model = small()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old forms announce their end
        for layer in (model[0], model[4]):
            COMPUTED[name](layer)
    model.train()(x)
    for _ in range(2):  # the second time shows what the first one did to the model
        model.eval()
        with torch.enable_grad(), cl.layer_by_layer():
            wanted = model(x).detach().double()
        plain = small()
        with torch.no_grad():
            plain[0].weight.copy_(model[0].weight)
            plain[4].weight.copy_(model[4].weight)
        assert relative_error(wanted, expected(plain, x)) <= 5e-6
        with torch.no_grad():
            assert relative_error(model(x), wanted) <= 5e-6
            for folded in folds(model, SHAPE).values():
                assert relative_error(folded(x), wanted) <= 5e-6
        model.train()(x).sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


# -- torch.func and autograd ------------------------------------------------------------------


def test_functional_call(x: Tensor) -> None:
    model, other = small("learned"), randomise(small("learned"), 8)
    for mode in (True, False):
        result = functional_call(model.train(mode), dict(other.named_parameters()), (x,))
        assert relative_error(result, expected(other, x)) <= 5e-6
        with torch.no_grad():
            result = functional_call(model, dict(other.named_parameters()), (x,))
            assert relative_error(result, expected(other, x)) <= 5e-6
            assert relative_error(model(x), expected(model, x)) <= 5e-6


@pytest.mark.parametrize("alpha", cl.testing.ALPHAS)
def test_gradients_of_each_sample(alpha: str | float | None, x: Tensor) -> None:
    model = small(alpha).double().eval()
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
def test_jacobians(x: Tensor) -> None:
    model, x = small().double(), x.double()[:2]
    (wanted,) = (torch.autograd.functional.jacobian(lambda v: oracle(model, v), x),)
    frozen = copy.deepcopy(model).requires_grad_(False).eval()
    for function in (model, frozen, *folds(model, SHAPE).values()):
        assert torch.allclose(jacrev(function)(x), wanted, rtol=1e-9, atol=1e-12)
        rows = torch.autograd.functional.jacobian(function, x, vectorize=True)
        assert torch.allclose(rows, wanted, rtol=1e-9, atol=1e-12)
        columns = vmap(lambda v, function=function: function(v.unsqueeze(0)))(x)
        assert torch.allclose(columns[:, 0], oracle(model, x), rtol=1e-9, atol=1e-12)
