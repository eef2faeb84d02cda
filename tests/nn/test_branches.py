"""Residual and parallel branches, traced modules: against the oracle, folded, and refused."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import conformallayers as cl
from cases import ALPHAS
from oracle import exact, gradient_error, oracle, randomise, relative_error
from support import DTYPES, TOLERANCES, samples

SHAPE = (2, 5, 4)
ACTIVATIONS = [
    cl.ReSPro,
    lambda alpha: cl.ReSPro(alpha, projective=True),
    cl.Gnomonic,
]


class Maker:
    """Random networks on samples of SHAPE: layers with and without biases, nested branches."""

    def __init__(self, seed: int, width: int = 2) -> None:
        self.choice = random.Random(seed)
        self.width = width

    def layer(self) -> nn.Module:
        bias = self.choice.random() < 0.5
        return self.choice.choice(
            [
                cl.Conv2d(self.width, self.width, 3, padding=1, bias=bias),
                cl.Conv2d(self.width, self.width, 1, bias=bias),
                nn.BatchNorm2d(self.width),
                cl.AvgPool2d(3, 1, 1),
                cl.Scale(0.7),
            ]
        )

    def activation(self) -> nn.Module:
        return self.choice.choice(ACTIVATIONS)(self.choice.choice(ALPHAS))

    def block(self, depth: int) -> nn.Module:
        kind = self.choice.randrange(4) if depth else 0
        if kind == 1:
            return cl.Residual(*self.chain(depth - 1))
        if kind == 2:
            skip = cl.Conv2d(self.width, self.width, 1, bias=True)
            return cl.Residual(*self.chain(depth - 1), shortcut=skip)
        if kind == 3:
            parts = [nn.Sequential(*self.chain(depth - 1)) for _ in range(2)]
            return cl.Parallel(*parts)
        return self.layer()

    def chain(self, depth: int) -> list[nn.Module]:
        found: list[nn.Module] = []
        for _ in range(self.choice.randrange(1, 3)):
            found.append(self.block(depth))
            if self.choice.random() < 0.6:
                found.append(self.activation())
        return found

    def model(self) -> cl.ConformalLayers:
        return cl.ConformalLayers(self.layer(), *self.chain(2), self.block(2), self.activation())


def made(seed: int, dtype: torch.dtype = torch.float64) -> cl.ConformalLayers:
    model = randomise(Maker(seed).model(), seed).to(dtype)
    model(samples(SHAPE, dtype, 6, seed))  # spectral norms and statistics of batches
    return model.eval()


def gradients(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().sum(), inputs, allow_unused=True))


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.sampled(3)
def test_random_networks_agree_with_the_oracle(seed: int) -> None:
    model = made(seed)
    x = samples(SHAPE, torch.float64, 4, seed)
    x[1] = 0
    expected = oracle(exact(model), x)
    with torch.no_grad(), cl.layer_by_layer():
        assert relative_error(model(x), expected) <= 1e-12
    with torch.no_grad():
        assert relative_error(model(x), expected) <= 1e-12
    for strategy in ("auto", "dense", "layers"):
        folded = cl.fold(model, SHAPE, strategy=strategy)
        assert relative_error(folded(x), expected) <= 1e-12, strategy
        assert not folded(x)[1].any()


@pytest.mark.parametrize("seed", range(0, 24, 3))
@pytest.mark.sampled(2)
def test_folds_in_float32(seed: int) -> None:
    model = made(seed, torch.float32)
    x = samples(SHAPE, torch.float32, 4, seed)
    expected = oracle(exact(model), x.double())
    for strategy in ("dense", "layers"):
        folded = cl.fold(model, SHAPE, strategy=strategy)
        assert relative_error(folded(x), expected) <= TOLERANCES[torch.float32], strategy


@pytest.mark.parametrize("seed", range(0, 24, 3))
def test_training_and_its_gradients(seed: int) -> None:
    model = made(seed)
    for module in model.modules():
        if isinstance(module, cl.RadialActivation) and module.alpha == "spectral":
            module.alpha = 1.3  # its vector is another matter, see test_conformance
    model.train()
    twin = exact(model)
    x = samples(SHAPE, torch.float64, 4, seed).requires_grad_()
    wide = x.detach().clone().requires_grad_()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    y, expected = model(x), oracle(twin, wide)
    assert relative_error(y, expected) <= 1e-12
    ours = gradients(y, x, *(model.get_parameter(name) for name in names))
    theirs = gradients(expected, wide, *(twin.get_parameter(name) for name in names))
    pairs = [(a, e) for a, e in zip(ours, theirs, strict=True) if a is not None and e is not None]
    assert len(pairs) > 1
    assert gradient_error([a for a, _ in pairs], [e for _, e in pairs]) <= 1e-9


@pytest.mark.parametrize("dtype", DTYPES)
def test_spectral_radius_behind_a_join_is_the_same_everywhere(dtype: torch.dtype) -> None:
    block = cl.Residual(cl.Linear(4, 4), cl.ReSPro(projective=True))
    model = cl.ConformalLayers(
        cl.Linear(4, 4), block, cl.Linear(4, 3), cl.ReSPro("spectral", projective=True)
    ).to(dtype)
    x = samples((4,), dtype)
    for _ in range(3):
        y = model(x)
    expected = oracle(exact(model).eval(), x.double())
    with torch.no_grad():
        found = model.eval()(x)
    assert relative_error(found, expected) <= TOLERANCES[dtype]
    # The last training forward used the norm that it left behind.
    assert relative_error(y, expected) <= TOLERANCES[dtype]


def test_the_sum_keeps_the_coordinate_of_the_first() -> None:
    # Published: what follows depends on t, so the order of the branches can be seen.
    branch = nn.Sequential(cl.Linear(3, 3), cl.ReSPro(0.5))
    skip = cl.ConformalLayers(cl.Parallel(nn.Identity(), branch), cl.ReSPro(1.0)).double()
    turned = cl.ConformalLayers(cl.Parallel(branch, nn.Identity()), cl.ReSPro(1.0)).double()
    x = 2 * samples((3,), torch.float64)
    t = x.norm(dim=1, keepdim=True)
    body = x @ branch[0].weight.T
    t2 = 0.25 * t + body.square().sum(1, keepdim=True)
    total = x + t / t2 * body
    expected = total / (t / 2 + total.square().sum(1, keepdim=True) / 2)
    assert relative_error(skip(x), expected) <= 1e-12
    assert relative_error(turned(x), expected) > 1e-3


def test_branches_without_activations_are_one_layer() -> None:
    model = cl.ConformalLayers(
        cl.Conv2d(2, 2, 3, padding=1),
        cl.Residual(cl.Conv2d(2, 2, 3, padding=1)),
        cl.ReSPro(),
        cl.Parallel(cl.Conv2d(2, 2, 1), cl.Conv2d(2, 3, 1), join="concatenate"),
        cl.ReSPro(),
    )
    assert [step.sources for step in cl.trace(model, SHAPE).steps] == [(i - 1,) for i in range(5)]
    for strategy in ("dense", "layers"):
        cl.testing.assert_folds(model, SHAPE, strategy=strategy)


def residuals(count: int) -> cl.ConformalLayers:
    blocks = (cl.Residual(cl.Linear(3, 3), cl.ReSPro(projective=True)) for _ in range(count))
    return cl.ConformalLayers(*blocks, cl.ReSPro(projective=True))


def test_many_residual_blocks_in_a_row() -> None:
    """Every block is a stage and a join, however many paths there are."""
    model, x = residuals(40), samples((3,), torch.float32)
    folded = cl.fold(model, (3,))
    assert cl.fold_error(model, folded, x) < TOLERANCES[torch.float32]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: cl.Parallel(), "at least one branch"),
        (lambda: cl.Parallel(nn.Identity(), join="product"), '"sum" or "concatenate"'),
        (lambda: cl.Parallel(nn.Identity(), dim=0), "after the batch axis"),
        (lambda: cl.Parallel(torch.relu), "modules"),
        (lambda: cl.Residual(torch.relu), "modules"),
        (lambda: cl.ConformalLayers(cl.Residual(nn.GELU())), "position 0.body.0"),
        (lambda: cl.ConformalLayers(cl.Parallel(nn.Tanh())), "position 0.branches.0"),
    ],
)
def test_refused_branches(build: object, message: str) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        build()  # type: ignore[operator]


@pytest.mark.parametrize("join", ["sum", "concatenate"])
def test_branches_that_do_not_fit(join: str) -> None:
    acts = cl.ReSPro(projective=True)
    branches = nn.Sequential(cl.Conv2d(2, 2, 3), acts), cl.Conv2d(2, 2, 1)
    model = cl.ConformalLayers(cl.Parallel(*branches, join=join))
    with pytest.raises(cl.ConformalError, match="branches"):
        cl.fold(model, SHAPE)


def test_heads_and_files_of_weights() -> None:
    model = nn.Sequential(made(2), nn.Flatten(), nn.Linear(40, 3, dtype=torch.float64))
    x = samples(SHAPE, torch.float64)
    x[0] = 0
    for strategy in ("auto", "dense", "layers"):
        folded = cl.fold(model, SHAPE, strategy=strategy)
        assert cl.fold_error(model, folded, x) <= 1e-12
    assert torch.equal(folded(x)[0], model[2].bias)  # a head outside still adds its own
    again = nn.Sequential(made(2), nn.Flatten(), nn.Linear(40, 3, dtype=torch.float64))
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again.eval()(x), model.eval()(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_folds(dtype: torch.dtype) -> None:
    model = made(4, torch.float32)
    folded = cl.fold(model, SHAPE, strategy="dense", dtype=dtype)
    x = samples(SHAPE, torch.float32).to(dtype)
    expected = oracle(exact(model), x.double())
    assert relative_error(folded(x), expected) <= TOLERANCES[dtype]


def test_the_state_of_a_fold_holds_all_of_it() -> None:
    first, second = made(1), made(1)
    randomise(second, 99)
    x = samples(SHAPE, torch.float64)
    for strategy in ("dense", "layers"):
        one, two = (cl.fold(m, SHAPE, strategy=strategy) for m in (first, second))
        assert not torch.allclose(one(x), two(x), rtol=1e-3)
        two.load_state_dict(one.state_dict())
        assert torch.equal(two(x), one(x))


@pytest.mark.parametrize("strategy", [pytest.param("dense", marks=pytest.mark.slow), "layers"])
def test_folds_with_branches_export_and_compile(strategy: str) -> None:
    model = made(3, torch.float32)
    folded = cl.fold(model, SHAPE, strategy=strategy)
    x = samples(SHAPE, torch.float32)
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(folded, (x,), dynamic_shapes={"x": {0: batch}})
    assert torch.allclose(exported.module()(x), folded(x), rtol=1e-5, atol=1e-6)


def test_bounds_of_a_pruned_branch_leave_its_weight_alone() -> None:
    model = exact(randomise(cl.ConformalLayers(cl.Residual(cl.Conv2d(2, 2, 1)), cl.ReSPro())))
    plain, x = copy.deepcopy(model), samples(SHAPE, torch.float64)
    conv = model[0].body[0]
    for layer in (conv, plain[0].body[0]):
        prune.l1_unstructured(layer, "weight", 0.5)
    prune.remove(plain[0].body[0], "weight")
    for _ in range(2):
        with torch.no_grad():
            assert relative_error(model.eval()(x), oracle(plain, x)) <= 1e-12
        assert conv.weight.device.type == "cpu"


def test_a_sum_does_not_broadcast() -> None:
    model = cl.ConformalLayers(cl.Residual(cl.AdaptiveAvgPool2d(1)), cl.Gnomonic())
    for act in (lambda: model(torch.rand(2, 1, 8, 8)), lambda: cl.fold(model, (1, 8, 8))):
        with pytest.raises(cl.ConformalError, match="sum of branches"):
            act()


def test_one_branch_is_no_join() -> None:
    model = cl.ConformalLayers(cl.Parallel(nn.Sequential(cl.Linear(4, 4), cl.Gnomonic())))
    cl.testing.assert_folds(randomise(model), (4,))


def test_concatenation_leaves_the_batch_alone() -> None:
    model = cl.ConformalLayers(
        cl.Parallel(nn.Identity(), nn.Identity(), join="concatenate", dim=-4)
    )
    with pytest.raises(cl.ConformalError, match="not the batch axis"):
        model(torch.rand(1, 1, 4, 4))


def test_a_traced_network_compiles_and_copies() -> None:
    model = made(5)
    x = samples(SHAPE, torch.float64)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(copy.deepcopy(model)(x), expected)
        folded = cl.fold(model, SHAPE, strategy="dense")
        assert relative_error(copy.deepcopy(folded)(x), expected) <= 1e-12
