"""Attack runtimes: one fold in torch, numpy, ONNX Runtime and C, from its file, against the oracle."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from conformallayers import numpy as numpy_runtime
from conformallayers.errors import ConformalError
from conformallayers.folding.fold import fold
from conformallayers.folding.folded import Folded
from conformallayers.folding.save import load, save
from conformallayers.folding.strategies import STRATEGIES
from conformallayers.recipe.c.export import export_c
from conformallayers.recipe.onnx.export import LIMITS, open_session
from soak.case import Case
from soak.generator import Generator, samples
from soak.reference import Reference

Run = Callable[[Tensor], Tensor]
COMPILER = shutil.which("cc")
_C_LIMIT = 1e-5  # see docs/deploy.md


def attack(case: Case) -> None:
    """Fold a random network, save it, and run the file in every runtime."""
    model, shape, large = Generator(case.rng, portable=True).any_network()
    dtype = case.rng.choice((torch.float32, torch.float32, torch.float64))
    strategy = "layers" if large else case.rng.choice(("auto", *STRATEGIES))
    model = model.to(dtype)
    x = samples(case.rng, shape, dtype, batch=2 if large else 7)
    case.subject = f"{strategy} {dtype} {shape} {model}"
    try:
        folded = fold(model, shape, strategy=strategy, dtype=dtype)
    except ConformalError:
        case.counts["strategies that do not apply"] += 1
        folded = fold(model, shape, strategy="layers", dtype=dtype)
    case.counts["folds"] += 1
    expected = Reference(model, x, dtype)
    for runtime, y in outputs(case, folded, x, compiles=dtype == torch.float32 and not large):
        extra = {"ONNX Runtime": LIMITS[dtype], "C": _C_LIMIT}.get(runtime, 0.0)
        fault = expected.error(y, extra)
        if fault:
            case.find(f"{folded.strategy} in {runtime}: {fault}")


def outputs(
    case: Case, folded: Folded, x: Tensor, compiles: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Save a fold, and yield each runtime that takes it with its outputs."""
    runtimes: dict[str, Callable[[Folded, Path], Run]] = {"torch": _torch, "numpy": _numpy}
    if find_spec("onnxruntime") is not None:
        runtimes["ONNX Runtime"] = _onnx
    if COMPILER is not None and compiles:
        runtimes["C"] = _c
    with TemporaryDirectory() as name:
        for runtime, build in runtimes.items():
            try:
                run = build(folded, Path(name))
            except ConformalError as error:
                if runtime in ("torch", "numpy"):
                    case.find(f"{runtime} refuses: {error}")
                case.counts[f"{runtime}: refused by name"] += 1
                continue
            case.counts[f"{runtime}: runs"] += 1
            with torch.no_grad():
                yield runtime, run(x)


def missing() -> list[str]:
    """Return the runtimes that this machine lacks."""
    found = [] if find_spec("onnxruntime") is not None else ["ONNX Runtime: install the extra onnx"]
    return found if COMPILER is not None else [*found, "C: there is no compiler cc"]


def _torch(folded: Folded, folder: Path) -> Run:
    save(folded, folder / "net.safetensors")
    return load(folder / "net.safetensors")


def _numpy(folded: Folded, folder: Path) -> Run:
    network = numpy_runtime.load(folder / "net.safetensors")
    return lambda x: torch.from_numpy(network(x.numpy()))


def _onnx(folded: Folded, folder: Path) -> Run:
    # Not by export_onnx, which refuses a file that disagrees with torch: that would hide a fault.
    run = open_session(folded, threads=1)
    return lambda x: torch.from_numpy(run(x.numpy()))


def _c(folded: Folded, folder: Path) -> Run:
    made = export_c(folded, folder)  # what it does not refuse must compile
    library = folder / "net.so"
    flags = ("-std=c99", "-O2", "-fPIC", "-shared", "-o", str(library))
    subprocess.run([str(COMPILER), *flags, str(made.source), "-lm"], check=True)
    predict = getattr(ctypes.CDLL(str(library)), f"{made.name}_predict_with")
    work = torch.empty(made.work_bytes // 4)

    def run(x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty(len(x), math.prod(folded.output_shape))
        for image, scores in zip(x, y, strict=True):
            predict(*(ctypes.c_void_p(a.data_ptr()) for a in (image, scores, work)))
        return y.view(len(x), *folded.output_shape)

    return run
