"""export_c: programs compile without a warning and compute what torch computes, or are refused by name."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conformallayers.errors import ConformalError
from conformallayers.folding.certificate import Certificate
from conformallayers.recipe.c.export import WRITE, export_c
from conformallayers.recipe.c.files import CExport
from conformallayers.recipe.c.simplify import simplified
from conformallayers.recipe.recipe import Recipe
from conformallayers.recipe.torch.module import RecipeModule
from conformallayers.testing import relative_error
from conformallayers.testing.recipes import RECIPE_CASES

COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
FLAGS = ["-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-pedantic", "-Wconversion"]
FLAGS += ["-Wdouble-promotion", "-Wshadow"]
Run = Callable[[Tensor], tuple[Tensor, Tensor]]


class Fold(RecipeModule):
    """A recipe with what an export asks of a fold."""

    def __init__(
        self,
        recipe: Recipe,
        dtype: torch.dtype = torch.float32,
        certificates: tuple[Certificate | None, ...] = (),
    ) -> None:
        super().__init__(
            recipe.with_constants(lambda n, a: a if n in recipe.wide else a.to(dtype)), dtype
        )
        self.strategy, self.origin = "dense", "sha256:00"
        self.input_shape, self.output_shape = recipe.input_shape, recipe.output_shape
        self.plans = {str(i): SimpleNamespace(certificate=c) for i, c in enumerate(certificates)}


def compiled(folder: Path, exports: list[CExport], *flags: str) -> list[Run]:
    """Compile programs into one library and return a function for each: a batch → indices, outputs."""
    sources = [export.source.name for export in exports]
    command = [str(COMPILER), *FLAGS, *flags, "-shared", "-fPIC", *sources, "-lm", "-o", "all.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    library = ctypes.CDLL(str(folder / "all.so"))

    def runner(export: CExport) -> Run:
        function = getattr(library, f"{export.name}_predict_with")
        text = export.header.read_text("ascii")
        size = int(text.split("_OUTPUT_SIZE ")[1].split()[0])

        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            images = np.ascontiguousarray(x.flatten(1).float().numpy())
            out = np.zeros((len(x), size), np.float32)
            work = np.zeros(export.work_bytes // 4, np.float32)
            best = [
                function(*(ctypes.c_void_p(a.ctypes.data) for a in (image, y, work)))
                for image, y in zip(images, out, strict=True)
            ]
            return torch.tensor(best), torch.from_numpy(out)

        return run

    return [runner(export) for export in exports]


def hard(shape: tuple[int, ...]) -> Tensor:
    """Return samples of every size, a zero one, and some with NaN and infinity."""
    x = torch.randn(11, *shape, generator=torch.Generator().manual_seed(0))
    flat = x.flatten(1)
    x[1] = 0
    flat[2, -1], flat[3, 0], flat[4, 1] = float("nan"), float("inf"), -float("inf")
    for index, size in enumerate((1e-30, 1e-3, 1e3, 1e30, 1e-42), 5):
        x[index] *= size
    return x


def check(run: Run, fold: Any, x: Tensor, limit: float) -> None:
    """Compare with torch: NaN for NaN, and the index of the largest output."""
    with torch.no_grad():
        expected = fold(x.to(fold.dtype)).flatten(1)
    index, actual = run(x)
    spoiled = expected.isnan().any(1) | x.flatten(1).isnan().any(1)
    assert (index[spoiled] == -1).all()
    assert actual[spoiled].isnan().all()
    assert relative_error(actual[~spoiled], expected[~spoiled]) < limit
    assert torch.equal(index[~spoiled].long(), actual[~spoiled].argmax(1))


def has(recipe: Recipe) -> bool:
    return all(type(operation) in WRITE for operation in recipe.operations)


CASES = {case.name: case for case in RECIPE_CASES}
WRITTEN = [name for name, case in CASES.items() if has(simplified(case.build()))]


@needs_compiler
def test_every_operation_that_c_has(tmp_path: Path) -> None:
    folds, exports = [], []
    for number, name in enumerate(WRITTEN):
        folds.append(Fold(CASES[name].build()))
        exports.append(export_c(folds[-1], tmp_path, name=f"case{number}"))  # type: ignore[arg-type]
        assert exports[-1].output_error < 1e-6, name
    assert len(WRITTEN) > 240
    for name, run, fold in zip(WRITTEN, compiled(tmp_path, exports), folds, strict=True):
        x = torch.randn(5, *fold.input_shape, generator=torch.Generator().manual_seed(1))
        index, actual = run(x)
        expected = fold(x).flatten(1)
        assert relative_error(actual, expected) < 1e-5, name
        assert torch.equal(index, actual.argmax(1)), name


@pytest.mark.parametrize("name", sorted(set(CASES) - set(WRITTEN)))
def test_other_operations_are_refused_by_name(name: str, tmp_path: Path) -> None:
    recipe = CASES[name].build()
    kind = next(op.kind for op in recipe.operations if type(op) not in WRITE)
    with pytest.raises(ConformalError, match=rf"operations that C has, got {kind}\. Fold"):
        export_c(Fold(recipe), tmp_path / "new")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
