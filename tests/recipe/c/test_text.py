"""The text of C programs: functions by name, and those that they call."""

from __future__ import annotations

from conformallayers.recipe.c.text import functions, helpers


def test_functions_are_plain_c() -> None:
    names = [name for name in helpers() if name not in ("pool", "products", "depthwise")]
    text = functions(" ".join(f"{name}() {name}_f() {name}_b()" for name in names))
    assert "$" not in text
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    assert "static void gather_b(const int8_t *x, int8_t *y," in text
