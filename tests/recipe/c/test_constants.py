"""Constants of C programs: exact literals."""

from __future__ import annotations

import numpy as np

from conformallayers.recipe.c.constants import Constant


def test_constants_are_exact() -> None:
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
