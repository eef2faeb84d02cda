"""The supplement's matrices in 1-D with one channel, built from its index formulas alone.

Indices in the helpers count from 1, as in print; the last row and column are the homogeneous ones.
"""

import numpy as np
import pytest
import torch
from torch import nn

import conformallayers as cl
from oracle import relative_error
from support import DTYPES, TOLERANCES


def filled(shape, condition):
    """Return ones where the condition holds off the last row and column, and in the last corner."""
    indices = np.indices(shape) + 1
    limits = np.reshape(shape, (-1, *[1] * len(shape)))
    inside, corner = (indices < limits).all(0), (indices == limits).all(0)
    return ((inside & condition(*indices)) | corner).astype(float)


def padding_matrix(d_x, pad):
    return filled((d_x + 2 * pad + 1, d_x + 1), lambda i, j: i - pad == j)


def dilation_matrix(d_w, dilation):
    shape = (d_w + 1, (d_w - 1) * dilation + 2)
    return filled(shape, lambda i, j: (i - 1) * dilation + 1 == j)


def stride_matrix(d_x, d_w, pad, dilation, stride):
    rows = (d_x + 2 * pad - dilation * (d_w - 1) - 1) // stride + 2
    columns = d_x - (d_w - 1) * dilation + 2 * pad + 1
    return filled((rows, columns), lambda i, j: (i - 1) * stride == j - 1)


def correlation_tensor(d_x, d_w, pad, dilation):
    reach = (d_w - 1) * dilation
    shape = (reach + 2, d_x - reach + 2 * pad + 1, d_x + 2 * pad + 1)
    return filled(shape, lambda i, j, k: i == k - j + 1)


def transpose(tensor):
    return tensor.swapaxes(0, 1)


def left(matrix, tensor):
    """Multiply a tensor by a vector or matrix on its first axis."""
    return np.tensordot(matrix, tensor, axes=1)


def convolution_matrix(d_x, weights, stride=1, pad=0, dilation=1):
    d_w = len(weights)
    W = np.append(weights, 1.0)
    D, C = dilation_matrix(d_w, dilation), correlation_tensor(d_x, d_w, pad, dilation)
    S, P = stride_matrix(d_x, d_w, pad, dilation, stride), padding_matrix(d_x, pad)
    return S @ left(W @ D, C) @ P


def pooling_matrix(d_x, d_w, stride, pad):
    W = np.append(np.full(d_w, 1 / d_w), 1.0)
    S, P = stride_matrix(d_x, d_w, pad, 1, stride), padding_matrix(d_x, pad)
    return S @ left(W, correlation_tensor(d_x, d_w, pad, 1)) @ P


def samples(d_x, dtype, seed=0, batch=3):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(batch, 1, d_x))).to(dtype)


def assert_close(actual, expected):
    assert relative_error(actual, torch.from_numpy(expected)) <= TOLERANCES[actual.dtype]


# Stacks of conformal layers: per layer the convolution (d_w, stride, pad, dilation) and, if it
# pools, the pool (d_w, stride, pad) that follows it before the activation.
STACKS = {
    "k=1": (7, [((3, 1, 1, 1), None)]),
    "k=1 pooled": (8, [((2, 1, 1, 2), (2, 1, 1))]),
    "k=2": (8, [((3, 1, 0, 1), None), ((2, 2, 1, 1), None)]),
    "k=3": (9, [((3, 1, 2, 2), None), ((3, 1, 1, 1), (3, 1, 1)), ((2, 1, 0, 1), None)]),
}


def build(name, dtype, alphas=None):
    """Return the network and its U⁽ˡ⁾ and α⁽ˡ⁾, the latter by Young's inequality: Σ|w|."""
    d_x, layers = STACKS[name]
    size, modules, maps, radii = d_x, [], [], []
    generator = torch.Generator().manual_seed(len(name))
    for index, ((d_w, stride, pad, dilation), pool) in enumerate(layers):
        conv = cl.Conv1d(1, 1, d_w, stride, pad, dilation, dtype=dtype)
        nn.init.uniform_(conv.weight, -1.0, 1.0, generator=generator)
        weights = conv.weight.detach().double().numpy().ravel()
        U = convolution_matrix(size, weights, stride, pad, dilation)
        modules.append(conv)
        if pool is not None:
            U = pooling_matrix(len(U) - 1, *pool) @ U
            modules.append(cl.AvgPool1d(*pool))
        size = len(U) - 1
        maps.append(U)
        radii.append(np.abs(weights).sum() if alphas is None else alphas[index])
        modules.append(cl.ReSPro(None if alphas is None else alphas[index]))
    return cl.ConformalLayers(*modules), maps, radii


def activation_tensors(d, alpha):
    F_M = np.diag(np.append(np.ones(d), alpha / 2))
    F_T = np.zeros((d + 1, d + 1, d + 1))
    F_T[-1] = np.diag(np.append(np.full(d, 1 / (2 * alpha)), 0.0))
    return F_M, F_T


def folded_tensors(maps, radii):
    """Return L_M and L_T by the printed sum."""
    pairs = [activation_tensors(len(U) - 1, a) for U, a in zip(maps, radii, strict=True)]
    size = maps[0].shape[1]
    L_M, L_T = np.eye(size), 0.0
    for (F_M, _), U in zip(pairs, maps, strict=True):
        L_M = F_M @ U @ L_M
    for layer, (_, F_T) in enumerate(pairs):
        inner = np.eye(size)  # U⁽ˡ⁾ … U⁽¹⁾
        for U in maps[: layer + 1]:
            inner = U @ inner
        outer = np.eye(len(inner))  # F_M⁽ᵏ⁾ U⁽ᵏ⁾ … F_M⁽ˡ⁺¹⁾ U⁽ˡ⁺¹⁾
        for (F_M, _), U in zip(pairs[layer + 1 :], maps[layer + 1 :], strict=True):
            outer = F_M @ U @ outer
        L_T = L_T + left(outer, transpose(left(inner.T, transpose(F_T)) @ inner))
    return L_M, L_T


def embedded(x):
    flat = x.flatten(1).double().numpy()
    return np.concatenate([flat, np.linalg.norm(flat, axis=1)[:, None]], 1)


@pytest.mark.parametrize("alphas", [None, (0.6, 2.5, 1.7)], ids=["young", "given"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STACKS)
def test_stack_is_one_matrix_and_one_tensor(name, dtype, alphas):
    model, maps, radii = build(name, dtype, alphas)
    L_M, L_T = folded_tensors(maps, radii)
    assert not L_T[:-1].any()
    assert L_T[-1].any()
    x = samples(STACKS[name][0], dtype, seed=4, batch=6)
    Y = np.stack([(L_M + L_T @ X) @ X for X in embedded(x)])
    expected = Y[:, :-1] / Y[:, -1:]
    assert_close(model.train()(x).detach()[:, 0], expected)
    with torch.no_grad():
        assert_close(model.eval()(x)[:, 0], expected)
        for strategy in ("dense", "layers"):
            assert_close(cl.fold(model, x.shape[1:], strategy=strategy)(x)[:, 0], expected)


@pytest.mark.parametrize("name", STACKS)
def test_dense_fold_holds_the_matrix_and_the_bottom_slice(name):
    # y(s·x) = M x / (‖x‖ + s·xᵀQx): s → 0 shows M alone, and s → ∞ shows the form alone.
    model, maps, radii = build(name, torch.float64)
    L_M, L_T = folded_tensors(maps, radii)
    common = L_M[-1, -1]
    M, Q = L_M[:-1, :-1] / common, L_T[-1, :-1, :-1] / common
    assert not L_M[-1, :-1].any()
    assert not L_M[:-1, -1].any()
    np.testing.assert_allclose(Q, Q.T, rtol=1e-12, atol=1e-15 * Q.max())
    assert np.linalg.eigvalsh(Q)[0] >= -1e-13 * Q.max()
    d_x = STACKS[name][0]
    folded = cl.fold(model, (1, d_x), strategy="dense")
    assert folded.strategy == "dense"
    columns = folded(1e-30 * torch.eye(d_x, dtype=torch.float64)[:, None])[:, 0].T.numpy()
    np.testing.assert_allclose(columns, M, rtol=1e-12, atol=1e-15 * np.abs(M).max())
    # More generic vectors than a symmetric form has coefficients: they determine it.
    x = samples(d_x, torch.float64, seed=9, batch=d_x * (d_x + 1) // 2 + 5)
    flat = x[:, 0].numpy()
    far = 1e30 * folded(1e30 * x)[:, 0].numpy()
    form = np.linalg.norm(flat @ M.T, axis=1) / np.linalg.norm(far, axis=1)
    np.testing.assert_allclose(form, np.einsum("bi,ij,bj->b", flat, Q, flat), rtol=1e-11)
