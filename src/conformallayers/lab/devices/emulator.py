"""Compile an exported network for a Cortex-M4, and run it on images in an emulator."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from ...errors import ConformalError, refusal
from ...recipe.c.files import CExport
from ...recipe.places import Array
from ...utils.text import size

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
_MEMORY = 2**22  # bytes of flash, and of RAM, in board.ld
_LONGEST = 3600  # seconds of a run


@dataclass(frozen=True, eq=False)
class DeviceRun:
    """Results and costs of a network on a device.

    Args:
        flash: bytes of code and constants, including the C library and the code around the network.
        ram: bytes of static memory: work memory, one image, the outputs, and some of the C library.
        stack: bytes that the call of the network used.
        classes: (N,), the index of the largest output.
        outputs: (N, outputs), float32.
        instructions: (N,), per image, in multiples of 40.
    """

    flash: int
    ram: int
    stack: int
    classes: Array
    outputs: Array
    instructions: Array


def missing_tools() -> list[str]:
    """Return the commands that are not on the path."""
    return [name for name in (COMPILER, SIZE, EMULATOR) if shutil.which(name) is None]


def require_tools(where: str) -> None:
    """Refuse a machine without the compiler or the emulator."""
    missing = missing_tools()
    if missing:
        remedy = f"On Debian: apt-get install {PACKAGES}."
        got = f"no {' and no '.join(missing)} on the path"
        raise refusal(where, "a compiler and an emulator for Cortex-M", got, remedy)


def versions() -> dict[str, str]:
    """Return the version lines of the compiler and the emulator."""
    lines = {}
    for name in (COMPILER, EMULATOR):
        done = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
        lines[name] = done.stdout.splitlines()[0]
    return lines


def run_on_device(made: CExport, images: Array, *, self_test: bool = False) -> DeviceRun:
    """Cross-compile the files of ``export_c``, optionally with their self-test, and run images (N, …) one by one."""
    require_tools("device")
    for kind, needed in (("flash", made.constant_bytes), ("RAM", made.ram_bytes)):
        if needed > _MEMORY:
            expected, got = f"at most {size(_MEMORY)} of {kind}, which the board has", size(needed)
            raise refusal("device", expected, got, "Try --dtype int8, or a smaller network.")
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


def _macros(made: CExport) -> list[str]:
    """Return compiler flags that tell the sources in ``board`` the names of the network."""
    macro = made.name.upper()
    words = {
        "MODEL_HEADER": f'"{made.header.name}"',
        "MODEL_INPUTS": f"{macro}_INPUT_SIZE",
        "MODEL_OUTPUTS": f"{macro}_OUTPUT_SIZE",
        "MODEL_PREDICT": f"{made.name}_predict",
    }
    flags = [f"-D{key}={word}" for key, word in words.items()]
    return [*flags, f"-I{made.header.resolve().parent}"]


def _compile(made: CExport, folder: Path, self_test: bool) -> tuple[int, int]:
    """Write board.elf; return its bytes of flash and of static memory."""
    command = [COMPILER, *MACHINE, *_FLAGS, *_macros(made)]
    if self_test:
        command += [f"-DMODEL_SELF_TEST={made.name}_self_test", f"-D{made.name.upper()}_SELF_TEST"]
    with resources.as_file(resources.files(__package__) / "board") as board:
        command += [str(board / "board.c"), str(made.source.resolve())]
        command += ["-T", str(board / "board.ld"), *_LINKED, "-lm"]
        _run([*command, "-o", "board.elf"], folder, f"compile {made.source}")
    # Initialised data takes flash, from which it is copied at the start, and RAM.
    text = _run([SIZE, "board.elf"], folder, "measure board.elf")
    code, data, bss = map(int, re.findall(r"\d+", text.splitlines()[1])[:3])
    return code + data, data + bss


def _run(command: list[str], folder: Path, task: str) -> str:
    """Run a command; return its output."""
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LONGEST,
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise ConformalError(f"device: could not {task}: exit status {done.returncode}. {said}")
    return done.stdout
