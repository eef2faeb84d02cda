"""Pictures become what a network takes; folders of them have a fixed split, or are refused."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from conformallayers.lab.data.pictures import find_pictures, is_pictures, read_image
from picture_folders import make_folder
from pictures import GREY, image_bytes, pixels
from support import assert_says

SHAPE = (3, 12, 16)


def test_classes_are_sorted_and_a_fifth_of_each_is_for_testing(tmp_path: Path) -> None:
    found = find_pictures(make_folder(tmp_path, {"dog": 10, "a b é": 7, "=cat": 2}))
    assert found.labels == ("=cat", "a b é", "dog")
    assert [sum(label == c for _, label in found.test) for c in range(3)] == [1, 1, 2]
    assert [sum(label == c for _, label in found.train) for c in range(3)] == [1, 6, 8]
    assert not set(found.train) & set(found.test)
    train, _, test, labels = found.read(SHAPE)
    assert (train.shape, train.dtype) == ((15, *SHAPE), torch.uint8)
    assert labels.tolist() == [label for _, label in found.test]
    for (path, label), image in zip(found.test, test, strict=True):
        assert path.startswith(found.labels[label] + os.sep)
        assert abs(float(image.float().mean()) - (120, 80, 40)[label]) < 8


def test_split_is_always_the_same_and_a_new_picture_moves_few(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a", {"cat": 20, "dog": 20})
    moved = make_folder(tmp_path / "b", {"cat": 20, "dog": 20})
    one, other = find_pictures(folder), find_pictures(moved)
    assert (one.train, one.test, one.digest) == (other.train, other.test, other.digest)
    Image.new("L", (4, 4)).save(moved / "cat" / "new.png")
    more = find_pictures(moved)
    assert more.digest != one.digest
    assert len(set(more.test) ^ set(one.test)) <= 2


def test_layout_with_train_and_test_is_taken_as_it_is(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", {"cat": 3, "dog": 2})
    make_folder(tmp_path / "test", {"cat": 1, "dog": 4})
    found = find_pictures(tmp_path)
    assert found.has_parts
    assert (len(found.train), len(found.test)) == (5, 5)
    assert all(path.startswith("test") for path, _ in found.test)
    make_folder(tmp_path / "test", {"fox": 1})
    assert_says(
        lambda: find_pictures(tmp_path), "the same classes in train and test, got fox in one"
    )


@pytest.mark.parametrize("names", [("train", "val"), ("train", "test", "val")], ids=str)
def test_split_folders_are_no_classes(names: tuple[str, ...], tmp_path: Path) -> None:
    for count, name in enumerate(names, 2):
        make_folder(tmp_path / name, {"cat": count, "dog": count})
    found = find_pictures(tmp_path)
    assert (found.labels, found.has_parts) == (("cat", "dog"), True)
    assert {Path(path).parts[0] for path, _ in found.train} == {names[0]}
    assert {Path(path).parts[0] for path, _ in found.test} == {names[1]}


@pytest.mark.parametrize(
    "names",
    [("train", "other"), ("training", "testing"), ("test", "val"), ("Train", "Test")],
)
def test_split_that_is_not_understood_is_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        make_folder(tmp_path / name, {"cat": 2, "dog": 2})
    got = ", ".join(sorted(names))
    expected = "expected train and test, train and val, or folders of classes"
    assert_says(lambda: find_pictures(tmp_path), expected, f"got {got}. Move")


def test_class_may_be_called_train(tmp_path: Path) -> None:
    found = find_pictures(make_folder(tmp_path, {"train": 4, "bus": 4}))
    assert (found.labels, found.has_parts) == (("bus", "train"), False)


BROKEN: dict[str, tuple[dict[str, int], str]] = {
    "nothing": ({}, "expected two classes or more, got none"),
    "one class": ({"cat": 3}, "expected two classes or more, got cat"),
    "too few": ({"cat": 3, "dog": 1}, "expected 2 or more pictures of the class dog, got 1"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_folder_is_refused(broken: str, tmp_path: Path) -> None:
    classes, message = BROKEN[broken]
    assert_says(lambda: find_pictures(make_folder(tmp_path, classes)), message)


def test_pictures_belong_in_folders(tmp_path: Path) -> None:
    assert_says(lambda: find_pictures(tmp_path / "none"), "got no such folder")
    Image.new("L", (4, 4)).save(path := tmp_path / "a.png")
    assert_says(lambda: find_pictures(path), "a folder with one sub-folder per class, got a file")
    assert_says(lambda: find_pictures(tmp_path), "got the picture a.png beside them")


def test_broken_pictures_are_named_all_at_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"cat": 4, "dog": 4})
    whole = (folder / "cat" / "0.png").read_bytes()
    (folder / "cat" / "0.png").write_bytes(whole[: len(whole) // 2])
    (folder / "dog" / "1.jpg").write_text("no picture")
    (folder / "dog" / "gone.png").symlink_to("gone.png")
    (folder / "dog" / "new\nline.png").write_bytes(b"")
    found = find_pictures(folder)
    parts = (
        "got 4 that cannot: ",
        "0.png (a damaged image",
        "1.jpg (not an image of",
        "gone.png (Too many levels",
    )
    assert_says(lambda: found.read(SHAPE), *parts, r"new\nline.png")


def test_known_names_are_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    (tmp_path / "pets").mkdir()
    found = [is_pictures(name) for name in ("digits", "./digits", "pets", "mnits", "a/b", "pets/")]
    assert found == [False, True, True, False, True, True]


# -- reading --


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
