"""Samples of files, folders and standard input, found lazily and in order."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from conformallayers.lab.predict import samples as samples_file
from conformallayers.lab.predict.run import in_batches
from conformallayers.lab.predict.samples import Broken, Sample, find_samples, sorted_entries
from pictures import COLOUR, GREY, save_grey


def test_one_sample_is_an_array_too(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(COLOUR, np.float32))
    (found,) = find_samples([f"{tmp_path}/x.npy"], COLOUR)
    assert found == Sample(f"{tmp_path}/x.npy[0]", f"{tmp_path}/x.npy", 0)


def test_huge_images_from_standard_input_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_file, "_PIPED_IMAGE", 100)
    found = list(find_samples(["-"], GREY, io.BytesIO(b"\x89PNG\r\n" + bytes(200))))
    assert found == [Broken("-", "more than 100 bytes")]


def test_endless_input_is_read_by_need() -> None:
    class Endless(io.RawIOBase):
        taken = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            buffer[:] = (b"some/file.png\n" * (len(buffer) // 14 + 1))[: len(buffer)]
            self.taken += len(buffer)
            return len(buffer)

    raw = Endless()
    stream: BinaryIO = io.BufferedReader(raw, 1024)
    found = find_samples(["-"], GREY, stream)
    batches = in_batches(found, 10)
    assert [len(next(batches)) for _ in range(3)] == [10, 10, 10]
    assert raw.taken <= 2048


def test_large_folders_are_sorted_with_few_names_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sorted(f"{n * 7919 % 1000:03d}.png" for n in range(100))
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "050").mkdir()
    passes = []
    original = os.scandir

    def counted(path: str) -> Any:
        passes.append(path)
        return original(path)

    monkeypatch.setattr(os, "scandir", counted)
    found = list(sorted_entries(str(tmp_path), most=10))
    assert found == sorted([*((name, False) for name in names), ("050", True)])
    assert len(passes) == 11
    monkeypatch.setattr(samples_file, "_NAMES", 10)
    entries = sorted_entries(str(tmp_path), most=10)
    passes.clear()
    assert [next(entries)[0] for _ in range(3)] == sorted([*names, "050"])[:3]
    assert len(passes) == 1  # the rest of the folder waits


def test_names_follow_the_order_of_folders(tmp_path: Path) -> None:
    for name in ("b.png", "a/z.png", "a/b/c.png", "c/a.png", "B.png"):
        save_grey(tmp_path / name)
    found = [item.name.removeprefix(f"{tmp_path}/") for item in find_samples([str(tmp_path)], GREY)]
    assert found == ["B.png", "a/b/c.png", "a/z.png", "b.png", "c/a.png"]
