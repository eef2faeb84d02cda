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
