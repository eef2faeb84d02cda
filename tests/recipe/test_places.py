"""Tables of indices: those of torch, one axis at a time."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional as F

from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import places

sizes = st.integers(1, 12)


@given(sizes, sizes)
def test_adaptive_averages(n: int, m: int) -> None:
    x = torch.randn(1, 1, n, dtype=torch.float64)
    table, weights = places.adaptive(n, m)
    found = (x[0, 0].numpy()[table] * weights).sum(0)
    assert np.allclose(found, F.adaptive_avg_pool1d(x, m)[0, 0].numpy(), rtol=1e-12)


@given(
    sizes, st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3), st.booleans()
)
def test_ends_of_windows(n: int, k: int, s: int, p: int, step: int, ceil: bool) -> None:
    span, p = step * (k - 1) + 1, min(p, k // 2)
    assume(n + 2 * p >= span)
    options = {"kernel": (k,), "stride": (s,), "padding": (p,), "ceil_mode": ceil}
    op = layer.MaxPool(("x",), ("y",), dilation=(step,), **options)
    ((first, stop),) = places.window_ends(op, (1, n))
    x = -torch.arange(1.0, n + 1)
    pooled = F.max_pool1d(x[None, None], k, s, p, step, ceil)[0, 0]
    found = [max([*x[a:b:step].tolist(), -np.inf]) for a, b in zip(first, stop, strict=True)]
    assert found == pooled.tolist()
    pooled = F.max_pool1d(-x[None, None], k, s, p, step, ceil)[0, 0]
    found = [max([*(-x[a:b:step]).tolist(), -np.inf]) for a, b in zip(first, stop, strict=True)]
    assert found == pooled.tolist()


@given(sizes, st.integers(-1, 2), st.integers(-1, 2))
def test_pads_of_zeros_are_outside(n: int, before: int, after: int) -> None:
    x = torch.arange(n + 2.0)[None, None]
    found = places.padded(n + 2, before, after, "zeros")
    assert found.tolist() == F.pad(x, (before, after), value=-1.0)[0, 0].long().tolist()


@given(sizes, st.integers(0, 2), st.integers(0, 2), st.sampled_from(["reflect", "circular"]))
def test_pads(n: int, before: int, after: int, mode: str) -> None:
    x = torch.arange(n + 2.0)[None, None]
    found = places.padded(n + 2, before, after, mode)
    assert found.tolist() == F.pad(x, (before, after), mode=mode)[0, 0].long().tolist()


@given(sizes, sizes, st.booleans())
def test_linear_interpolation(n: int, m: int, corners: bool) -> None:
    x = torch.randn(1, 1, n, dtype=torch.float64)
    table, weights = places.interpolated(n, m, None, corners, np.float64)
    found = (x[0, 0].numpy()[table] * weights).sum(0)
    expected = F.interpolate(x, m, mode="linear", align_corners=corners)[0, 0].numpy()
    assert np.allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_tables_of_several_axes_keep_what_is_outside() -> None:
    rows = places.sliding(3, taps=2, positions=2, stride=2, padding=1, dilation=1)
    assert rows.tolist() == [[-1, 1], [0, 2]]
    columns = places.spreading(2, positions=3, stride=2, padding=0)
    assert columns.tolist() == [[0, -1, 1]]
    both = places.flattened([rows, columns], (3, 2))
    assert both.tolist() == [[-1, -1, -1, 2, -1, 3], [0, -1, 1, 4, -1, 5]]
