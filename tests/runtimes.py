"""Folds in every runtime that this machine has, as their users run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.folding.folded import Folded
from conformallayers.recipe.integer_operations import integer_values
from conformallayers.recipe.onnx.export import open_session
from conformallayers.recipe.recipe import Recipe
from node import NODE, document_of, outputs
from oracle import relative_error
from programs import COMPILER, FLAGS, SANITIZED, run_program

Batch, Samples = Sequence[cl.Folded], Sequence[Tensor]
Runtime = Callable[[Batch, Path, Samples], list[Tensor]]
# Relative errors of runtimes against torch.
CLOSE = {torch.float64: 1e-12, torch.float32: 5e-6}
NEAR = 1e-5  # of ONNX Runtime and C


def _torch(folded: cl.Folded, folder: Path, x: Tensor) -> Tensor:
    return _in_parts(cl.load(_saved(folded, folder)), x[:0], x[:1], x[1:])


def _numpy(folded: cl.Folded, folder: Path, x: Tensor) -> Tensor:
    net = cln.load(_saved(folded, folder))
    return _in_parts(lambda part: net(part.numpy()), x[:0], x[:1], x[1:])


def _in_parts(run: Callable[[Tensor], Any], *parts: Tensor) -> Tensor:
    """Run parts of a batch, such as none or one of its samples: no sample depends on the others."""
    return torch.cat([torch.as_tensor(run(part)) for part in parts])


def _saved(folded: cl.Folded, folder: Path) -> Path:
    path = folder / "net.safetensors"
    cl.save(folded, path)
    return path


def _onnx(folded: cl.Folded, folder: Path, x: Tensor) -> Tensor:
    # Not by export_onnx, which refuses a file that disagrees with torch: that would hide a fault.
    session = open_session(folded, threads=1)
    return _in_parts(lambda part: session(part.numpy()), x[:1], x[1:])


def _each(run: Callable[[cl.Folded, Path, Tensor], Tensor]) -> Runtime:
    return lambda folds, folder, xs: [
        run(fold, folder, x) for fold, x in zip(folds, xs, strict=True)
    ]


def _javascript(folds: Batch, folder: Path, xs: Samples) -> list[Tensor]:
    documents = [document_of(fold.recipe, fold.dtype) for fold in folds]
    return outputs(folder, list(zip(documents, xs, strict=True)))


def _c(aim: str) -> Runtime:
    """Compile folds into one program, with sanitizers, and check the classes that it returns."""

    def run(folds: Batch, folder: Path, xs: Samples) -> list[Tensor]:
        names = [f"net{index}" for index in range(len(folds))]
        pairs = zip(folds, names, strict=True)
        made = [cl.export_c(fold, folder, name=name, optimize=aim) for fold, name in pairs]
        command = [str(COMPILER), *FLAGS, *SANITIZED]
        found = run_program(folder, made, list(xs), command) if made else []
        for best, y in found:
            assert torch.equal(best.long(), y.argmax(1).where(~y.isnan().any(1), -1))
        return [y.view(-1, *fold.output_shape) for (_, y), fold in zip(found, folds, strict=True)]

    return run


RUNTIMES: dict[str, Runtime] = {"torch": _each(_torch), "numpy": _each(_numpy)}
if find_spec("onnxruntime") is not None:
    RUNTIMES["ONNX Runtime"] = _each(_onnx)
if NODE is not None:
    RUNTIMES["JavaScript"] = _javascript
if COMPILER is not None:
    RUNTIMES |= {f"C for {aim}": _c(aim) for aim in ("speed", "size")}
ALL = tuple(name for name in RUNTIMES if name != "C for size")
QUICK = tuple(name for name in ALL if not name.startswith("C"))  # nothing to compile


def with_types(recipe: Recipe, dtype: torch.dtype) -> Folded:
    kept = recipe.fixed_dtypes()
    cast = recipe.with_constants(lambda name, a: a if name in kept else a.to(dtype))
    return Folded(cast, dtype, {})


def takes(name: str, folded: cl.Folded) -> bool:
    """Tell whether a runtime takes the dtype of a fold."""
    return folded.dtype == torch.float32 or name in ("torch", "numpy", "JavaScript")


def run(name: str, folded: cl.Folded, folder: Path, x: Tensor) -> Tensor:
    """Return what a runtime gives for one fold."""
    return RUNTIMES[name]([folded], folder, [x])[0]


def wrong(
    folds: Sequence[Any], folder: Path, xs: Samples, names: Sequence[str] = ALL
) -> dict[tuple[str, int], float]:
    """Return the errors against torch that are too large, by runtime and fold."""
    found: dict[tuple[str, int], float] = {}
    with torch.no_grad():
        expected = [fold(x) for fold, x in zip(folds, xs, strict=True)]
        for name in (name for name in names if name in RUNTIMES):
            chosen = [index for index, fold in enumerate(folds) if takes(name, fold)]
            ys = RUNTIMES[name]([folds[i] for i in chosen], folder, [xs[i] for i in chosen])
            for i, y in zip(chosen, ys, strict=True):
                assert y.dtype == folds[i].dtype
                limit = NEAR if name.startswith(("C", "ONNX")) else CLOSE[y.dtype]
                if integer_values(folds[i].recipe.operations):
                    limit = 0.0  # int8: every runtime has the same bits
                error = relative_error(y, expected[i])
                if not error <= limit:
                    found[name, i] = error
    return found
