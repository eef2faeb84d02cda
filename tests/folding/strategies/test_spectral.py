"""The spectral strategy: what it refuses."""

from __future__ import annotations

import pytest

import conformallayers as cl

pytestmark = pytest.mark.usefixtures("seeded")


def test_a_matrix_that_cannot_be_built_is_refused() -> None:
    model = cl.ConformalLayers(cl.Conv2d(3, 32, 3), cl.ReSPro(), cl.AvgPool2d(2))
    with pytest.raises(cl.ConformalError, match="M would have"):
        cl.fold(model, (3, 224, 224), strategy="spectral")


def test_spectral_says_what_stands_in_its_way() -> None:
    model = cl.ConformalLayers(cl.Conv2d(3, 4, 3, padding=1), cl.ReSPro())
    deeper = cl.ConformalLayers(*model, cl.Conv2d(4, 4, 3, padding=1), cl.ReSPro())
    cl.testing.assert_folds(model, (3, 9, 9), strategy="spectral")
    with pytest.raises(cl.ConformalError, match="pads behind the first layer"):
        cl.fold(deeper, (3, 9, 9), strategy="spectral")
