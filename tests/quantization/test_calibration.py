"""Scales and multipliers: rounding loses least, and products stay below 2^53."""

from __future__ import annotations

import numpy as np
import pytest

from conformallayers.quantization.calibration import least_error_scale, multipliers, weight_scales


def test_a_few_large_numbers_are_clipped() -> None:
    x = np.abs(np.random.default_rng(0).normal(size=200_000))
    x[0] = 8.0
    scale = least_error_scale(x, 8.0)
    assert 3 / 127 < scale < 6 / 127

    def error(step: float) -> float:
        return float(np.square(np.minimum(np.rint(x / step), 127) * step - x).sum())

    assert error(scale) < error(8 / 127)


@pytest.mark.parametrize("factor", [1e-9, 1e-3, 0.7, 30.0])
@pytest.mark.parametrize("parts", [False, True])
def test_multipliers_have_17_or_24_bits(factor: float, parts: bool) -> None:
    factors, most = np.array([factor, factor / 100]), np.array([2**20, 2**20])
    found, shift = multipliers(factors, most, parts)
    assert found.max() <= 2 ** (24 if parts else 17)
    assert parts or shift <= 17
    assert float((found * most).max()) < 2**53
    assert (np.abs(found - factors * 2.0**shift) <= 0.5).all()


def test_parts_leave_room_for_a_factor() -> None:
    most = np.array([2**30])
    found, shift = multipliers(np.array([0.25]), most, parts=True)
    assert float((found * most).max()) / 2**shift < 2**29
    with pytest.raises(OverflowError, match="of too many bits"):
        multipliers(np.array([2.0**25]), np.array([1]), parts=False)


def test_weights_have_a_scale_for_each_channel() -> None:
    weight = np.array([[0.5, -1.0], [0.0, 0.0], [3.0, 1.0]])
    unit = weight_scales(weight, np.zeros(3))
    np.testing.assert_allclose(unit, [1 / 127, 3 / 127, 3 / 127])


def test_weights_far_below_their_bias_leave_it_24_bits() -> None:
    bias = np.array([1.0, 0.0])
    unit = weight_scales(np.array([[1e-9, 1e-7], [1.0, 1.0]]), bias)
    assert np.rint(bias / unit).tolist() == [2**24, 0]
    np.testing.assert_allclose(unit[1], 1 / 127)
