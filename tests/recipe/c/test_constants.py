"""Constants of C programs: exact literals, and the shorter of two ways to write a matrix."""

from __future__ import annotations

import numpy as np

from conformallayers.recipe.c.constants import Constant, runs_of


def test_constants_are_exact_and_matrices_as_short_as_can_be() -> None:
    values = np.array([0.1, -1e-42, 3.4e38, 0.0, -0.0, 1 / 3], np.float32)
    text = Constant("a", "float", values).text()
    words = [word.strip() for word in text[text.index("{") + 1 : text.index("}")].split(",")[:-1]]
    assert all(word.endswith("f") for word in words)
    assert np.array_equal(np.array([float.fromhex(w[:-1]) for w in words], np.float32), values)
    assert all(
        len(line) <= 100 for line in Constant("b", "int8_t", np.arange(-99, 99)).text().split()
    )
    assert "[1]" in Constant("c", "int32_t", np.zeros(0, int)).text()
    assert (
        "QUAD(1, 2, 3, 4), QUAD(5, 6, 7, 8),"
        in Constant("d", "int8_t", np.arange(1, 9), True).text()
    )
    full = np.random.default_rng(0).normal(size=(6, 40))
    assert runs_of(full) is None
    band = np.triu(np.tril(full, 3), -3)
    stored = runs_of(band)
    assert stored is not None
    values, runs, places = stored
    assert len(values) == np.count_nonzero(band)
    assert runs.tolist() == [1] * 6
    pairs = zip(band, places.reshape(-1, 2), strict=True)
    assert np.array_equal(np.concatenate([row[a : a + n] for row, (a, n) in pairs]), values)
