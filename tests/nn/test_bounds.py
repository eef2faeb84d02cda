"""Bounds of operator norms and the radii made from them, against explicit matrices and their SVD."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import conformallayers as cl
from conformallayers.nn import bounds
from conformallayers.nn.branches import Composite
from conformallayers.nn.extra_layers import ChannelScale, Rescale
from conformallayers.nn.homogeneous import Channels
from conformallayers.nn.registry import _SPECS

WIDE = [torch.float64, torch.float32]
RTOL = {torch.float64: 1e-12, torch.float32: 5e-6}
LARGEST = {1: 9, 2: 5, 3: 3}
PADS = ["ZeroPad", "ConstantPad", "ReflectionPad", "ReplicationPad", "CircularPad"]
NUMPY_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
ranks = pytest.mark.parametrize("n", [1, 2, 3])
some = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def materialise(module, shape):
    """Return the matrix of a linear module, in float64 and evaluation mode."""
    module = copy.deepcopy(module).double().eval()
    with torch.no_grad():
        images = module(torch.eye(math.prod(shape), dtype=torch.float64).view(-1, *shape))
    return images.flatten(1).T.numpy()


def bound_of(module, shape):
    return cl.trace(cl.ConformalLayers(module), shape).steps[0].bound


def norm_of(matrix):
    return np.linalg.svd(matrix, compute_uv=False)[0]


def schur(matrix):
    return math.sqrt(np.abs(matrix).sum(0).max() * np.abs(matrix).sum(1).max())


def checked(module, shape):
    """Check that the bound is one; return it and the matrix."""
    matrix, bound = materialise(module, shape), bound_of(module, shape)
    assert isinstance(bound, float)
    assert norm_of(matrix) <= bound * (1 + 1e-12)
    return bound, matrix


def drawn(data, n, low, high):
    return tuple(data.draw(st.integers(low, high)) for _ in range(n))


def randomised(module, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    weight = torch.from_numpy(rng.normal(size=module.weight.shape))
    with torch.no_grad():
        module.weight.copy_(weight.sign() if data.draw(st.booleans()) else weight)
    return module.to(data.draw(st.sampled_from(WIDE)))


def young(weight, groups=1):
    """Write A[o, i] = ‖w[o, i]‖₁ out as a whole matrix, zeros between groups included."""
    kernels = weight.detach().double().numpy()
    rows, columns = kernels.shape[0] // groups, kernels.shape[1]
    A = np.zeros((kernels.shape[0], columns * groups))
    for o in range(kernels.shape[0]):
        for i in range(columns):
            A[o, o // rows * columns + i] = np.abs(kernels[o, i]).sum()
    return schur(A)


@ranks
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@some
@given(data=st.data())
def test_convolution(n, data):
    shape = drawn(data, n, 1, LARGEST[n])
    mode = data.draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    kernel, dilation = drawn(data, n, 1, 3), drawn(data, n, 1, 2)
    same = data.draw(st.booleans())
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    limits = [{"reflect": s - 1, "circular": s}.get(mode, 3) for s in shape]
    if same:
        padding, stride = "same", 1
        pads = [(r // 2, r - r // 2) for r in reach]
        assume(all(after <= limit for (_, after), limit in zip(pads, limits, strict=True)))
    else:
        padding = tuple(data.draw(st.integers(0, min(limit, 3))) for limit in limits)
        stride, pads = drawn(data, n, 1, 3), [(p, p) for p in padding]
        assume(all(s + 2 * p > r for s, p, r in zip(shape, padding, reach, strict=True)))
    groups, inner, outer = drawn(data, 3, 1, 2)
    convolution = getattr(cl, f"Conv{n}d")(
        groups * inner, groups * outer, kernel, stride, padding, dilation, groups, padding_mode=mode
    )
    module = randomised(convolution, data)
    bound, _ = checked(module, (groups * inner, *shape))
    copies = 1
    if mode in ("reflect", "replicate"):
        for size, pad in zip(shape, pads, strict=True):
            copies *= np.bincount(np.pad(np.arange(size), pad, NUMPY_MODES[mode])).max()
    if mode == "circular":
        assume(all(a + b <= r for (a, b), r in zip(pads, reach, strict=True)))
    assert bound == pytest.approx(young(module.weight, groups) * math.sqrt(copies), rel=1e-12)


@ranks
@some
@given(data=st.data())
def test_transposed_convolution(n, data):
    shape, kernel = drawn(data, n, 1, LARGEST[n]), drawn(data, n, 1, 3)
    stride, dilation, padding = drawn(data, n, 1, 3), drawn(data, n, 1, 2), drawn(data, n, 0, 2)
    extra = tuple(
        data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
    )
    sizes = zip(shape, kernel, stride, dilation, padding, extra, strict=True)
    assume(all((size - 1) * s - 2 * p + d * (k - 1) + e >= 0 for size, k, s, d, p, e in sizes))
    groups, inner, outer = drawn(data, 3, 1, 2)
    transposed = getattr(cl, f"ConvTranspose{n}d")(
        groups * inner, groups * outer, kernel, stride, padding, extra, groups, dilation=dilation
    )
    module = randomised(transposed, data)
    bound, _ = checked(module, (groups * inner, *shape))
    assert bound == pytest.approx(young(module.weight, groups), rel=1e-12)


@ranks
@some
@given(data=st.data())
def test_average_pooling(n, data):
    shape = drawn(data, n, 1, LARGEST[n])
    beyond = 0 if n == 3 else 2  # torch itself wants 3-D images as large as the kernel
    kernel = tuple(data.draw(st.integers(1, min(4, size + beyond))) for size in shape)
    stride = drawn(data, n, 1, 4) if data.draw(st.booleans()) else None
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    ceil, include = data.draw(st.booleans()), data.draw(st.booleans())
    sizes = zip(shape, kernel, stride or kernel, padding, strict=True)
    assume(all(size + 2 * p - k + (s - 1) * ceil >= 0 for size, k, s, p in sizes))
    override = data.draw(st.none() | st.integers(1, 5)) if n > 1 else None
    options = {} if n == 1 else {"divisor_override": override}
    pool = getattr(cl, f"AvgPool{n}d")(kernel, stride, padding, ceil, include, **options)
    bound, matrix = checked(pool, (1, *shape))
    if include and override is None:
        assert bound == 1
    else:
        assert bound == pytest.approx(schur(matrix), rel=1e-12)


@ranks
@some
@given(data=st.data())
def test_adaptive_pooling(n, data):
    shape = drawn(data, n, 1, LARGEST[n])
    sizes = st.integers(1, 7 - n) if n == 1 else st.none() | st.integers(1, 7 - n)
    wanted = data.draw(st.integers(1, 7 - n) | st.tuples(*[sizes] * n))
    bound, matrix = checked(getattr(cl, f"AdaptiveAvgPool{n}d")(wanted), (2, *shape))
    assert bound == pytest.approx(schur(matrix), rel=1e-12)


@ranks
@pytest.mark.parametrize("name", PADS)
@settings(some, max_examples=15)
@given(data=st.data())
def test_padding_modules_count_exactly_their_norm(n, name, data):
    shape = drawn(data, n, 2, LARGEST[n] + 1)
    pads = []
    for size in reversed(shape):
        low = 0 if name == "CircularPad" else -(size // 2)
        high = {"ReflectionPad": size - 1, "CircularPad": size}.get(name, 3)
        before = data.draw(st.integers(low, high))
        after = data.draw(st.integers(max(low, 1 - size // 2), high))
        pads += [before, after]
    arguments = (tuple(pads), 0.0) if name == "ConstantPad" else (tuple(pads),)
    bound, matrix = checked(getattr(nn, f"{name}{n}d")(*arguments), (1, *shape))
    assert bound == pytest.approx(norm_of(matrix), rel=1e-12)


@some
@given(data=st.data())
def test_linear_and_scale(data):
    features, outputs, rows = drawn(data, 3, 1, 6)
    module = randomised(cl.Linear(features, outputs), data)
    bound, _ = checked(module, (rows, features))
    assert bound == pytest.approx(schur(module.weight.detach().double().numpy()), rel=1e-12)
    gain = data.draw(st.floats(-8, 8, width=32))
    assert checked(cl.Scale(gain), (rows, features))[0] == abs(gain)


MOVES = {
    nn.Flatten: (nn.Flatten(), (2, 3)),
    nn.Unflatten: (nn.Unflatten(1, (2, 3)), (6, 2)),
    nn.Identity: (nn.Identity(), (2, 3)),
    nn.Dropout: (nn.Dropout(0.4), (2, 3)),
    nn.Dropout1d: (nn.Dropout1d(0.4), (2, 3)),
    nn.Dropout2d: (nn.Dropout2d(0.4), (2, 3, 2)),
    nn.Dropout3d: (nn.Dropout3d(0.4), (2, 3, 2, 2)),
    nn.PixelShuffle: (nn.PixelShuffle(2), (4, 2, 3)),
    nn.PixelUnshuffle: (nn.PixelUnshuffle(2), (1, 4, 2)),
    nn.ChannelShuffle: (nn.ChannelShuffle(2), (4, 2, 2)),
}


@pytest.mark.parametrize("kind", MOVES)
def test_modules_that_only_move_coefficients_count_one(kind):
    bound, matrix = checked(*MOVES[kind])
    assert bound == 1
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(len(matrix)), atol=1e-15)


def test_every_registered_kind_is_covered_here():
    named = ("Conv", "ConvTranspose", "AvgPool", "AdaptiveAvgPool", *PADS)
    covered = {getattr(nn, f"{name}{n}d") for name in named for n in (1, 2, 3)}
    linear = {kind for kind, spec in _SPECS.items() if not spec.homogeneous}
    own = {kind for kind in linear if kind.__module__.startswith(("torch.", "conformallayers.nn."))}
    # Bounds of these are compared with explicit matrices in test_conformance.
    elsewhere = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.Upsample, cl.RepeatChannels}
    own -= {*elsewhere, ChannelScale, Rescale, Channels, Composite}
    assert own == covered | {nn.Linear, cl.Scale} | set(MOVES)


def test_largest_column_sum_is_no_bound():
    conv = cl.Conv2d(3, 1, 1)
    nn.init.ones_(conv.weight)
    bound, matrix = checked(conv, (3, 4, 4))
    assert np.abs(matrix).sum(0).max() == 1
    assert norm_of(matrix) == pytest.approx(math.sqrt(3), rel=1e-12)
    assert bound == pytest.approx(math.sqrt(3), rel=1e-12)


def test_circular_padding_counts_outputs_that_wrap_round():
    conv = nn.Conv1d(1, 1, 1, padding=3, padding_mode="circular", bias=False)
    nn.init.ones_(conv.weight)
    bound, matrix = checked(conv, (1, 3))
    assert norm_of(matrix) == pytest.approx(math.sqrt(3), rel=1e-12)
    assert bound == pytest.approx(math.sqrt(3), rel=1e-12)


def plain_output(weight, x, alpha):
    """Run Conv1d(padding=1) and the published ReSPro as plain tensor operations."""
    image = F.conv1d(x, weight, padding=1)
    t = alpha / 2 * x.square().sum((1, 2)).sqrt() + image.square().sum((1, 2)) / (2 * alpha)
    return image / t[:, None, None]


@pytest.mark.parametrize("dtype", WIDE)
def test_gradient_flows_through_young(dtype):
    torch.manual_seed(0)
    model = cl.ConformalLayers(cl.Conv1d(2, 3, 3, padding=1, dtype=dtype), cl.ReSPro())
    x, direction = torch.randn(4, 2, 6, dtype=dtype), torch.randn(4, 3, 6, dtype=dtype)
    (model(x) * direction).sum().backward()
    gradients = []
    for through in (True, False):
        weight = model[0].weight.detach().double().requires_grad_()
        A = weight.abs().sum(2)
        alpha = (A.sum(0).max() * A.sum(1).max()).sqrt()
        y = plain_output(weight, x.double(), alpha if through else alpha.detach())
        gradients += torch.autograd.grad((y * direction.double()).sum(), weight)
    gap = [float((model[0].weight.grad - g).norm() / g.norm()) for g in gradients]
    assert gap[0] <= 2 * RTOL[dtype]
    assert gap[1] > 1e-2


@pytest.mark.parametrize(
    ("sizes", "mode", "scale"),
    [
        ((4, 4, 4), "nearest", 2),
        ((5, 3), "nearest-exact", (3, 1)),
        ((5, 4), "bilinear", 1.15),
        ((8,), "linear", 2.5),
    ],
)
def test_interpolation_is_bounded_by_its_matrix(sizes, mode, scale) -> None:
    layer = nn.Upsample(scale_factor=scale, mode=mode)
    bound, matrix = checked(layer, (1, *sizes))
    assert bound == pytest.approx(schur(matrix), rel=1e-12)


@pytest.mark.parametrize(
    "options", [{"scale_factor": 1.5}, {"size": 4}, {"scale_factor": 2, "mode": "bicubic"}]
)
def test_interpolation_without_a_simple_bound_is_refused(options) -> None:
    with pytest.raises(cl.ConformalError, match="whole scale_factor, got mode="):
        cl.ConformalLayers(nn.Upsample(**options))


def test_interpolation_of_a_long_signal_needs_no_matrix() -> None:
    """A matrix of this one would take 20 TB."""
    layer = nn.Upsample(scale_factor=1.5, mode="linear")
    assert 1 <= bounds.upsample_bound(layer, (1, 1_300_000)) ** 2 < 2


@ranks
@some
@given(data=st.data())
def test_maxima_and_norms_of_windows(n, data):
    """Single pixels reach the bound; the sum over windows of the energy in them never exceeds it."""
    shape = drawn(data, n, 1, LARGEST[n])
    kernel, stride, ceil = drawn(data, n, 1, 4), drawn(data, n, 1, 3), data.draw(st.booleans())
    if data.draw(st.booleans()):
        dilation = drawn(data, n, 1, 2)
        padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
        reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        assume(all(s + 2 * p >= r for s, p, r in zip(shape, padding, reach, strict=True)))
        pool = getattr(nn, f"MaxPool{n}d")
        module = pool(kernel, stride, padding, dilation, ceil_mode=ceil)
    else:
        assume(all(s >= k for s, k in zip(shape, kernel, strict=True)))
        sizes = (kernel[0], stride[0]) if n == 1 else (kernel, stride)
        module = getattr(nn, f"LPPool{n}d")(2, *sizes, ceil_mode=ceil)
    matrix = materialise(module, (1, *shape))
    assume(np.isfinite(matrix).all())  # a maximum over padding alone is refused
    bound = bound_of(module, (1, *shape))
    assert bound == pytest.approx(math.sqrt((matrix**2).sum(0).max()), rel=1e-12)
    x = np.random.default_rng(0).normal(size=(16, 1, *shape))
    images = module(torch.from_numpy(x)).flatten(1).norm(dim=1)
    assert (images <= bound * torch.from_numpy(x).flatten(1).norm(dim=1) * (1 + 1e-12)).all()


@ranks
@some
@given(data=st.data())
def test_adaptive_maxima(n, data):
    shape = drawn(data, n, 1, LARGEST[n])
    module = getattr(nn, f"AdaptiveMaxPool{n}d")(drawn(data, n, 1, 6) if n > 1 else 4)
    matrix = materialise(module, (1, *shape))
    expected = math.sqrt((matrix**2).sum(0).max())
    assert bound_of(module, (1, *shape)) == pytest.approx(expected, rel=1e-12)


def test_subclasses_have_the_bounds_of_their_bases():
    pools = nn.MaxPool2d(3, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False)
    for module in (*pools, nn.ReflectionPad2d(2)):
        own = copy.copy(module)
        own.__class__ = type("ZeroPadded", (type(module),), {"output_size": 1})
        assert bound_of(own, (1, 7, 7)) == bound_of(module, (1, 7, 7))


def test_slopes_count_and_train():
    assert bound_of(nn.LeakyReLU(0.2), (3,)) == 1
    assert bound_of(nn.LeakyReLU(-1.5), (3,)) == 1.5
    prelu = nn.PReLU(3)
    with torch.no_grad():
        prelu.weight.copy_(torch.tensor([0.1, -2.5, 1.0]))
    assert bound_of(prelu, (3,)) == 2.5
    bounds.prelu_bound(prelu, (3,)).backward()
    assert prelu.weight.grad.tolist() == [0.0, -1.0, 0.0]
