"""The torch runtime: chunks, states, precisions and layouts."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from cases import ALPHAS
from conformallayers.recipe.torch.module import RecipeModule
from nets import SHAPE, circular_net, conv_stack
from oracle import exact_output, relative_error
from recipe_cases import RECIPE_CASES, RecipeCase
from support import DTYPES, folds, samples

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("name", ["dense", "banded", "conv", "layers"])
def test_large_batches_run_in_chunks_with_the_same_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = conv_stack(2, channels=4)
    folded = cl.fold(model, (3, 12, 12), strategy=name)
    x = torch.rand(50, 3, 12, 12)
    expected = folded(x)
    assert expected.is_contiguous()  # so that it can be viewed
    sizes = []
    run = folded._run
    monkeypatch.setattr(folded, "_run", lambda x: sizes.append(len(x)) or run(x))
    folded.chunk_size = 8
    assert cl.testing.relative_error(folded(x), expected) < 5e-6
    assert sizes == [8] * 6 + [2]
    x.requires_grad_()
    folded(x).sum().backward()
    assert x.grad is not None
    assert bool((x.grad != 0).flatten(1).any(1).all())


def inputs(batch: int = 5, seed: int = 0) -> Tensor:
    return samples(SHAPE, torch.float32, batch, seed).abs()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_autocast_to_half_precision(alpha: str | float | None, dtype: torch.dtype) -> None:
    model, x = circular_net(alpha), inputs()
    with torch.autocast("cpu", dtype=dtype):
        trained = model(x)
        trained.float().square().sum().backward()
        wanted = exact_output(model, x)
        with torch.no_grad():
            evaluated = model.eval()(x)
            results = {name: folded(x) for name, folded in folds(model, SHAPE).items()}
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )
    for name, y in {"train": trained, "eval": evaluated, **results}.items():
        assert y.dtype == dtype, name
        assert relative_error(y.reshape(1, -1), wanted.reshape(1, -1)) <= 1e-2, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_on_pixels_of_0_to_255(dtype: torch.dtype) -> None:
    model = circular_net().to(dtype)
    x = (inputs() * 100).clamp(0, 255).to(dtype)
    assert x.double().flatten(1).norm(dim=1).square().min() > torch.finfo(torch.float16).max
    assert cl.functional.embed(x)[1].dtype == torch.float32
    wanted, tolerance = exact_output(model, x), 1e-2 if dtype == torch.float16 else 2e-2
    assert relative_error(model(x), wanted) <= tolerance
    with torch.no_grad():
        assert relative_error(model.eval()(x), wanted) <= tolerance
        for name, folded in folds(model, SHAPE).items():
            y = folded(x)
            assert y.dtype == dtype
            assert relative_error(y, wanted) <= tolerance, name
        single = cl.fold(circular_net(), SHAPE).to(dtype)
        assert relative_error(single(x), wanted) <= 2 * tolerance


def test_maps_and_kernels_of_one_channel() -> None:
    """Torch convolves and normalises them wrongly in strides that count as channels-last, such as (27, 1, 3, 1)."""
    model = nn.Sequential(nn.Conv2d(2, 1, 3), nn.ReLU(), nn.Conv2d(1, 4, (1, 3), (1, 2)))
    normed = nn.Sequential(nn.Conv2d(2, 1, 1), nn.GroupNorm(1, 1))
    nn.init.constant_(normed[0].weight, 0.03)
    nn.init.ones_(normed[0].bias)
    x = torch.randn(3, 2, 10, 6)
    for order in (torch.contiguous_format, torch.channels_last):
        folded = cl.fold(model.to(memory_format=order), (2, 10, 6))
        expected = copy.deepcopy(model).double()(x.double())
        assert relative_error(folded(x), expected) < 2e-6
    expected = copy.deepcopy(normed).double()(x.double())
    assert relative_error(cl.fold(normed, (2, 10, 6))(x), expected) < 5e-6


def test_channels_last_and_strided_inputs() -> None:
    model, x = circular_net(), inputs()
    wanted = exact_output(model, x)
    wide = torch.zeros(5, 4, 6, 12)
    wide[:, ::2, :, ::2] = x
    layouts = {
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "permuted": x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        "sliced": wide[:, ::2, :, ::2],
        "expanded": x[:1].expand(5, -1, -1, -1),
    }
    for name, layout in layouts.items():
        target = wanted if name != "expanded" else wanted[:1].expand(5, -1)
        for module in (
            copy.deepcopy(model),
            copy.deepcopy(model).requires_grad_(False).eval(),
            *folds(model, SHAPE).values(),
        ):
            assert relative_error(module(layout), target) <= 5e-6, name
    model = model[:4].to(memory_format=torch.channels_last)
    assert model(layouts["channels_last"]).is_contiguous(memory_format=torch.channels_last)


every_case = pytest.mark.parametrize("case", RECIPE_CASES, ids=lambda case: case.name)


def module_of(case: RecipeCase, dtype: torch.dtype) -> RecipeModule:
    recipe = case.build()
    kept = recipe.fixed_dtypes()
    return RecipeModule(
        recipe.with_constants(lambda name, array: array if name in kept else array.to(dtype)), dtype
    )


@every_case
def test_every_operation_runs_in_both_dtypes(case: RecipeCase) -> None:
    results = {}
    for dtype in DTYPES:
        run = module_of(case, dtype)
        assert run.dtype == dtype
        x = samples(run.input_shape, dtype, batch=3)
        results[dtype] = run(x)
        assert results[dtype].dtype == dtype
        assert results[dtype].shape == (3, *run.output_shape)
        assert run(x[:0]).shape == (0, *run.output_shape)
        assert torch.equal(copy.deepcopy(run)(x), results[dtype])
        assert torch.equal(pickle.loads(pickle.dumps(run))(x), results[dtype])
    assert relative_error(results[torch.float32], results[torch.float64]) <= 1e-4


@pytest.mark.sampled(4)
@every_case
def test_constants_of_a_fixed_dtype_keep_it(case: RecipeCase) -> None:
    run = module_of(case, torch.float64).to(torch.float32)
    assert run.dtype == torch.float32
    for name, array in run.recipe.constants.items():
        expected = run.recipe.fixed_dtypes().get(name, "float32")
        assert array.dtype == getattr(torch, expected)
    x = samples(run.input_shape, torch.float32, batch=3)
    assert torch.equal(run(x), module_of(case, torch.float32)(x))


@pytest.mark.sampled(4)
@every_case
def test_the_state_of_a_recipe_comes_back(case: RecipeCase) -> None:
    run, other = (module_of(case, torch.float64) for _ in range(2))
    with torch.no_grad():
        for array in other.constants.buffers():
            array.copy_(array / 2)
    assert not list(run.parameters())
    other.load_state_dict(run.state_dict(), strict=True)
    x = samples(run.input_shape, torch.float64, batch=3)
    assert torch.equal(other(x), run(x))
    assert str(other.recipe) == str(run.recipe)


def test_the_state_of_another_recipe_is_refused() -> None:
    run, other = (
        module_of(next(c for c in RECIPE_CASES if c.name == name), torch.float64)
        for name in ("slice", "reshape")
    )
    for state in (other.get_extra_state(), torch.tensor(list(b"[]"), dtype=torch.uint8)):
        with pytest.raises(cl.ConformalError, match=r"Fold it again, or use cl\.save"):
            run.set_extra_state(state)


@pytest.mark.parametrize("fill", ["equal", "random"])
def test_large_maps_keep_their_digits(fill: str) -> None:
    model = cl.ConformalLayers(
        *(cl.Conv2d(3, 8, 3, padding=1), cl.ReSPro()),
        *(cl.Conv2d(8, 8, 3, padding=1), cl.ReSPro(projective=True), cl.AvgPool2d(100)),
    )
    x = torch.full((1, 3, 300, 301), 0.37) if fill == "equal" else torch.rand(1, 3, 300, 301)
    expected = exact_output(model, x)
    folded = cl.fold(model, (3, 300, 301), strategy="layers")
    assert relative_error(folded(x), expected) < 2e-6
    channels_last = x.contiguous(memory_format=torch.channels_last)
    assert relative_error(folded(channels_last), expected) < 2e-6
    layers = model.train()[:-1]
    expected = exact_output(layers, x)
    assert relative_error(layers(x).detach(), expected) < 2e-6
