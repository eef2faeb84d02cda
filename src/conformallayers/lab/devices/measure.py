"""Measure networks on an emulated microcontroller: accuracy on the device, flash, RAM, stack, instructions."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import refusal, shape_text
from ...folding.folded import Folded
from ...folding.quantize import quantize
from ...networks import IMAGE_SHAPE
from ...recipe.c.export import export_c
from ...recipe.integer_operations import integer_values
from ...testing import relative_error
from ...utils.files import replace_file, write_json
from ...utils.text import count, markdown
from ..checks import command_line, make_folder, require_choice, require_positive
from ..data.datasets import Dataset
from ..data.sources import TrainingData, load_test
from ..experiments.deployed import deployed
from ..experiments.options import DeviceOptions
from ..experiments.records import Row, provenance
from ..training.evaluate import accuracy
from ..training.quantize import CALIBRATION, calibration_images
from ..training.saved_models import Loaded, fold_model, load_model, white_of
from .emulator import host_instructions, require_tools, run_on_device, versions

INT8 = "int8"
NETWORKS = ("cifar10-micro", "cifar10-small", "mnist-micro")


def run_devices(
    networks: Sequence[str] = (), *, say: Callable[[str], object] = print, **options: Any
) -> list[Row]:
    """Run networks on test images in an emulated Cortex-M4; write one record for each, and a table of all.

    Args:
        networks: as commands take them; some of the zoo if none is given.
        say: receives one line for each network.
        **options: fields of :class:`conformallayers.lab.experiments.options.DeviceOptions`.
    """
    chosen = DeviceOptions(**options)
    require_positive("device", chosen, "images")
    require_choice("device --dtype", chosen.dtype, ("float32", INT8), "Name one of them.")
    require_tools("device")
    make_folder("device --out", chosen.out)
    rows = []
    for network in networks or NETWORKS:
        row = measured(network, chosen)
        write_json(chosen.out / f"{row['name']}-{row['dtype']}.json", row)
        replace_file(chosen.out / "devices.md", [device_table(chosen.out).encode()])
        say(
            f"{row['name']}, {row['dtype']}: {100 * row['accuracy']:.1f} % of {row['images']} images, flash "
            f"{row['flash']}, RAM {row['ram']}, stack {row['stack']} bytes, {count(row['instructions'])} instructions per image"
        )
        rows.append(row)
    return rows


def measured(network: str, chosen: DeviceOptions) -> Row:
    """Return the record of one network."""
    loaded = load_model(network, "device")
    folded = _folded(loaded)
    data = _data(loaded, folded, chosen)
    if chosen.dtype == INT8 and not integer_values(folded.recipe.operations):
        white = white_of(loaded.about, loaded.path)
        folded = quantize(folded, calibration_images(data, folded, white, CALIBRATION))
    x, expected = _run(loaded, folded, data.test_images[: chosen.images])
    labels = data.test_labels[: chosen.images].numpy()
    with tempfile.TemporaryDirectory(prefix="conformallayers-") as folder:
        made = export_c(folded, folder, samples=x)
        run = run_on_device(made, x.numpy())
        host = host_instructions(made, x[0].numpy())
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
        "instructions_least": int(run.instructions.min()),
        "instructions_most": int(run.instructions.max()),
        "instructions_host": host,
        "multiply_adds": made.multiply_adds,
        "stated": {
            "constants": made.constant_bytes,
            "arena": made.work_bytes,
            "stack": made.stack_bytes,
        },
        "tools": versions(),
        **provenance(command_line(["device", network], _given(chosen))),
    }


def _given(chosen: DeviceOptions) -> dict[str, Any]:
    usual = DeviceOptions()
    names = ("dataset", "images", "dtype")
    values = {name: getattr(chosen, name) for name in names}
    return {name: value for name, value in values.items() if value != getattr(usual, name)}


def _folded(loaded: Loaded) -> Folded:
    """Return a network as operations: a fold, or the layers of a plain network."""
    if isinstance(loaded.module, Folded):
        return loaded.module
    return fold_model(loaded, "device") if loaded.folds else deployed(loaded.module)


def _data(loaded: Loaded, folded: Folded, chosen: DeviceOptions) -> Dataset:
    """Return the images that a network is tested on."""
    name = chosen.dataset or loaded.dataset
    if name is None:
        remedy = "Name one: --dataset mnist."
        raise refusal("device --dataset", "the set of the test images", "none", remedy)
    trained = TrainingData(loaded.dataset, loaded.labels, loaded.pictures, folded.input_shape)
    where: Any = {"verify": chosen.verify, "where": "device", "only_test": chosen.dtype != INT8}
    data = load_test(name, trained, chosen.data_root, **where)
    shape = tuple(data.test_images.shape[1:])
    if folded.input_shape not in (IMAGE_SHAPE, shape):
        expected, remedy = f"a fold for {shape_text(shape)}", "Fold it for these images."
        raise refusal(f"device {loaded.path}", expected, shape_text(folded.input_shape), remedy)
    return data


def _run(loaded: Loaded, folded: Folded, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return stored images as the network takes them, and the outputs of the fold."""
    taken: list[Tensor] = []
    scores: list[Tensor] = []
    white = white_of(loaded.about, loaded.path)

    def run(x: Tensor) -> Tensor:
        taken.append((white * x).float())
        result: Tensor = folded(taken[-1].to(folded.dtype))
        return result

    stored = folded.input_shape == tuple(images.shape[1:])
    accuracy(run, images, torch.zeros(len(images), dtype=torch.long), stored=stored, keep=scores)
    return torch.cat(taken), torch.cat(scores)


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
