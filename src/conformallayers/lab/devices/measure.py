"""Measure networks on an emulated microcontroller: accuracy on the device, flash, RAM, stack, instructions."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...quantization.quantize import quantize
from ...recipe.c.export import export_c
from ...recipe.integer_operations import integer_values
from ...testing import relative_error
from ...utils.files import replace_file, write_json
from ...utils.text import count, markdown
from ..checks import command_line, make_folder, require_choice, require_positive
from ..data.batches import as_input
from ..data.sources import load_test
from ..experiments.options import DeviceOptions
from ..experiments.records import Row, provenance
from ..training.evaluate import CALIBRATION, calibration_images, check_shape
from ..training.saved_models import load_model
from .emulator import require_tools, run_on_device, versions

INT8 = "int8"
_BATCH = 1000  # images that the fold runs at a time
NETWORKS = ("cifar10-micro", "cifar10-small", "mnist-micro")


def run_devices(
    networks: Sequence[str] = (), *, say: Callable[[str], object] = print, **options: Any
) -> list[Row]:
    """Run networks on test images in an emulated Cortex-M4; write one record for each, and a table of all.

    Args:
        networks: names of the zoo, files or run folders; ``NETWORKS`` if empty.
        say: receives one line for each network.
        **options: fields of :class:`conformallayers.lab.experiments.options.DeviceOptions`.
    """
    chosen = DeviceOptions(**options)
    require_positive("device", chosen, "images")
    require_choice("device --dtype", chosen.dtype, ("float32", INT8), "Name one of them.")
    require_tools("device")
    rows = []
    for network in networks or NETWORKS:
        row = measure(network, chosen)
        write_json(chosen.out / f"{row['name']}-{row['dtype']}.json", row)
        replace_file(chosen.out / "devices.md", [device_table(chosen.out).encode()])
        say(
            f"{row['name']}, {row['dtype']}: {100 * row['accuracy']:.1f} % of {row['images']} images, flash "
            f"{row['flash']}, RAM {row['ram']}, stack {row['stack']} bytes, {count(row['instructions'])} instructions per image"
        )
        rows.append(row)
    return rows


def measure(network: str, chosen: DeviceOptions) -> Row:
    """Run one network on the device, and return its record."""
    loaded = load_model(network, "device")
    folded = loaded.fold("device")
    where: Any = {"verify": chosen.verify, "where": "device", "only_test": chosen.dtype != INT8}
    notes = loaded.about, loaded.labels, folded.input_shape
    data = load_test(chosen.dataset, *notes, chosen.data_root, **where)
    images, truth = data.test_images[: chosen.images], data.test_labels[: chosen.images]
    check_shape(folded.input_shape, images, f"device {loaded.path}")
    white = loaded.white
    make_folder("device --out", chosen.out)  # a wrong argument leaves none behind
    if chosen.dtype == INT8 and not integer_values(folded.recipe.operations):
        folded = quantize(folded, calibration_images(data, folded, white, CALIBRATION))
    x = white * as_input(images, shape=folded.input_shape)
    with torch.inference_mode():
        parts = [folded(part.to(folded.dtype)) for part in x.split(_BATCH)]
    expected, labels = torch.cat(parts).float(), truth.numpy()
    with tempfile.TemporaryDirectory(prefix="conformallayers-") as folder:
        made = export_c(folded, folder, samples=x)
        run = run_on_device(made, x.numpy())
    name = Path(network).name.removesuffix(".safetensors")
    shown = {option: getattr(chosen, option) for option in ("dataset", "images", "dtype")}
    return {
        "name": name,
        "network": loaded.about.get("network", name),
        "dataset": data.name,
        "dtype": made.dtype,
        "images": len(x),
        "accuracy": float((run.classes == labels).mean()),
        "accuracy_host": float((expected.argmax(1).numpy() == labels).mean()),
        "same_class": float((run.classes == expected.argmax(1).numpy()).mean()),
        "output_error": relative_error(torch.from_numpy(run.outputs).double(), expected.double()),
        "flash": run.flash,
        "ram": run.ram,
        "stack": run.stack,
        "instructions": round(float(run.instructions.mean())),
        "multiply_adds": made.multiply_adds,
        "tools": versions(),
        **provenance(command_line(["device", network], shown)),
    }


def device_table(folder: Path) -> str:
    """Return the records of a folder as a table in Markdown."""
    rows = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    header = ["network", "numbers", "images", "accuracy", "flash, bytes", "RAM, bytes"]
    header += ["stack, bytes", "instructions per image", "multiply-adds"]
    cells = [
        [
            *(row["name"], row["dtype"], f"{row['images']} of {row['dataset']}"),
            f"{100 * row['accuracy']:.1f} %",
            *(f"{row[key]:,}".replace(",", " ") for key in ("flash", "ram", "stack")),
            *(count(row[key]) for key in ("instructions", "multiply_adds")),
        ]
        for row in sorted(rows, key=lambda row: (row["dataset"], row["dtype"], row["instructions"]))
    ]
    return markdown(header, cells)
