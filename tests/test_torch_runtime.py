"""What torch does around a module: compilers, precisions, layouts, threads and files."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

import conformallayers as cl
from conformallayers.recipe.torch.module import RecipeModule
from oracle import exact, gradient_error, oracle, randomise, relative_error
from support import folds, samples

SHAPE = (2, 6, 6)


def small(alpha: str | float | None = None) -> cl.ConformalLayers:
    model = cl.ConformalLayers(
        cl.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
        cl.ReSPro(alpha),
        cl.Conv2d(4, 3, 3),
        cl.ReSPro(alpha, projective=True),
        cl.Flatten(),
        cl.Linear(48, 4),
    )
    return randomise(model, 4)


def inputs(batch: int = 5, seed: int = 0) -> Tensor:
    return samples(SHAPE, torch.float32, batch, seed).abs()


def expected(model: cl.ConformalLayers, x: Tensor) -> Tensor:
    return oracle(exact(model).eval(), x.double()).detach()


# -- torch.compile and torch.export -----------------------------------------------------------


@pytest.fixture
def dynamo() -> Iterator[None]:
    """Start from an empty compiler, and count anew."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


# torch's own compiler warns about itself.
compiles = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute"
)


@compiles
@pytest.mark.usefixtures("dynamo")
def test_compiled_training_with_gradients() -> None:
    model = small("learned")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for batch in (16, 20, 33):  # torch's convolutions make their own difference below 16
        x = inputs(batch).requires_grad_()
        y = compiled(x)
        twin, wide = exact(model), x.detach().double().requires_grad_()
        wanted = oracle(twin, wide)
        assert relative_error(y, wanted) <= 5e-6
        actual = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
        found = torch.autograd.grad(wanted.square().sum(), [wide, *twin.parameters()])
        assert gradient_error(list(actual), list(found)) <= 1e-4
    assert counters["stats"]["unique_graphs"] <= 2  # one for the first size, one for all others
    assert not counters["graph_break"]


@compiles
@pytest.mark.usefixtures("dynamo")
def test_compiled_training_advances_spectral_norms() -> None:
    model, plain = small("spectral"), small("spectral")
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        y = compiled(inputs(4, step))
        assert relative_error(y, plain(inputs(4, step))) <= 5e-6
        assert torch.allclose(model[1].norm, plain[1].norm, rtol=1e-5)
        assert model[1].norm > 0


@compiles
@pytest.mark.usefixtures("dynamo")
def test_compiled_folds_do_not_recompile_over_batch_sizes() -> None:
    model = nn.Sequential(small(), nn.ReLU(), nn.Linear(4, 2))
    for name, folded in folds(model, SHAPE).items():
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(folded, backend="aot_eager", fullgraph=True, dynamic=True)
        for batch in (17, 64, 20):
            x = inputs(batch).requires_grad_()
            pair = compiled(x), folded(x)
            assert relative_error(*pair) <= 5e-6, name
            gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in pair]
            assert gradient_error(gradients[:1], [gradients[1].double()]) <= 1e-5, name
        assert counters["stats"]["unique_graphs"] == 1, name


@compiles
@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
def test_inductor_trains_and_runs_folds() -> None:
    model, x = small(), inputs(16)
    y = torch.compile(model, fullgraph=True)(x)
    y.square().sum().backward()
    assert relative_error(y, expected(model, x)) <= 5e-6
    for folded in folds(model, SHAPE).values():
        assert relative_error(torch.compile(folded, fullgraph=True)(x), y) <= 1e-5


@compiles
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_batch(strict: bool) -> None:
    model = small()
    options = {"dynamic_shapes": ({0: torch.export.Dim("batch")},), "strict": strict}
    for folded in folds(model, SHAPE).values():
        program = torch.export.export(folded, (inputs(),), **options).module()
        for batch in (1, 5, 9):
            assert relative_error(program(inputs(batch)), expected(model, inputs(batch))) <= 5e-6
    layers = torch.export.export(model.eval(), (inputs(),), **options).module()
    assert relative_error(layers(inputs(7)), expected(model, inputs(7))) <= 5e-6


# -- precisions -------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", cl.testing.ALPHAS)
def test_autocast_to_bfloat16(alpha: str | float | None) -> None:
    model, x = small(alpha), inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained = model(x)
        trained.float().square().sum().backward()
        wanted = expected(model, x)
        with torch.no_grad():
            evaluated = model.eval()(x)
            results = {name: folded(x) for name, folded in folds(model, SHAPE).items()}
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )
    for name, y in {"train": trained, "eval": evaluated, **results}.items():
        assert relative_error(y.reshape(1, -1), wanted.reshape(1, -1)) <= 1e-2, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_on_pixels_of_0_to_255(dtype: torch.dtype) -> None:
    model = small().to(dtype)
    x = (inputs() * 100).clamp(0, 255).to(dtype)
    assert x.double().flatten(1).norm(dim=1).square().min() > torch.finfo(torch.float16).max
    assert cl.functional.embed(x)[1].dtype == torch.float32
    wanted, tolerance = expected(model, x), 1e-2 if dtype == torch.float16 else 2e-2
    assert relative_error(model(x), wanted) <= tolerance
    with torch.no_grad():
        assert relative_error(model.eval()(x), wanted) <= tolerance
        for name, folded in folds(model, SHAPE).items():
            y = folded(x)
            assert y.dtype == dtype
            assert relative_error(y, wanted) <= tolerance, name
        single = cl.fold(small(), SHAPE).to(dtype)
        assert relative_error(single(x), wanted) <= 2 * tolerance


def test_fold_to_another_dtype() -> None:
    model = small()
    for dtype in (torch.float64, torch.float16):
        folded = cl.fold(model, SHAPE, dtype=dtype)
        assert folded.dtype == dtype
        x = inputs().to(dtype)
        assert relative_error(folded(x), expected(model, x)) <= cl.testing.TOLERANCES[dtype]


# -- layouts ----------------------------------------------------------------------------------


def test_channels_last_and_strided_inputs() -> None:
    model, x = small(), inputs()
    wanted = expected(model, x)
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


# -- threads, processes, files ----------------------------------------------------------------


def test_threads_evaluate_one_model_at_once() -> None:
    model = small().eval()
    batches = [inputs(3 + index % 3, index) for index in range(12)]
    wanted = [expected(model, x) for x in batches]
    errors: list[float] = []
    start = threading.Barrier(len(batches))

    def work(index: int) -> None:
        start.wait()
        with torch.no_grad():
            for _ in range(5):
                errors.append(relative_error(model(batches[index]), wanted[index]))
                model.unfold()  # let the others fold again in the middle of things

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 5 * len(batches)
    assert max(errors) <= 5e-6


def test_threads_fold_once(made: list[RecipeModule]) -> None:
    model, x = small().eval(), inputs()
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        with torch.no_grad():
            model(x)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_shared_memory() -> None:
    model, x = small(), inputs()
    wanted = expected(model, x)
    model.share_memory()
    assert all(p.is_shared() for p in model.parameters())
    assert relative_error(model(x), wanted) <= 5e-6
    with torch.no_grad():
        assert relative_error(model.eval()(x), wanted) <= 5e-6


@pytest.mark.parametrize("alpha", cl.testing.ALPHAS)
def test_equal_seeds_equal_runs(alpha: str | float | None) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            model = cl.ConformalLayers(cl.Conv2d(2, 4, 3), cl.ReSPro(alpha), cl.Dropout(0.2))
            optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimiser.zero_grad()
                model(inputs(4, step)).square().sum().backward()
                optimiser.step()
            with torch.no_grad():
                runs.append([*model.state_dict().values(), model.eval()(inputs())])
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_seed_is_left_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    model = small("spectral")
    torch.manual_seed(5)
    model(inputs())
    cl.fold(model, SHAPE)
    assert torch.equal(torch.rand(3), wanted)


def test_safetensors(tmp_path: Path) -> None:
    model, other, x = small("learned"), randomise(small("learned"), 9), inputs()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert relative_error(other(x), expected(model, x)) <= 5e-6


def test_floating_point_operations_are_counted() -> None:
    model = small()
    # 2·4·9 multiplications for each of 36 pixels, 4·3·9 for 16, and a 4 × 48 matrix; 5 samples
    layers = 2 * 5 * (4 * 2 * 9 * 36 + 3 * 4 * 9 * 16 + 4 * 48)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(inputs())
    assert counter.get_total_flops() == layers
    folded = cl.fold(model, SHAPE, strategy="dense")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        folded(inputs())
    assert counter.get_total_flops() >= 2 * 5 * (4 + 2) * 72  # M, and a row of each form
