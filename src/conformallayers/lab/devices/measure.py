"""Measure networks on an emulated microcontroller: accuracy on the device, flash, RAM, stack, instructions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...quantization.quantize import quantize
from ...recipe.c.export import export_c
from ...recipe.integer_operations import integer_values
from ...testing import relative_error
from ...utils.text import count
from ..checks import require_choice, require_positive
from ..data.batches import as_input
from ..data.datasets import load_test
from ..experiments.records import Cells, Records, Row
from ..options import DeviceOptions
from ..training.evaluate import CALIBRATION, calibration_images, check_shape
from ..training.saved_models import load_model
from .emulator import require_tools, run_on_device, versions

INT8 = "int8"
_BATCH = 1000  # images that the fold runs at a time
NETWORKS = ("cifar10-micro", "cifar10-small", "mnist-micro")


def run_devices(
    networks: Sequence[str] = (), *, say: Callable[[str], object] = print, **options: Any
) -> Row:
    """Run networks on test images in an emulated Cortex-M4; write devices.json and devices.md.

    Args:
        networks: names of the zoo, files or run folders; ``NETWORKS`` if empty.
        say: receives one line for each network.
        **options: fields of :class:`conformallayers.lab.options.DeviceOptions`.
    """
    chosen = DeviceOptions(**options)
    require_positive("device", chosen, "images")
    require_choice("device --dtype", chosen.dtype, ("float32", INT8), "Name one of them.")
    require_tools("device")
    measured = [partial(measure, network, chosen) for network in networks or NETWORKS]
    records = Records("device", chosen, "devices", ("name", "dtype"), cells=cells, say=say)
    with records:
        for one in measured:
            records.add(one())
    return records.record


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
    }


def cells(rows: Sequence[Row]) -> Cells:
    """Return a table of all networks, the cheapest of each data set and dtype first."""
    header = ["network", "numbers", "images", "accuracy", "flash, bytes", "RAM, bytes"]
    header += ["stack, bytes", "instructions per image", "multiply-adds"]
    lines = [
        [
            *(row["name"], row["dtype"], f"{row['images']} of {row['dataset']}"),
            f"{100 * row['accuracy']:.1f} %",
            *(f"{row[key]:,}".replace(",", " ") for key in ("flash", "ram", "stack")),
            *(count(row[key]) for key in ("instructions", "multiply_adds")),
        ]
        for row in sorted(rows, key=lambda row: (row["dataset"], row["dtype"], row["instructions"]))
    ]
    return header, lines
