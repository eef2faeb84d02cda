"""The pure functions on (x, t), against numpy in float64."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import conformallayers as cl
from conformallayers import functional as CF

WIDE = [torch.float64, torch.float32]
EVERY = [*WIDE, torch.bfloat16, torch.float16]
RTOL = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHAPES = [(6,), (2, 5), (3, 4, 4), (2, 2, 3, 2)]


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def rows(x):
    """Return what the tensor holds, in float64, one sample a row."""
    return x.detach().double().flatten(1).numpy()


def assert_rows(actual, expected, rtol):
    gap = np.linalg.norm(rows(actual) - expected, axis=1)
    assert (gap <= rtol * np.linalg.norm(expected, axis=1)).all()


def wider(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def activated(activation, x, t, alpha, unit=1.0):
    """Apply an activation to points x and their coordinates."""
    factor, after = activation.activate(CF.squared_norm(x) / (alpha * unit) ** 2, t, alpha)
    return CF.scale_samples(x, factor), after


@pytest.mark.parametrize("projective", [False, True])
@pytest.mark.parametrize("alpha", [0.3, 7.0])
@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_function_follows_its_formula(shape, dtype, alpha, projective):
    x = normal(4, *shape, dtype=dtype)
    same, t = CF.embed(x)
    assert same is x
    assert t.dtype == wider(dtype)
    np.testing.assert_allclose(t.numpy(), np.linalg.norm(rows(x), axis=1), rtol=RTOL[dtype])
    t = torch.tensor([0.25, 1.0, 1.5, 40.0], dtype=wider(dtype))
    x_out, t_out = CF.respro(x, t, alpha, projective=projective)
    assert torch.equal(x_out, x)
    assert t_out.dtype == wider(dtype)
    energy, old = np.square(rows(x)).sum(1), t.double().numpy()
    expected = alpha / 2 * old + energy / (2 * alpha * (old if projective else 1.0))
    np.testing.assert_allclose(t_out.numpy(), expected, rtol=min(RTOL[dtype], 2e-6))
    y = CF.project(x_out, t_out)
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert_rows(y, rows(x) / expected[:, None], RTOL[dtype])
    # The same step of points: x stands for the pair (t·x, t).
    y, after = activated(cl.ReSPro(projective=projective), x, t.double(), alpha)
    expected = alpha / 2 * old + old**2 * energy / (2 * alpha * (old if projective else 1.0))
    np.testing.assert_allclose(after.numpy(), expected, rtol=2e-6)
    assert y.dtype == dtype
    assert_rows(y, (old / expected)[:, None] * rows(x), RTOL[dtype])


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1e-12, 0.7, 1e12])
@pytest.mark.parametrize("dtype", EVERY)
def test_length_with_an_offset(dtype, offset, as_tensor):
    x = normal(5, 2, 3, dtype=dtype)
    largest = 1e3 if dtype == torch.float16 else 1e12
    scale = torch.tensor([1.0, 0.0, 1 / largest, largest, math.nan], dtype=torch.float64)
    x = (x.double() * scale[:, None, None]).to(dtype)
    c = torch.tensor(offset, dtype=torch.float64) if as_tensor else offset
    t = CF.length(x, c)
    assert t.dtype == torch.float64
    assert torch.isnan(t).tolist() == [False] * 4 + [True]
    expected = np.hypot(np.linalg.norm(rows(x[:4]), axis=1), offset)
    np.testing.assert_allclose(t[:4].numpy(), expected, rtol=2e-6)
    assert t[1] == offset


def test_length_of_zeros_has_a_gradient_of_0():
    zero = torch.zeros((), requires_grad=True, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(CF.length(torch.zeros(2, 3), zero).sum(), zero)
    assert gradient == 0


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("shape", [(1500,), (2048,), (2049,), (3, 64, 61), (2, 700, 701), (2**20,)])
def test_long_samples_lose_no_digits(shape, dtype):
    equal = torch.full((2, *shape), 0.37, dtype=dtype)  # rounding of equal squares adds up
    mixed = equal + 0.2 * normal(2, *shape, dtype=dtype)
    maps = [m.contiguous(memory_format=torch.channels_last) for m in (equal, mixed) if m.dim() == 4]
    # Samples side by side in memory, as a transposed product leaves them.
    strided = [m.movedim(0, -1).contiguous().movedim(-1, 0) for m in (equal, mixed)]
    for z in (equal, mixed, *maps, *strided):
        expected = np.square(np.ascontiguousarray(rows(z))).sum(1)
        tolerance = {torch.float32: 2e-6, torch.float64: 1e-13}[dtype]
        for n in (CF.norm(z).square(), CF.squared_norm(z)):
            np.testing.assert_allclose(n.numpy(), expected, rtol=tolerance)
        np.testing.assert_allclose(CF.embed(z)[1].numpy(), np.sqrt(expected), rtol=tolerance)


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2)])
def test_first_and_second_derivatives(shape):
    z = normal(3, *shape, seed=5).requires_grad_()
    tau = torch.tensor([0.4, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    rho = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    cases = [
        (CF.embed, (z,)),
        (CF.length, (z, rho)),
        (CF.squared_norm, (z,)),
        (trained, (z,)),
        (partial(activated, cl.Gnomonic(), unit=3.0), (z, tau, rho)),
        (partial(activated, cl.ReSPro()), (z, tau, rho)),
        (CF.project, (z, tau)),
        (lambda z, t, a: CF.respro(z, t, a), (z, tau, rho)),
        (lambda z, t, a: CF.respro(z, t, a, projective=True), (z, tau, rho)),
    ]
    for function, inputs in cases:
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def whole(x, alpha=1.5, projective=False):
    """Run embed, respro and project, as the paper writes them."""
    return CF.project(*CF.respro(*CF.embed(x), alpha, projective=projective))


def trained(x, alpha=1.5, projective=False):
    """Run the layers as they train."""
    return cl.ConformalLayers(cl.ReSPro(alpha, projective=projective))(x)


def expected_point(x, alpha=1.5, projective=False):
    x = rows(x)
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    return x / norm / (alpha / 2 + (1.0 if projective else norm) / (2 * alpha))


chains = pytest.mark.parametrize("chain", [whole, trained])
forms = pytest.mark.parametrize("projective", [False, True], ids=["published", "projective"])


@chains
@forms
@pytest.mark.parametrize("dtype", EVERY)
def test_zero_sample_gives_zero_with_zero_gradient(chain, projective, dtype):
    x = normal(3, 2, 3, dtype=dtype)
    x[1] = 0
    x.requires_grad_()
    y = chain(x, projective=projective)
    y.float().square().sum().backward()
    assert not y[1].any()
    assert not x.grad[1].any()
    assert x.grad.isfinite().all()
    assert x.grad[0].any()
    assert_rows(y[::2], expected_point(x[::2], projective=projective), RTOL[dtype])


@chains
@forms
@pytest.mark.parametrize("dtype", EVERY)
def test_nan_stays_in_its_sample(chain, projective, dtype):
    x = normal(3, 2, 3, dtype=dtype)
    clean = chain(x, projective=projective)
    x[1, 0, 2] = math.nan
    y = chain(x, projective=projective)
    assert torch.equal(y[::2], clean[::2])
    assert y[1, 0, 2].isnan()
    if chain is trained:
        assert y[1].isnan().all()


@pytest.mark.parametrize("dtype", WIDE)
def test_only_the_projective_form_is_scale_invariant_and_bounded(dtype):
    directions = normal(50, 4, seed=6, dtype=dtype)
    directions /= torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    for alpha in (0.2, 1.0, 5.0):
        reference = whole(directions, alpha, projective=True)
        for norm in (1e-3, 0.5, 1.0, 2.0, 1e3):
            x = directions * norm
            y = whole(x, alpha, projective=True)
            assert_rows(y, rows(reference), 3 * RTOL[dtype])
            assert np.linalg.norm(rows(y), axis=1).max() <= 1 + RTOL[dtype]
            published = np.linalg.norm(rows(whole(x, alpha)), axis=1)
            if norm >= 1:
                assert published.max() <= 1 + RTOL[dtype]
            if norm != 1:
                assert np.abs(published / np.linalg.norm(rows(y), axis=1) - 1).min() > 1e-3
    # t < 1 breaks the published bound: ‖x‖ = t = 0.5 and α = 0.5 give 0.5/(0.125 + 0.25).
    broken = np.linalg.norm(rows(whole(directions * 0.5, 0.5)), axis=1)
    np.testing.assert_allclose(broken, 4 / 3, rtol=RTOL[dtype] * 5)


@forms
def test_direction_of_the_output_is_linear_in_the_input(projective):
    torch.manual_seed(3)
    layers = [cl.Conv2d(2, 3, 3, padding=1), cl.Conv2d(3, 4, 2), cl.AvgPool2d(2)]
    activations = [cl.ReSPro(alpha, projective=projective) for alpha in (None, 0.7)]
    model = cl.ConformalLayers(layers[0], activations[0], layers[1], activations[1], layers[2])
    x = normal(2, 2, 6, 6, seed=7)
    x = torch.stack([x[0], x[1], 2 * x[0] - 3 * x[1], -x[0], 5 * x[0]])
    y, straight = rows(model.double()(x)), rows(torch.nn.Sequential(*layers)(x))
    factors = np.linalg.norm(y, axis=1, keepdims=True) / np.linalg.norm(straight, axis=1)[:, None]
    assert_rows(torch.from_numpy(y), factors * straight, 1e-12)
    # One scalar a sample, even in x, and not the same for all samples.
    assert factors[3] == pytest.approx(factors[0], rel=1e-12)
    assert factors[1] != pytest.approx(factors[0], rel=1e-3)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_norm_pool_is_that_of_torch(axes, ceil_mode):
    x = normal(2, 3, *(7, 6, 5)[:axes]).requires_grad_()
    kernel, stride = (3, 2, 2)[:axes], (2, 3, 1)[:axes]
    sizes = (kernel[0], stride[0]) if axes == 1 else (kernel, stride)
    pool = getattr(torch.nn, f"LPPool{axes}d")(2, *sizes, ceil_mode)
    assert torch.allclose(CF.norm_pool(x, kernel, stride, ceil_mode), pool(x), rtol=1e-14)
    assert torch.autograd.gradcheck(lambda x: CF.norm_pool(x, kernel, stride, ceil_mode), x)


def test_norms_of_windows_of_zeros_have_a_gradient_of_0():
    x = torch.tensor([[[0.6e12, 0.8e12, 0.0, 0.0, 1.0, 0.0]]], requires_grad=True)
    y = CF.norm_pool(x, (2,), (2,))
    assert y[0, 0].tolist() == pytest.approx([1e12, 0.0, 1.0])
    y.sum().backward()
    assert x.grad[0, 0].tolist() == pytest.approx([0.6, 0.8, 0.0, 0.0, 1.0, 0.0])
