"""Programs of whole numbers: no float in their loops, a byte for each feature."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

import conformallayers as cl
from conformallayers.recipe.c.text import functions
from programs import export


def test_products_have_no_floats() -> None:
    names = "widen", "blank", "dots", "feature", "feature_of_parts", "feature_of_large", "root"
    text = functions(" ".join(f"{name}()" for name in names))
    for name in names:
        assert f"{name}(" in text
    assert not re.search(r"\b(float|double)\b", text)


def test_features_take_a_byte_each(tmp_path: Path) -> None:
    torch.manual_seed(0)
    body = cl.ConformalLayers(cl.Conv2d(1, 8, 3), cl.ReSPro(), nn.LPPool2d(2, 2), cl.Flatten())
    folded = cl.fold(nn.Sequential(body, nn.Linear(288, 4)), (1, 14, 14), strategy="layers")
    quantized = cl.quantize(folded, torch.rand(20, 1, 14, 14))
    plain, small = export(folded, tmp_path, name="a"), export(quantized, tmp_path, name="b")
    assert small.dtype == "int8"
    assert small.output_error == 0
    assert 3 * small.work_bytes < plain.work_bytes
