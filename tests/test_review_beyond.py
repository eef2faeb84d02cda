"""Faults that a review of biases, branches and activations found; each must stay away."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from oracle import exact, oracle, randomise, relative_error
from support import folds, samples


def test_layers_with_branches_keep_the_whole_head() -> None:
    torch.manual_seed(0)
    block = cl.Residual(cl.Conv2d(8, 8, 3, padding=1), cl.Gnomonic())
    part = cl.ConformalLayers(cl.Conv2d(2, 8, 3, padding=1), cl.Gnomonic(), block)
    head = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 1, 7, padding=3)
    model = nn.Sequential(part, *head)
    x = torch.rand(2, 2, 8, 8)
    for strategy in ("auto", "layers", "dense"):
        folded = cl.fold(model, (2, 8, 8), strategy=strategy)
        assert cl.fold_error(model, folded, x) <= 5e-6, strategy


def test_a_composite_that_is_not_linear_stays_in_the_head() -> None:
    part = cl.ConformalLayers(cl.Conv2d(1, 3, 3, bias=True), cl.ReSPro())
    model = nn.Sequential(part, cl.Residual(nn.Conv2d(3, 3, 1), nn.ReLU())).eval()
    folded = cl.fold(model, (1, 6, 6))
    assert folded.explain()["0"].absorbed == 0
    assert cl.fold_error(model, folded, torch.rand(4, 1, 6, 6)) <= 5e-6


def test_statistics_of_a_batch_inside_a_composite_are_not_cut() -> None:
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    part = cl.ConformalLayers(cl.Linear(30, 8), cl.Gnomonic())
    model = nn.Sequential(part, nn.Tanh(), cl.Residual(nn.Linear(8, 8), norm)).eval()
    assert cl.fold(model, (30,), strategy="layers").chunk_size is None


@pytest.mark.parametrize("strategy", ["dense", "banded"])
@pytest.mark.parametrize("norm", [1e-3, 1.0, 1e3, None])
def test_proofs_of_gnomonic_do_not_depend_on_the_norm(strategy: str, norm: float | None) -> None:
    torch.manual_seed(0)
    layers = (m for _ in range(8) for m in (cl.Conv2d(1, 1, 3, padding=1), cl.Gnomonic()))
    model = cl.ConformalLayers(*layers)
    folded = cl.fold(model, (1, 6, 6), strategy=strategy, tolerance=1e-3, max_norm=norm)
    assert folded.certificate is not None
    assert folded.certificate.margin >= 0
    assert math.isinf(folded.certificate.max_norm)
    assert cl.verify(folded, model)


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


class Bent(cl.RadialActivation):
    """A growth with a parameter."""

    def __init__(self, power: float) -> None:
        super().__init__(1.0)
        self.power = nn.Parameter(torch.tensor(power))

    def growth(self, q: Tensor) -> Tensor:
        return (1 + q) ** self.power


def pair(act: nn.Module, bias: bool = False) -> cl.ConformalLayers:
    torch.manual_seed(0)
    return cl.ConformalLayers(cl.Linear(4, 4, bias=bias), act, cl.Linear(4, 3), act)


@pytest.mark.parametrize(
    ("one", "other", "strategy"),
    [
        (pair(cl.Gnomonic(1.0)), pair(cl.ReSPro(1.0)), "dense"),
        (pair(cl.Gnomonic(1.0), True), pair(cl.RadialTanh(1.0), True), "dense"),
        (pair(cl.Gnomonic(1.0), True), pair(cl.RadialTanh(1.0), True), "layers"),
    ],
    ids=["rules", "rules with biases", "layers"],
)
def test_the_state_of_another_fold_is_refused(
    one: nn.Module, other: nn.Module, strategy: str
) -> None:
    folded = cl.fold(one, (4,), strategy=strategy)
    with pytest.raises((cl.ConformalError, RuntimeError)):
        folded.load_state_dict(cl.fold(other, (4,), strategy=strategy).state_dict())


@pytest.mark.parametrize("strategy", ["dense", "layers"])
def test_parameters_of_an_own_activation_are_part_of_the_state(strategy: str) -> None:
    one, other = (cl.fold(pair(Bent(power)), (4,), strategy=strategy) for power in (0.3, 0.9))
    x = torch.rand(5, 4)
    assert not torch.allclose(one(x), other(x))
    one.load_state_dict(other.state_dict())
    assert torch.equal(one(x), other(x))


def test_radii_are_part_of_the_state_of_layers() -> None:
    one, other = (
        cl.fold(
            cl.ConformalLayers(cl.Residual(cl.Linear(4, 4), cl.Gnomonic(alpha))),
            (4,),
            strategy="layers",
        )
        for alpha in (0.5, 2.0)
    )
    x = samples((4,), torch.float32)
    one.load_state_dict(other.state_dict())
    assert torch.equal(one(x), other(x))


@pytest.mark.filterwarnings("ignore:batch normalisation at position")  # variances below eps
def test_a_normalised_mean_does_not_cost_digits() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, momentum=None)
    layers = cl.Conv2d(1, 4, 3), norm, cl.Gnomonic(1.0), cl.Flatten(), cl.Linear(144, 10)
    model = cl.ConformalLayers(*layers)
    x = 100 + torch.rand(64, 1, 8, 8)
    model(x)
    model.eval()
    expected = oracle(exact(model), x.double())
    with torch.no_grad(), cl.layer_by_layer():
        by_layers = relative_error(model(x), expected)
    for name, folded in folds(model, (1, 8, 8)).items():
        assert relative_error(folded(x), expected) <= max(by_layers, 5e-6), name
    with torch.no_grad():
        assert relative_error(model(x), expected) <= max(by_layers, 5e-6)


def test_a_residual_that_cancels_does_not_cost_digits() -> None:
    torch.manual_seed(0)
    minus = cl.Linear(6, 6)
    with torch.no_grad():
        minus.weight.copy_(-torch.eye(6) + 1e-3 * torch.randn(6, 6))
    model = cl.ConformalLayers(
        cl.Residual(minus, cl.Gnomonic(1e4), cl.Scale(1e4)), cl.Gnomonic(1e-3), cl.Linear(6, 3)
    )
    x = samples((6,), torch.float32)
    folded = cl.fold(model, (6,), strategy="dense")
    assert cl.fold_error(model, folded, x) <= 5e-6


def test_tiny_radii_stay_in_range() -> None:
    torch.manual_seed(0)
    layers = (m for _ in range(8) for m in (cl.Linear(8, 8, bias=True), cl.Gnomonic(1e-7)))
    model = cl.ConformalLayers(*layers, cl.Linear(8, 3)).eval()
    x = samples((8,), torch.float32)
    expected = oracle(exact(model), x.double())
    for name, folded in folds(model, (8,)).items():
        assert relative_error(folded(x), expected) <= 5e-6, name


def test_radii_of_layers_are_not_rounded_to_the_dtype() -> None:
    torch.manual_seed(0)
    model = cl.ConformalLayers(
        cl.Linear(6, 6),
        cl.Residual(cl.Linear(6, 6), cl.Gnomonic("spectral")),
        cl.Gnomonic("spectral"),
    )
    with torch.no_grad():
        model[0].weight.mul_(1e-6)
    x = samples((6,), torch.float32)
    for _ in range(5):
        model(x)
    model.eval()
    folded = cl.fold(model, (6,), strategy="layers", dtype=torch.float16)
    assert torch.isfinite(folded(x.half())).all()


def test_gradients_of_folds_whose_coordinate_explodes() -> None:
    torch.manual_seed(0)
    layers = (m for _ in range(10) for m in (cl.Linear(6, 6, bias=True), cl.ReSPro(0.1)))
    model = cl.ConformalLayers(*layers, cl.Linear(6, 2, bias=True)).double().eval()
    x = (50 * samples((6,), torch.float64)).requires_grad_()
    (gradient,) = torch.autograd.grad(cl.fold(model, (6,), strategy="dense")(x).sum(), x)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("pad", "conv", "shape"),
    [
        (nn.ZeroPad2d(1), cl.Conv3d(1, 2, 3), (1, 3, 4, 4)),
        (nn.ZeroPad1d(1), cl.Conv2d(1, 2, 3), (1, 4, 4)),
    ],
)
def test_padding_of_fewer_axes_than_the_convolution(
    pad: nn.Module, conv: nn.Module, shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(pad, cl.ConformalLayers(conv, cl.ReSPro()))
    try:
        expected = model(torch.rand(2, *shape))
    except (RuntimeError, ValueError, NotImplementedError):
        pytest.skip("torch does not pad so many axes")
    folded = cl.fold(model, shape)
    assert folded.output_shape == tuple(expected.shape[1:])


def test_verify_knows_where_a_prefix_belongs() -> None:
    first = cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro())
    second = cl.ConformalLayers(cl.Linear(32, 8), cl.ReSPro())
    model = randomise(nn.Sequential(first, nn.Flatten(), second))
    for strategy in ("dense", "layers"):
        assert cl.verify(cl.fold(model, (1, 6, 6), strategy=strategy), model)


def test_folds_with_biases_compile_as_one_graph_and_follow_autocast() -> None:
    model = pair(cl.Gnomonic(1.0), bias=True)
    folded = cl.fold(model, (4,), strategy="dense")
    x = samples((4,), torch.float32)
    compiled = torch.compile(folded, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x), folded(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert folded(x).dtype == torch.bfloat16
    assert folded.half()(x.half()).dtype == torch.float16
