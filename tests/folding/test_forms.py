"""Norms of operators, quadratic forms, and the fold written out: Folded.matrix() and Folded.forms()."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.folding.forms import forms_of, stacked_layers
from conformallayers.folding.forms import matrix_of as matrix_of_stage
from conformallayers.folding.operators import Operator
from conformallayers.folding.strategies import STRATEGIES
from oracle import exact_output, matrix_of, randomise, relative_error
from support import both_forms, folds, samples, stage_of

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("kernel", [3, (3,), (3, 3)])
def test_multiply_adds_of_windows_count_every_axis(kernel: int | tuple[int, ...]) -> None:
    operator = Operator(nn.AvgPool2d(kernel), (2, 6, 6), (2, 2, 2))
    assert operator.multiply_adds() == 2 * 2 * 2 * 9


def test_the_operator_norm_is_a_bound_and_a_close_one() -> None:
    for weight_shape in ((5, 3, 3, 3), (3, 6, 5, 1), (4, 4, 2, 3)):
        conv = (
            cl.Conv2d(weight_shape[1], weight_shape[0], weight_shape[2:], padding=1)
            .double()
            .requires_grad_(False)
        )
        nn.init.normal_(conv.weight)
        shape = (weight_shape[1], 9, 9)
        size = math.prod(shape)
        columns = conv(torch.eye(size, dtype=torch.float64).view(size, *shape)).flatten(1).detach()
        out = tuple(conv(torch.zeros(1, *shape).double()).shape[1:])
        bound = Operator(conv, shape, out).norm
        true = float(torch.linalg.matrix_norm(columns, 2))
        assert true <= bound <= 1.5 * true


pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("height", [1, 2, 3, 6, 10, 13])
@both_forms
def test_forms_are_the_products_of_the_responses(height: int, projective: bool) -> None:
    model = cl.ConformalLayers(
        cl.Conv2d(2, 4, 3, padding=1),
        cl.ReSPro(projective=projective),
        cl.Conv2d(4, 4, (5, 3), padding=(2, 1), groups=2),
        cl.Scale(1.5),
        cl.ReSPro(projective=projective),
        cl.Conv2d(4, 3, 3, padding=2, dilation=2),
        cl.ReSPro(projective=projective),
    ).double()
    stage = stage_of(model, (2, height, 5))
    for group, form in enumerate(forms_of(stage)):
        responses = stacked_layers(stage, group)
        expected = responses.T @ responses
        assert torch.allclose(form, expected, rtol=1e-12, atol=1e-14 * float(expected.max()))


def test_the_matrix_of_few_outputs_takes_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = []
    pool = nn.functional.adaptive_avg_pool2d

    def counted(x: Tensor, size: object) -> Tensor:
        passed.append(len(x))
        return pool(x, size)

    monkeypatch.setattr(nn.functional, "adaptive_avg_pool2d", counted)
    layers = cl.Conv2d(1, 25, 1), cl.ReSPro(projective=True), cl.AdaptiveAvgPool2d(1)
    matrix = matrix_of_stage(stage_of(cl.ConformalLayers(*layers), (1, 40, 40)))
    assert matrix.shape == (25, 1600)
    assert sum(passed) < 1600 / 4


SHAPE = (2, 6, 6)


def network(
    projective: bool = False, *, last: nn.Module | None = None, **embedding: object
) -> cl.ConformalLayers:
    model = cl.ConformalLayers(
        *(cl.Conv2d(2, 3, 3), cl.ReSPro(1.5, projective=projective), cl.Conv2d(3, 4, 2)),
        *(last or cl.ReSPro(0.8, projective=projective), cl.Conv2d(4, 2, 1)),
        **embedding,
    )
    return randomise(model).double()  # type: ignore[return-value]


def written_out(folded: cl.Folded, x: Tensor, rules: list[str], offset: float = 0.0) -> Tensor:
    """Compute M x / D from the arrays, by the recurrence that the docstring of ``forms`` has."""
    x = x.flatten(1)
    d = torch.sqrt(x.square().sum(1) + offset**2)
    forms = folded.forms()
    assert len(forms) == len(rules)
    for form, rule in zip(forms, rules, strict=True):
        n = (x @ form * x).sum(1)
        if rule == "published":
            d = d + n
        elif rule == "projective":
            d = d + n / d
        else:
            d = torch.sqrt(d**2 + n)
    return (x @ folded.matrix().T / d[:, None]).view(-1, *folded.output_shape)


@both_forms
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_arrays_reproduce_the_fold_by_every_strategy(projective: bool, strategy: str) -> None:
    folded = cl.fold(network(projective), SHAPE, strategy=strategy)
    rules = ["projective"] * 2 if projective else ["published"]
    x = samples(SHAPE, torch.float64)
    assert relative_error(written_out(folded, x, rules), folded(x)) < 1e-12
    assert folded.matrix().dtype == folded.forms().dtype == torch.float64


@both_forms
def test_arrays_are_the_products_of_the_matrices_of_the_layers(projective: bool) -> None:
    model = network(projective)
    folded = cl.fold(model, SHAPE)
    first, second = matrix_of(model[0], SHAPE), matrix_of(model[2], (3, 4, 4))
    third = matrix_of(model[4], (4, 3, 3))
    # t/s grows by ‖x‖²/(2α·s), over t/s before it in the projective form; s is the product of all α/2.
    halves = 1.5 / 2, 1.5 / 2 * 0.8 / 2
    deep = second @ first
    one, two = first.T @ first / (3.0 * halves[0]), deep.T @ deep / (1.6 * halves[1])
    expected = torch.stack([one, two / halves[0]]) if projective else (one + two)[None]
    torch.testing.assert_close(folded.forms(), expected, rtol=1e-12, atol=1e-13 * expected.max())
    torch.testing.assert_close(folded.matrix(), third @ deep / halves[1], rtol=1e-12, atol=1e-12)


@both_forms
def test_arrays_with_an_offset_and_root_mean_squares(projective: bool) -> None:
    folded = cl.fold(network(projective, offset=0.7, unit="rms"), SHAPE)
    rules = ["projective"] * 2 if projective else ["published"]
    x, offset = samples(SHAPE, torch.float64), 0.7 * math.sqrt(math.prod(SHAPE))
    assert folded.recipe.operations[0].offset == pytest.approx(offset)  # type: ignore[attr-defined]
    assert relative_error(written_out(folded, x, rules, offset), folded(x)) < 1e-12


def test_different_rules_have_forms_of_their_own() -> None:
    folded = cl.fold(network(last=cl.Gnomonic(0.8)), SHAPE, strategy="layers")
    x = samples(SHAPE, torch.float64)
    assert relative_error(written_out(folded, x, ["published", "gnomonic"]), folded(x)) < 1e-12


def test_no_activation_means_no_form() -> None:
    folded = cl.fold(cl.ConformalLayers(cl.Linear(5, 3)).double(), (5,))
    assert folded.forms().shape == (0, 5, 5)
    x = samples((5,), torch.float64)
    assert relative_error(written_out(folded, x, []), folded(x)) < 1e-12


@both_forms
def test_bias_behind_the_last_activation_is_what_zero_gives(projective: bool) -> None:
    model = nn.Sequential(network(projective), nn.Flatten(), nn.Linear(18, 4).double())
    folded = cl.fold(model, SHAPE, strategy="dense")
    rules = ["projective"] * 2 if projective else ["published"]
    x, bias = samples(SHAPE, torch.float64), folded(torch.zeros(1, *SHAPE, dtype=torch.float64))
    assert bool(bias.any())
    assert relative_error(written_out(folded, x, rules) + bias, folded(x)) < 1e-12


def test_arrays_of_a_float32_fold_and_of_a_file(tmp_path: Path) -> None:
    model = network().float()
    for folded in folds(model, SHAPE).values():
        cl.save(folded, tmp_path / "fold.safetensors")
        loaded = cl.load(tmp_path / "fold.safetensors")
        assert isinstance(loaded, cl.Folded)
        assert torch.equal(loaded.matrix(), folded.matrix())
        assert torch.equal(loaded.forms(), folded.forms())
        x = samples(SHAPE, torch.float64)
        expected = exact_output(model, x)
        assert relative_error(written_out(folded, x, ["published"]), expected) < 5e-6


def test_arrays_under_inference_mode_are_ordinary_tensors() -> None:
    folded = cl.fold(network(), SHAPE)
    with torch.inference_mode():
        matrix, forms = folded.matrix(), folded.forms()
    assert not matrix.is_inference()
    assert not forms.is_inference()


def test_layers_around_the_part_are_not_in_its_matrix() -> None:
    part = network()
    centre = cl.Centre(SHAPE)
    centre.fit(torch.rand(1, *SHAPE))
    head = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(18, 3))
    model = nn.Sequential(centre, part, head).double()
    torch.testing.assert_close(
        cl.fold(model, SHAPE).matrix(), cl.fold(part, SHAPE).matrix(), rtol=1e-12, atol=1e-12
    )


# -- refusals ---------------------------------------------------------------------------------------


def refusal_of(folded: cl.Folded, match: str) -> None:
    with pytest.raises(cl.ConformalError, match=rf"Folded.matrix\(\): expected .*{match}"):
        folded.matrix()
    with pytest.raises(cl.ConformalError, match=rf"Folded.forms\(\): expected .*{match}"):
        folded.forms()


INSIDE = "got biases, branches or homogeneous maps inside"


def test_maps_biases_and_branches_are_refused() -> None:
    first, last = (cl.Linear(4, 4), cl.ReSPro()), (cl.Linear(4, 4), cl.ReSPro())
    biased, residual = cl.Linear(4, 4, bias=True), cl.Residual(cl.Linear(4, 4), cl.ReSPro())
    for layers in ([nn.ReLU()], [nn.ReLU(), *last], [biased, *last], [residual, *last], [biased]):
        model = cl.ConformalLayers(*first, *layers)
        for strategy in ("dense", "layers"):
            refusal_of(cl.fold(model, (4,), strategy=strategy), INSIDE)


def test_several_parts_are_refused() -> None:
    first, second = (cl.ConformalLayers(cl.Linear(4, 4), cl.ReSPro()) for _ in range(2))
    refusal_of(cl.fold(nn.Sequential(first, nn.ReLU(), second), (4,)), "2 folded parts")


def test_arrays_that_do_not_fit_are_refused() -> None:
    layers = cl.Conv2d(3, 1, 3, stride=2), cl.ReSPro()
    large = cl.fold(cl.ConformalLayers(*layers), (3, 64, 64), strategy="layers")
    refusal_of(large, "a sample has 12288 coefficients, a written-out form at most 8192")
    deep = [module for _ in range(9) for module in (cl.Conv2d(1, 1, 1), cl.ReSPro(projective=True))]
    many = cl.fold(cl.ConformalLayers(*deep), (1, 90, 90), strategy="layers")
    with pytest.raises(cl.ConformalError, match="9 forms have 590490000 entries"):
        many.forms()
