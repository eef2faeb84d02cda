"""Predict the time of a recipe from counts of work and the measured rates of this machine.

The rates are measured once, in about half a second, and kept in the user's cache folder. A machine that
is busy with other programs would give rates a hundred times too low: typical ones are used until it is not.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache

import torch
from torch.nn import functional as F

from ..utils.files import cache_folder, replace_file
from ..utils.quiet import ignored_warnings
from ..utils.timing import call_seconds

_ROUNDS = 7  # the fastest round counts, since noise only adds time
_BUSY = 0.8  # below this share of the time on a core, other programs have slowed the measurement
BATCH = 64  # the batch size that costs are compared at


@dataclass(frozen=True)
class Machine:
    """Rates of one machine at float32 with its present number of threads.

    ``gemm``, ``blocks``, ``conv`` and ``sparse`` are multiply-adds a second in one large product, in
    many small ones, in a convolution and in a sparse product; ``stream`` is elements a second in a pass
    over memory; ``fft`` is elements · log2(elements) a second; ``call`` is seconds for any call at all.
    """

    gemm: float
    blocks: float
    conv: float
    sparse: float
    stream: float
    fft: float
    call: float


@dataclass(frozen=True)
class Cost:
    """The work of one sample by kind, and the bytes of all constants."""

    gemm: float = 0  # multiply-adds in large products
    blocks: float = 0  # multiply-adds in many small products
    conv: float = 0  # multiply-adds in convolutions and poolings
    sparse: float = 0  # multiply-adds in sparse products
    idle: float = 0  # multiply-adds of lanes that a convolution has no channels for
    stream: float = 0  # elements that a pass over memory touches
    fft: float = 0  # elements · log2(elements)
    calls: int = 0  # per batch
    bytes: int = 0

    @property
    def multiply_adds(self) -> float:
        """All multiply-adds of one sample."""
        return self.gemm + self.blocks + self.conv + self.sparse

    def seconds(self, machine: Machine) -> float:
        """Return the expected time of one batch of 64."""
        names = "gemm", "blocks", "conv", "sparse", "stream", "fft"
        work: float = sum(getattr(self, name) / getattr(machine, name) for name in names)
        work += self.idle / machine.conv
        return BATCH * work + self.calls * machine.call

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, vars(self).values(), vars(other).values()))


# Two cores of a server CPU; used where measuring is switched off or disturbed.
TYPICAL = Machine(57e9, 60e9, 85e9, 8e9, 10e9, 14e9, 3e-6)


@lru_cache(maxsize=1)
def machine() -> Machine:
    """Return this machine's rates: from the cache folder, or measured now in about half a second.

    On a busy machine typical rates are returned and nothing is kept, so that the next process measures again.

    The folder is ``$CONFORMALLAYERS_CACHE`` or the user's cache folder. With
    ``CONFORMALLAYERS_CALIBRATE=0`` nothing is measured or written and typical rates are used.
    """
    if os.environ.get("CONFORMALLAYERS_CALIBRATE") == "0":
        return TYPICAL
    kind = f"{platform.machine()}-{os.cpu_count()}-{torch.get_num_threads()}-{torch.__version__}"
    path = cache_folder() / f"machine-3-{kind}.json"  # 3: version of the set of rates
    with contextlib.suppress(OSError, ValueError, TypeError):
        kept = json.loads(path.read_text())
        return Machine(**{f.name: float(kept[f.name]) for f in fields(Machine)})
    measured = calibrate()
    if measured is None:
        return TYPICAL
    with contextlib.suppress(OSError):  # a read-only home costs half a second, not the fold
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [json.dumps(asdict(measured)).encode()])
    return measured


def calibrate() -> Machine | None:
    """Measure the rates; None if this thread had to wait for other programs meanwhile."""
    start, start_on_core = time.perf_counter(), time.thread_time()
    measured = _rates()
    on_core = (time.thread_time() - start_on_core) / (time.perf_counter() - start)
    return measured if on_core > _BUSY else None


def _rates() -> Machine:
    with torch.inference_mode():
        a, b = torch.rand(BATCH, 1024), torch.rand(1024, 1024)
        rows, blocks = torch.rand(32, BATCH, 288), torch.rand(32, 288, 96)
        image, kernel = torch.rand(BATCH, 16, 32, 32), torch.rand(16, 16, 3, 3)
        image = image.contiguous(memory_format=torch.channels_last)
        first = torch.arange(0, 20 * 1024 + 1, 20, dtype=torch.int32)
        column = (torch.arange(20 * 1024, dtype=torch.int32) % 1024).sort().values
        with ignored_warnings():  # torch calls its sparse formats beta
            matrix = torch.sparse_csr_tensor(first, column, torch.rand(20 * 1024))
        field = torch.rand(BATCH, 3, 32, 32)
        tiny = torch.rand(4)
        return Machine(
            gemm=BATCH * 1024**2 / _seconds(lambda: a @ b),
            blocks=32 * BATCH * 288 * 96 / _seconds(lambda: torch.bmm(rows, blocks)),
            conv=BATCH * 1024 * 144 * 16 / _seconds(lambda: F.conv2d(image, kernel, padding=1)),
            sparse=BATCH * 20 * 1024 / _seconds(lambda: matrix @ a.T),
            stream=image.numel() / _seconds(lambda: image * 2.0),
            fft=field.numel() * 10 / _seconds(lambda: torch.fft.rfft2(field)),
            call=_seconds(lambda: tiny + tiny),
        )


def _seconds(run: Callable[[], object]) -> float:
    run()  # the first call pays for caches and threads
    return min(call_seconds(run) for _ in range(_ROUNDS))
