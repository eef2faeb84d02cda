"""Compile networks for a Cortex-M4 and run them in an emulator: accuracy, flash, RAM, stack, instructions."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import ConformalError, refusal
from ...quantization.quantize import quantize
from ...recipe.c.export import export_c
from ...recipe.c.files import CExport
from ...recipe.integer_operations import integer_values
from ...recipe.places import Array
from ...testing import relative_error
from ...utils.text import count
from ..data.batches import as_input
from ..data.datasets import load_test
from ..experiments.records import Cells, Records, Row
from ..options import DeviceOptions
from ..training.evaluate import all_scores, calibration_images
from ..training.saved_models import load_model

INT8 = "int8"
NETWORKS = ("cifar10-micro", "cifar10-small", "mnist-micro")
COMPILER, SIZE, EMULATOR = "arm-none-eabi-gcc", "arm-none-eabi-size", "qemu-system-arm"
PACKAGES = "gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system-arm"
MACHINE = ("-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16")
_WARNINGS = ("-Wall", "-Wextra", "-Werror")
_FLAGS = ("-std=c99", "-O2", *_WARNINGS, "-ffunction-sections", "-fdata-sections")
_LINKED = ("-nostartfiles", "--specs=nano.specs", "--specs=nosys.specs", "-Wl,--gc-sections")
_BOARD = ("-M", "mps2-an386", "-cpu", "cortex-m4", "-nographic", "-monitor", "none")
_HOST = ("-serial", "none", "-semihosting-config", "enable=on,target=native")
# Per tick of the timer: it runs at 25 MHz, and with -icount shift=0 an instruction takes 1 ns.
INSTRUCTIONS = 40
_LONGEST = 3600  # seconds of a run


@dataclass(frozen=True, eq=False)
class DeviceRun:
    """Results and costs of a network on a device."""

    flash: int  # bytes of code and constants, C library included
    ram: int  # bytes of static memory: work memory, image, outputs, C library
    stack: int  # bytes that the call of the network used
    classes: Array  # (N,), the index of the largest output
    outputs: Array  # (N, outputs), float32
    instructions: Array  # (N,), multiples of 40


def missing_tools() -> list[str]:
    """Return the commands that are not on the path."""
    return [name for name in (COMPILER, SIZE, EMULATOR) if shutil.which(name) is None]


def run_on_device(made: CExport, images: Array, *, self_test: bool = False) -> DeviceRun:
    """Cross-compile the files of ``export_c``, optionally with their self-test, and run images (N, …) one by one."""
    with tempfile.TemporaryDirectory(prefix="conformallayers-") as name:
        folder = Path(name)
        np.ascontiguousarray(images, "<f4").tofile(folder / "images.bin")
        flash, ram = _compile(made, folder, self_test)
        command = [EMULATOR, *_BOARD, *_HOST, "-icount", "shift=0", "-kernel", "board.elf"]
        _run(command, folder, f"run {made.name} in {EMULATOR}")
        words = np.fromfile(folder / "results.bin", "<u4")
    # Class, ticks and outputs of each image as words of 32 bits, then the stack.
    rows, last = words[:-1].reshape(len(images), -1), words[-1]
    return DeviceRun(
        flash=flash,
        ram=ram,
        stack=int(last),
        classes=rows[:, 0].copy().view("<i4").astype(np.int64),
        outputs=rows[:, 2:].copy().view("<f4"),
        instructions=rows[:, 1].astype(np.int64) * INSTRUCTIONS,
    )


def _compile(made: CExport, folder: Path, self_test: bool) -> tuple[int, int]:
    """Write board.elf; return its bytes of flash and of static memory."""
    macro = made.name.upper()
    # The names of the network, for the sources in the folder "board".
    names = {
        "MODEL_HEADER": f'"{made.header.name}"',
        "MODEL_INPUTS": f"{macro}_INPUT_SIZE",
        "MODEL_OUTPUTS": f"{macro}_OUTPUT_SIZE",
        "MODEL_PREDICT": f"{made.name}_predict",
    }
    command = [COMPILER, *MACHINE, *_FLAGS, f"-I{made.header.resolve().parent}"]
    command += [f"-D{key}={word}" for key, word in names.items()]
    if self_test:
        command += [f"-DMODEL_SELF_TEST={made.name}_self_test", f"-D{macro}_SELF_TEST"]
    board = Path(__file__).with_name("board")
    command += [str(board / "board.c"), str(made.source.resolve())]
    command += ["-T", str(board / "board.ld"), *_LINKED, "-lm"]
    _run([*command, "-o", "board.elf"], folder, f"compile {made.source}")
    text = _run([SIZE, "board.elf"], folder, "measure board.elf")
    # Code with constants, initialized memory, which is copied from flash at the start, and other memory.
    code, data, bss = (int(word) for word in text.splitlines()[1].split()[:3])
    return code + data, data + bss


def _run(command: list[str], folder: Path, task: str) -> str:
    """Run a command; return its output."""
    how: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=folder, timeout=_LONGEST, **how)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[-2000:]
        raise ConformalError(f"device: could not {task}: exit status {done.returncode}. {said}")
    return str(done.stdout)


# -- records --------------------------------------------------------------------------------------


def run_devices(networks: Sequence[str], options: DeviceOptions) -> Row:
    """Run networks, ``NETWORKS`` if there are none, on test images in an emulated Cortex-M4; return the record."""
    if missing := missing_tools():
        remedy = f"On Debian: apt-get install {PACKAGES}."
        got = f"no {' and no '.join(missing)} on the path"
        raise refusal("device", "a compiler and an emulator for Cortex-M", got, remedy)
    records = Records("device", options, "devices", ("name", "dtype"), cells)
    with records:
        for network in networks or NETWORKS:
            records.add(measure(network, options))
    return records.record


def measure(network: str, chosen: DeviceOptions) -> Row:
    """Run one network on the device, and return its record."""
    folded = load_model(network, "device").fold("device")
    only_test = chosen.dtype != INT8
    places = folded.input_shape, chosen, "device --dataset"
    data = load_test(chosen.dataset, folded, *places, only_test=only_test)
    images, truth = data.test_images[: chosen.images], data.test_labels[: chosen.images]
    if chosen.dtype == INT8 and not integer_values(folded.recipe.operations):
        folded = quantize(folded, calibration_images(data, folded))
    expected = all_scores(folded, images, shape=folded.input_shape)
    x = as_input(images, shape=folded.input_shape)
    with tempfile.TemporaryDirectory(prefix="conformallayers-") as folder:
        made = export_c(folded, folder, optimize="size")
        run = run_on_device(made, x.numpy())
    return {
        "name": Path(network).name.removesuffix(".safetensors"),
        "dataset": data.name,
        "dtype": made.dtype,
        "images": len(x),
        "accuracy": float((run.classes == truth.numpy()).mean()),
        "same_class": float((run.classes == expected.argmax(1).numpy()).mean()),
        "output_error": relative_error(torch.from_numpy(run.outputs).double(), expected.double()),
        "flash": run.flash,
        "ram": run.ram,
        "stack": run.stack,
        "instructions": round(float(run.instructions.mean())),
        "multiply_adds": made.multiply_adds,
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
