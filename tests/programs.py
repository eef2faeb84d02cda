"""Compile exported C programs and run them, for the tests of the C runtime."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conformallayers.quantization.quantize import quantize
from conformallayers.recipe.c.export import export_c
from conformallayers.recipe.c.files import CExport
from conformallayers.recipe.recipe import Recipe
from conformallayers.recipe.torch.module import RecipeModule
from conformallayers.testing import relative_error
from conformallayers.zoo import load
from recipe_cases import RECIPE_CASES

COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
FLAGS = ["-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-pedantic", "-Wconversion"]
FLAGS += ["-Wdouble-promotion", "-Wshadow"]


def _sanitizers() -> list[str]:
    """Return the flags of sanitizers, or nothing where the compiler has none."""
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover", "-g"]
    with tempfile.TemporaryDirectory() as folder:
        line = [str(COMPILER), *flags, "-x", "c", "-", "-o", f"{folder}/probe"]
        try:
            subprocess.run(line, input=b"int main(void) { return 0; }", check=True)
        except (OSError, subprocess.CalledProcessError):
            return []
    return flags


SANITIZED = _sanitizers()
Run = Callable[[Tensor], tuple[Tensor, Tensor]]


class Fold(RecipeModule):
    """A recipe with what an export asks of a fold."""

    def __init__(self, recipe: Recipe, dtype: torch.dtype = torch.float32) -> None:
        kept = recipe.fixed_dtypes()
        super().__init__(recipe.with_constants(lambda n, a: a if n in kept else a.to(dtype)), dtype)
        self.strategy, self.origin, self.labels = "dense", "sha256:00", None


def export(fold: Any, folder: Path, **options: Any) -> CExport:
    return export_c(fold, folder, **options)


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
    """Return samples of every size, a zero one, and one with NaN."""
    x = torch.randn(7, *shape, generator=torch.Generator().manual_seed(0))
    flat = x.flatten(1)
    x[1] = 0
    flat[2, -1] = float("nan")
    for index, size in enumerate((1e-12, 1e-3, 1e3, 1e11), 3):
        x[index] *= size
    return x


def check(found: tuple[Tensor, Tensor], fold: Any, x: Tensor, limit: float) -> None:
    """Compare with torch: NaN for NaN, and the index of the largest output."""
    with torch.no_grad():
        expected = fold(x.to(fold.dtype)).flatten(1)
    index, actual = found
    spoiled = expected.isnan().any(1) | x.flatten(1).isnan().any(1)
    assert (index[spoiled] == -1).all()
    assert actual[spoiled].isnan().all()
    assert relative_error(actual[~spoiled], expected[~spoiled]) < limit
    assert torch.equal(index[~spoiled].long(), actual[~spoiled].argmax(1))


MAIN = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
{includes}
typedef int (*with)(const float *, float *, float *);
typedef int (*plain)(const float *, float *);
static const struct {{ with a; plain b; size_t in, out, work; }} models[] = {{ {rows} }};

/* Memory of the exact size, so that a sanitizer sees every step beside it. */
int main(void)
{{
    int32_t k;
    while (fread(&k, sizeof k, 1, stdin) == 1) {{
        const size_t in = models[k].in * sizeof(float), out = models[k].out * sizeof(float);
        float *x = (float *)malloc(in), *y = (float *)malloc(out), *z = (float *)malloc(out);
        float *work = (float *)malloc(models[k].work * sizeof(float));
        int32_t best;
        if (fread(x, in, 1, stdin) != 1)
            return 1;
        best = models[k].a(x, y, work);
        if (best != models[k].b(x, z) || memcmp(y, z, out) != 0)
            return 2;
        fwrite(&best, sizeof best, 1, stdout);
        fwrite(y, out, 1, stdout);
        free(x);
        free(y);
        free(z);
        free(work);
    }}
    return 0;
}}
"""


def run_program(
    folder: Path, exports: list[CExport], inputs: list[Tensor], command: list[str]
) -> list[tuple[Tensor, Tensor]]:
    """Compile programs and a main function into one; return indices and outputs of each."""
    rows = []
    for export in exports:
        macro, name = export.name.upper(), export.name
        sizes = f"{macro}_INPUT_SIZE, {macro}_OUTPUT_SIZE, {macro}_WORK_SIZE"
        rows.append(f"{{{name}_predict_with, {name}_predict, {sizes}}}")
    includes = "".join(f'#include "{export.name}.h"\n' for export in exports)
    (folder / "main.c").write_text(MAIN.format(includes=includes, rows=", ".join(rows)))
    sources = ["main.c", *(export.source.name for export in exports)]
    done = subprocess.run(
        [*command, *sources, "-x", "none", "-lm", "-o", "program"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:4000]
    data = b"".join(
        np.int32(number).tobytes() + image.float().numpy().tobytes()
        for number, x in enumerate(inputs)
        for image in x
    )
    ran = subprocess.run([folder / "program"], input=data, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()[:4000]
    words, found = np.frombuffer(ran.stdout, "<i4"), []
    for export, x in zip(exports, inputs, strict=True):
        size = int(export.header.read_text("ascii").split("_OUTPUT_SIZE ")[1].split()[0])
        mine, words = np.split(words, [len(x) * (size + 1)])
        mine = mine.reshape(len(x), -1)
        outputs = torch.from_numpy(mine[:, 1:].copy().view("<f4"))
        found.append((torch.from_numpy(mine[:, 0].copy()), outputs))
    return found


MACHINES = {  # compilers, and the flags of their machines
    "gcc": ("gcc",),
    "clang": ("clang",),
    "arm": ("arm-none-eabi-gcc", "-mcpu=cortex-m4", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16"),
}


def compiler(machine: str) -> list[str]:
    """Return the command of a compiler; skip the test where it is missing."""
    name, *flags = MACHINES[machine]
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name} on the path")
    return [name, *flags]


def small_networks() -> dict[str, Any]:
    """Return folds of every kind: of points, with stages, windows, integers."""
    kinds = (
        "points published",
        "points gnomonic",
        "stages",
        "max_pool",
        "conv",
    )
    found = {kind: next(c for c in RECIPE_CASES if c.name.startswith(kind)) for kind in kinds}
    folds: dict[str, Any] = {kind: Fold(case.build()) for kind, case in found.items()}
    images = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return {**folds, "int8": quantize(load("digits-micro"), images)}
