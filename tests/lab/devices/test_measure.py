"""conformallayers device: records, the table, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import conformallayers as cl
from conformallayers.errors import ConformalError
from conformallayers.lab.devices.emulator import cells, missing_tools, run_devices
from conformallayers.utils.text import count, markdown
from support import run_command

needs_tools = pytest.mark.skipif(
    bool(missing_tools()), reason=f"no {', no '.join(missing_tools())} on the path"
)
RESULTS = Path(__file__).parents[3] / "results" / "devices"


@needs_tools
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_records_of_a_network_of_the_zoo(dtype: str, tmp_path: Path) -> None:
    said: list[str] = []
    options = {"images": 20, "dtype": dtype, "out": tmp_path, "say": said.append}
    record = run_devices(["digits-micro"], **options)
    assert record == json.loads((tmp_path / "devices.json").read_text())
    (row,) = record["rows"]
    assert row["images"] == 20
    assert row["accuracy"] >= 0.9
    assert row["same_class"] == 1
    assert row["accuracy"] == row["accuracy_host"]
    assert said[0].startswith("name digits-micro, ")
    assert f"| digits-micro | {dtype} | 20 of digits |" in (tmp_path / "devices.md").read_text()


def test_the_tables_are_those_of_the_records() -> None:
    rows = json.loads((RESULTS / "devices.json").read_text("utf-8"))["rows"]
    table = markdown(*cells(rows))
    assert (RESULTS / "devices.md").read_text("utf-8") == table
    assert table in (RESULTS.parents[1] / "docs" / "devices.md").read_text("utf-8")
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


@needs_tools
def test_a_plain_network_runs_as_well(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "plain.safetensors"
    cl.save(cl.fold(cl.networks.MLP(4), (3, 32, 32)), path, about={"dataset": "digits"})
    (row,) = run_devices([str(path)], images=3, out=tmp_path / "out", say=str)["rows"]
    assert (row["name"], row["same_class"]) == ("plain", 1)
    assert row["output_error"] < 1e-5


def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConformalError, match="device --images: expected a value greater than 0"):
        run_devices(["digits-micro"], images=0, out=tmp_path)
    monkeypatch.setenv("PATH", os.devnull)
    assert run_command("device", "digits-micro", "--out", tmp_path / "new") == 1
    message = capsys.readouterr().err
    assert message.startswith("conformallayers: device: expected a compiler and an emulator")
    assert message.count("\n") == 1
    assert not (tmp_path / "new").exists()


@needs_tools
def test_a_network_without_a_data_set_needs_one(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    cl.save(cl.fold(cl.ConformalLayers(cl.Flatten()), (1, 8, 8)), path)
    with pytest.raises(
        ConformalError, match="device --dataset: expected the set of the test images"
    ):
        run_devices([str(path)], out=tmp_path / "new")
    with pytest.raises(ConformalError, match=r"device nope: .* got no such file"):
        run_devices(["nope"], out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
