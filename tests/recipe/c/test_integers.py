"""Programs in integers: no float in their loops, a byte for each feature."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import torch
from torch import nn

import conformallayers as cl
from conformallayers.recipe.c.text import functions
from programs import COMPILER, FLAGS, export, needs_compiler


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
    assert 3 * small.work_bytes < plain.work_bytes
    said = {made.dtype: made.header.read_text("ascii") for made in (plain, small)}
    assert "With a NaN in the image" in said["float32"]
    assert "A NaN in the image counts as 0." in said["int8"]
    for made in (plain, small):
        found = re.findall(r"^static void (\w+)", made.source.read_text("ascii"), re.M)
        assert {"conv", "norm_pool", "matmul"} <= set(found)


@needs_compiler
def test_images_of_bytes_give_the_outputs_of_floats(tmp_path: Path) -> None:
    """The bits of torch on bytes / 255, and no predict_u8 for floats."""
    folded = cl.zoo.load("digits-micro")
    shape = folded.input_shape
    small = cl.quantize(folded, torch.rand(20, *shape, generator=torch.Generator().manual_seed(0)))
    assert "predict_u8" not in export(folded, tmp_path, name="plain").header.read_text("ascii")
    made = export(small, tmp_path)
    line = [str(COMPILER), *FLAGS, "-shared", "-fPIC", made.source.name, "-lm", "-o", "all.so"]
    subprocess.run(line, cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "all.so"))
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (8, *shape), generator=generator, dtype=torch.uint8)
    expected = small(images.float() / 255)
    for image, outputs in zip(images.numpy(), expected, strict=True):
        out = np.zeros(10, np.float32)
        best = library.cl_predict_u8(*(ctypes.c_void_p(a.ctypes.data) for a in (image, out)))
        assert np.array_equal(out, outputs.numpy())
        assert best == outputs.argmax()
