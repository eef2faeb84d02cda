"""Networks on an emulated Cortex-M4: the outputs of the fold, the same in every run, and true counts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import conformallayers as cl
from conformallayers.errors import ConformalError
from conformallayers.lab.devices import emulator
from conformallayers.lab.devices.emulator import (
    missing_tools,
    require_tools,
    run_on_device,
)
from conformallayers.recipe.c.files import CExport
from conformallayers.testing import relative_error

needs_tools = pytest.mark.skipif(
    bool(missing_tools()), reason=f"no {', no '.join(missing_tools())} on the path"
)
LOOP = """#include "loop.h"
int loop_predict(const float *image, float *out)
{
    int left = (int)image[0];
    __asm__ volatile("1: subs %0, #1\\n bne 1b" : "+r"(left) : : "cc");
    out[0] = image[0];
    return 3;
}
"""
HEADER = """#define LOOP_INPUT_SIZE 1
#define LOOP_OUTPUT_SIZE 1
int loop_predict(const float *image, float *out);
"""


@pytest.fixture(scope="module")
def folded() -> Any:
    return cl.zoo.load("digits-micro")


@pytest.fixture(scope="module")
def made(folded: Any, tmp_path_factory: pytest.TempPathFactory) -> CExport:
    return cl.export_c(folded, tmp_path_factory.mktemp("c"), name="digits")


@needs_tools
@pytest.mark.parametrize(
    ("taken", "words"),
    [
        ({"work_bytes": 2**22}, "at most 4 MiB of RAM, which the board has, got 4"),
        ({"arrays": (("k", 2**23),)}, "at most 4 MiB of flash, which the board has, got 8 MiB"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_compiled(
    made: CExport, taken: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConformalError, match=f"device: expected {words}.* Try --dtype int8"):
        run_on_device(replace(made, **taken), np.zeros((1, 1, 8, 8), np.float32))


@needs_tools
def test_a_device_computes_what_torch_computes(folded: Any, made: CExport) -> None:
    x = torch.rand(3, *folded.input_shape, generator=torch.Generator().manual_seed(0))
    x[2, 0, 0, 0] = float("nan")
    run = run_on_device(made, x.numpy(), self_test=True)
    with torch.no_grad():
        expected = folded(x)
    assert relative_error(torch.from_numpy(run.outputs)[:2], expected[:2]) < 1e-5
    assert run.classes.tolist() == [*expected[:2].argmax(1).tolist(), -1]
    assert np.isnan(run.outputs[2]).all()
    assert made.constant_bytes < run.flash < made.constant_bytes + 20_000
    assert 0 < run.stack < 16_384
    again = run_on_device(made, x.numpy(), self_test=True)
    assert np.array_equal(run.outputs, again.outputs, equal_nan=True)
    assert np.array_equal(run.instructions, again.instructions)


@needs_tools
def test_int8_is_the_same_to_the_bit(folded: Any, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    small = cl.quantize(folded, torch.rand(50, *folded.input_shape, generator=draw))
    x = torch.rand(3, *folded.input_shape, generator=draw)
    made = cl.export_c(small, tmp_path, samples=x)
    run = run_on_device(made, x.numpy(), self_test=True)
    with torch.no_grad():
        assert np.array_equal(run.outputs, small(x).numpy())


@needs_tools
def test_ram_is_work_memory_the_image_and_the_outputs(folded: Any, made: CExport) -> None:
    run = run_on_device(made, np.zeros((1, *folded.input_shape), np.float32))
    stated = made.work_bytes + 4 * 64 + 4 * 10
    assert stated <= run.ram <= stated + 256


@needs_tools
def test_instructions_are_counted(made: CExport, tmp_path: Path) -> None:
    (tmp_path / "loop.c").write_text(LOOP)
    (tmp_path / "loop.h").write_text(HEADER)
    loop = replace(made, name="loop", source=tmp_path / "loop.c", header=tmp_path / "loop.h")
    turns = np.array([1000, 50_000, 1_000_000])
    run = run_on_device(loop, turns.astype(np.float32)[:, None])
    assert np.abs(run.instructions - 2 * turns).max() <= 100  # two in a turn; a tick is 40
    assert run.classes.tolist() == [3, 3, 3]


@needs_tools
def test_programs_that_fail_are_named(made: CExport, tmp_path: Path) -> None:
    (tmp_path / "loop.h").write_text(HEADER)
    loop = replace(made, name="loop", source=tmp_path / "loop.c", header=tmp_path / "loop.h")
    x = np.ones((1, 1), np.float32)
    (tmp_path / "loop.c").write_text("int broken")
    with pytest.raises(ConformalError, match=r"device: could not compile .*loop\.c.*error"):
        run_on_device(loop, x)
    (tmp_path / "loop.c").write_text(
        LOOP.replace("return 3", "return *(volatile int *)0xf0000000u")
    )
    with pytest.raises(ConformalError, match=r"device: could not run loop in .*exit status 70"):
        run_on_device(loop, x)


@needs_tools
def test_a_wrong_self_test_fails_the_run(folded: Any, made: CExport, tmp_path: Path) -> None:
    text = made.source.read_text()
    other = replace(made, source=tmp_path / "digits.c")
    other.source.write_text(text.replace("return largest(", "out[0] += 9;\n    return largest("))
    with pytest.raises(ConformalError, match="exit status 1"):
        run_on_device(other, np.zeros((1, *folded.input_shape), np.float32), self_test=True)


def test_missing_tools_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert missing_tools() == [emulator.COMPILER, emulator.SIZE, emulator.EMULATOR]
    with pytest.raises(ConformalError, match="apt-get install gcc-arm-none-eabi") as error:
        require_tools("device")
    assert "\n" not in str(error.value)
