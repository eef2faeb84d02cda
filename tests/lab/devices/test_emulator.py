"""Networks on an emulated Cortex-M4: the outputs of the fold, true counts, and the records of the command."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.errors import ConformalError
from conformallayers.lab.devices import emulator
from conformallayers.lab.devices.emulator import cells, missing_tools, run_devices, run_on_device
from conformallayers.lab.experiments.records import Records
from conformallayers.lab.options import DeviceOptions
from conformallayers.recipe.c.files import CExport
from conformallayers.testing import relative_error
from conformallayers.utils.text import count, markdown
from support import run_command

needs_tools = pytest.mark.skipif(
    bool(missing_tools()), reason=f"no {', no '.join(missing_tools())} on the path"
)
RESULTS = Path(__file__).parents[3] / "results" / "devices"
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
    again = run_on_device(made, x.numpy())
    stated = made.work_bytes + 4 * 64 + 4 * 10  # work memory, the image and the outputs
    assert stated <= again.ram <= stated + 256
    assert np.array_equal(run.outputs, again.outputs, equal_nan=True)
    assert np.array_equal(run.instructions, again.instructions)


@needs_tools
@pytest.mark.parametrize("flags", [(), ("-U__ARM_FEATURE_DSP",)], ids=["DSP", "plain"])
def test_int8_is_the_same_to_the_bit(
    flags: tuple[str, ...], folded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator, "MACHINE", (*emulator.MACHINE, *flags))
    draw = torch.Generator().manual_seed(0)
    counts = []
    for optimize in ("speed", "size"):
        small = cl.quantize(folded, torch.rand(50, *folded.input_shape, generator=draw))
        x = torch.rand(3, *folded.input_shape, generator=draw)
        made = cl.export_c(small, tmp_path, optimize=optimize)
        run = run_on_device(made, x.numpy(), self_test=True)
        with torch.no_grad():
            assert np.array_equal(run.outputs, small(x).numpy())
        counts.append(run.instructions.mean() / made.multiply_adds)
    if not flags:
        assert max(counts) < 3


@needs_tools
@pytest.mark.parametrize("flags", [(), ("-U__ARM_FEATURE_DSP",)], ids=["DSP", "plain"])
def test_windows_of_odd_sizes_on_a_device(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator, "MACHINE", (*emulator.MACHINE, *flags))
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 10, (3, 2), groups=5), nn.ReLU()),
        *(nn.Conv2d(10, 10, 3, padding=1, groups=10), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Conv2d(10, 7, 2, stride=2, dilation=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(42, 3)),
    )
    folded = cl.fold(model.eval(), (3, 11, 12))
    x = torch.rand(20, 3, 11, 12)
    small = cl.quantize(folded, x)
    run = run_on_device(cl.export_c(small, tmp_path), x[:3].numpy())
    with torch.no_grad():
        assert np.array_equal(run.outputs, small(x[:3]).numpy())


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


# -- the command --


@needs_tools
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_records_of_a_network_of_the_zoo(dtype: Any, tmp_path: Path) -> None:
    options = DeviceOptions(images=20, dtype=dtype, out=tmp_path)
    record = run_devices(["digits-micro"], options)
    assert record == json.loads((tmp_path / "devices.json").read_text())
    (row,) = record["rows"]
    assert row["images"] == 20
    assert row["accuracy"] >= 0.9
    assert row["same_class"] == 1
    assert f"| digits-micro | {dtype} | 20 of digits |" in (tmp_path / "devices.md").read_text()


def test_a_row_is_printed_with_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = json.loads((RESULTS / "devices.json").read_text("utf-8"))["rows"][0]
    with Records(
        "device", DeviceOptions(out=tmp_path), "devices", ("name", "dtype"), cells
    ) as made:
        made.add({**row, "name": "net", "dtype": "int8", "flash": 27_632, "ram": 55_920})
    line, written = capsys.readouterr().out.splitlines()
    assert line.startswith(f"net, int8: images {row['images']} of ")
    assert ", flash 27 632 bytes, RAM 55 920 bytes, stack " in line
    assert written == f"Wrote {tmp_path / 'devices.md'}"


def test_the_tables_are_those_of_the_records() -> None:
    rows = json.loads((RESULTS / "devices.json").read_text("utf-8"))["rows"]
    table = markdown(*cells(rows))
    assert (RESULTS / "devices.md").read_text("utf-8") == table
    assert table in (RESULTS.parents[1] / "docs" / "deploy.md").read_text("utf-8")
    assert len(rows) >= 6
    readme = (RESULTS.parents[1] / "README.md").read_text("utf-8").splitlines()
    shown = {line.split("|")[1].split(",")[0].strip(): line for line in readme if " kB | " in line}
    assert len(shown) >= 5
    for row in rows:
        if row["dtype"] == "int8" and row["name"] in shown:
            sizes = (f"{row[key] / 1000:.1f} kB" for key in ("flash", "ram"))
            assert f"| {' | '.join(sizes)} | {count(row['instructions'])} |" in shown[row["name"]]
        assert row["same_class"] == 1
        assert row["dtype"] == "float32" or row["output_error"] == 0


def test_missing_tools_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert missing_tools() == [emulator.COMPILER, emulator.SIZE, emulator.EMULATOR]
    assert run_command("device", "digits-micro", "--out", tmp_path / "new") == 1
    message = capsys.readouterr().err
    assert message.startswith("conformallayers: device: expected a compiler and an emulator")
    assert "apt-get install gcc-arm-none-eabi" in message
    assert message.count("\n") == 1
    assert not (tmp_path / "new").exists()
