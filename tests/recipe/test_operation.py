"""Operations: their settings, constants and shapes."""

from __future__ import annotations

import pytest

from conformallayers.errors import ConformalError
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.operation import (
    Operation,
    Runtime,
)

CONV = {"stride": (1, 2), "padding": (0, 1), "dilation": (1, 1)}


def test_settings_that_equal_their_default_are_left_out() -> None:
    plain = layer.Conv(("x",), ("y",), weight="w", **CONV)
    grouped = layer.Conv(("x",), ("y",), weight="w", bias="b", groups=2, **CONV)
    assert dict(plain.constants()) == {"weight": "w"}
    assert dict(grouped.constants()) == {"weight": "w", "bias": "b"}
    assert dict(grouped.settings()) == {**dict(plain.settings()), "groups": 2}
    assert dict(plain.settings(defaults=True))["groups"] == 1


def test_a_runtime_refuses_operations_that_it_lacks() -> None:
    run = Runtime("lists")
    run.runs(point.Divide)(lambda op, holder, v, tau, m: v)
    run.check(point.Divide(("v", "tau", "m"), ("y",), scale=1.0), "run")
    with pytest.raises(
        ConformalError, match=r"operations supported by lists, got slice\. Inside a Conf"
    ):
        run.check(layer.Slice(("x",), ("y",), axis=0, start=0, stop=1), "run")


@pytest.mark.parametrize(("kind", "count"), [(point.Normalize, 1), (point.Rescale, 3)])
def test_other_numbers_of_inputs_are_refused(kind: type[Operation], count: int) -> None:
    names = tuple("zmτu")
    kind(names[:count], ()).shapes([(4,), *[()] * (count - 1)], {}.__getitem__)
    with pytest.raises(ValueError, match=r"expected 1|not z, m and τ"):
        kind(names[: count + 1], ()).shapes([(4,), *[()] * count], {}.__getitem__)


def test_copied_pixels_pad_every_spatial_axis() -> None:
    for mode in ("reflect", "replicate", "circular"):
        pad = layer.Pad(("x",), ("y",), pads=((1, 1),), mode=mode)
        with pytest.raises(ValueError, match=rf"{mode} pads \(\(1, 1\),\) of \(2, 4, 4\)"):
            pad.shapes([(2, 4, 4)], {}.__getitem__)
