"""Power iteration in odd places; its norms are tested in integration/test_radii.py."""

from __future__ import annotations

import torch

import conformallayers as cl


def test_spectral_training_under_inference_mode() -> None:
    model = cl.ConformalLayers(cl.Linear(8, 8), cl.ReSPro("spectral"))
    with torch.inference_mode():
        assert model(torch.rand(2, 8)).isfinite().all()
