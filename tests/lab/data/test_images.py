"""Images become what a network takes, or one reason why not."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conformallayers.lab.data.images import read_image
from pictures import GREY, image_bytes, pixels


def luma(rgb: Any) -> Any:
    """Return grey by ITU-R 601, rounded as Pillow rounds it."""
    weighted = rgb.astype(np.int64) @ np.array([19595, 38470, 7471])
    return (weighted + 0x8000) >> 16


RGB, L = pixels(6, 9, 3), pixels(6, 9)
CMYK = Image.frombytes("CMYK", (9, 6), pixels(6, 9, 4).tobytes())
PALETTE = Image.fromarray(RGB // 64 * 64).quantize(64)
MODES: dict[str, tuple[bytes, Any]] = {
    "RGB": (image_bytes(Image.fromarray(RGB)), RGB),
    "grey": (image_bytes(Image.fromarray(L)), L),
    "grey with alpha": (image_bytes(Image.merge("LA", [Image.fromarray(L), Image.new("L", (9, 6), 255)])), L),
    "opaque": (image_bytes(Image.fromarray(RGB).convert("RGBA")), RGB),
    "palette": (image_bytes(PALETTE), np.asarray(PALETTE.convert("RGB"))),
    "palette GIF": (image_bytes(PALETTE, "GIF"), np.asarray(PALETTE.convert("RGB"))),
    "one bit": (image_bytes(Image.fromarray(L > 99)), 255 * (L > 99)),
    "BMP": (image_bytes(Image.fromarray(RGB), "BMP"), RGB),
    "TIFF": (image_bytes(Image.fromarray(RGB), "TIFF"), RGB),
    "PPM": (image_bytes(Image.fromarray(RGB), "PPM"), RGB),
    "WebP": (image_bytes(Image.fromarray(RGB), "WEBP", lossless=True), RGB),
    "CMYK": (image_bytes(CMYK, "TIFF"), np.asarray(CMYK.convert("RGB"))),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MODES))
def test_modes_become_those_of_the_model(name: str) -> None:
    data, values = MODES[name]
    rgb = values if values.ndim == 3 else np.repeat(values[..., None], 3, 2)
    found = read_image(io.BytesIO(data), (3, 6, 9))
    assert found.dtype == np.float32
    assert np.array_equal(found, rgb.transpose(2, 0, 1).astype(np.float32) / np.float32(255))
    found = read_image(io.BytesIO(data), (1, 6, 9))
    assert np.array_equal(found[0], luma(rgb).astype(np.float32) / np.float32(255))


def test_jpeg_is_read() -> None:
    smooth = np.linspace(0, 255, 54).reshape(6, 9).astype(np.uint8)
    data = image_bytes(Image.fromarray(smooth), "JPEG", quality=95)
    assert np.abs(read_image(io.BytesIO(data), (1, 6, 9))[0] - smooth / 255).max() < 0.05
    data = image_bytes(Image.fromarray(smooth).convert("CMYK"), "JPEG", quality=95)
    assert np.abs(read_image(io.BytesIO(data), (1, 6, 9))[0] - smooth / 255).max() < 0.05


def test_transparent_pixels_are_white() -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.putpixel((0, 0), (255, 0, 0, 255))
    found = read_image(io.BytesIO(image_bytes(image)), (3, 4, 4))
    assert found[:, 0, 0].tolist() == [1, 0, 0]
    assert found[:, 1:].min() == 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_followed(orientation: int) -> None:
    flips = (slice(None, None, -1 if orientation in (3, 4, 6, 7) else 1),)
    flips += (slice(None, None, -1 if orientation in (2, 3, 7, 8) else 1),)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = image_bytes(Image.fromarray(RGB), exif=exif)
    expected = RGB[flips].swapaxes(0, 1) if orientation > 4 else RGB[flips]
    found = read_image(io.BytesIO(data), (3, *expected.shape[:2]))
    assert np.array_equal(np.round(255 * found), expected.transpose(2, 0, 1))


def test_resizing_does_not_alias() -> None:
    checks = 255 * (np.indices((64, 64)).sum(0) % 2).astype(np.uint8)
    data = image_bytes(Image.fromarray(checks))
    assert np.abs(read_image(io.BytesIO(data), GREY) - 0.5).max() < 0.1


def test_photographs_with_a_second_picture_are_read() -> None:
    smooth = Image.fromarray(np.linspace(0, 255, 54).reshape(6, 9).astype(np.uint8))
    data = image_bytes(smooth, "MPO", quality=95, save_all=True, append_images=[smooth])
    expected = np.asarray(smooth) / 255
    assert np.abs(read_image(io.BytesIO(data), (1, 6, 9))[0] - expected).max() < 0.05
