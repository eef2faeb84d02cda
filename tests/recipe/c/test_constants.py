"""Constants of C programs: exact literals, and the shorter of two ways to write a matrix."""

from __future__ import annotations

import numpy as np

from conformallayers.recipe.c.constants import Constant, form, matrix


def test_constants_are_exact_and_matrices_as_short_as_can_be() -> None:
    values = np.array([0.1, -1e-42, 3.4e38, 0.0, -0.0, 1 / 3], np.float32)
    text = Constant("a", "float", values).text()
    words = [word.strip() for word in text[text.index("{") + 1 : text.index("}")].split(",")[:-1]]
    assert all(word.endswith("f") for word in words)
    assert np.array_equal(np.array([float.fromhex(w[:-1]) for w in words], np.float32), values)
    assert all(
        len(line) <= 100 for line in Constant("b", "int8_t", np.arange(-99, 99)).text().split()
    )
    assert "[1]" in Constant("c", "uint16_t", np.zeros(0, int)).text()
    full = np.random.default_rng(0).normal(size=(6, 40))
    assert not matrix("m", full, "float").runs
    band = np.triu(np.tril(full, 3), -3)
    for storage in ("float", "double"):
        stored = matrix("m", band, storage)
        assert stored.runs
        assert np.allclose(stored.values, band, atol=1e-6)
        assert np.array_equal(stored.values != 0, band != 0)
    square = full.T @ full + np.eye(40)
    dense = form("q", square, "float")
    assert not dense.runs
    assert dense.entries == 40 * 41 // 2
    assert np.array_equal(dense.values, square.astype(np.float32))
    narrow = np.triu(np.tril(square, 2), -2)
    assert form("q", narrow, "float").runs
    assert np.array_equal(form("q", narrow, "float").values, narrow.astype(np.float32))
