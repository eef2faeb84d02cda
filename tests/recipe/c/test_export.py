"""export_c: programs compile without a warning and compute what torch computes, or are refused by name."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conformallayers.errors import ConformalError
from conformallayers.folding.certificate import Certificate
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.c.export import WRITE, export_c
from conformallayers.recipe.c.files import CExport
from conformallayers.recipe.c.simplify import simplified
from conformallayers.recipe.operation import Operation
from conformallayers.recipe.recipe import INPUT, Recipe
from conformallayers.recipe.torch.module import RecipeModule
from conformallayers.testing import relative_error
from conformallayers.testing.recipes import RECIPE_CASES

COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
FLAGS = ["-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-pedantic", "-Wconversion"]
FLAGS += ["-Wdouble-promotion", "-Wshadow"]
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover", "-g"]
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
    """Return samples of every size, a zero one, and some with NaN and infinity."""
    x = torch.randn(11, *shape, generator=torch.Generator().manual_seed(0))
    flat = x.flatten(1)
    x[1] = 0
    flat[2, -1], flat[3, 0], flat[4, 1] = float("nan"), float("inf"), -float("inf")
    for index, size in enumerate((1e-30, 1e-3, 1e3, 1e30, 1e-42), 5):
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


def has(recipe: Recipe) -> bool:
    return all(type(operation) in WRITE for operation in recipe.operations)


CASES = {case.name: case for case in RECIPE_CASES}
WRITTEN = [name for name, case in CASES.items() if has(simplified(case.build()))]


POINTS = [name for name in WRITTEN if name.startswith(("points", "rescale", "grow", "rebase"))]
POINTS += [name for name in WRITTEN if "_form" in name]


def renamed(recipe: Recipe, number: int) -> Recipe:
    """Give values and constants of a recipe names that others do not have."""
    operations = []
    for operation in recipe.operations:
        ends = {
            "inputs": tuple(n if n == INPUT else f"v{number}_{n}" for n in operation.inputs),
            "outputs": tuple(f"v{number}_{n}" for n in operation.outputs),
        }
        held = {
            item.name: f"c{number}_{getattr(operation, item.name)}"
            for item in fields(operation)
            if "constant" in item.metadata and getattr(operation, item.name) is not None
        }
        operations.append(replace(operation, **ends, **held))
    return replace(
        recipe,
        operations=tuple(operations),
        output=f"v{number}_{recipe.output}",
        constants={f"c{number}_{name}": array for name, array in recipe.constants.items()},
        wide=frozenset(f"c{number}_{name}" for name in recipe.wide),
    )


def joined(recipes: list[Recipe]) -> Recipe:
    """Return one recipe whose output is that of several behind each other: few files to compile."""
    operations: list[Operation] = []
    constants: dict[str, Any] = {}
    wide: frozenset[str] = frozenset()
    for number, recipe in enumerate(recipes):
        one = renamed(recipe, number)
        ends = {"inputs": (one.output,), "outputs": (f"flat{number}",)}
        flat = layer.Reshape(**ends, shape=(prod(recipe.output_shape),))
        operations += [*one.operations, flat]
        constants, wide = constants | dict(one.constants), wide | one.wide
    names = tuple(f"flat{number}" for number in range(len(recipes)))
    operations.append(layer.Concatenate(inputs=names, outputs=("all",), axis=0))
    size = sum(prod(recipe.output_shape) for recipe in recipes)
    shape = recipes[0].input_shape
    return Recipe(shape, (size,), tuple(operations), "all", constants, wide)


@needs_compiler
def test_every_operation_that_c_has(tmp_path: Path) -> None:
    assert len(WRITTEN) > 240
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in WRITTEN:
        groups.setdefault(CASES[name].build().input_shape, []).append(name)
    every = [[CASES[name].build() for name in names] for names in groups.values()]
    folds = [Fold(joined(recipes)) for recipes in every]
    exports = [export(fold, tmp_path, name=f"group{i}") for i, fold in enumerate(folds)]
    runs = compiled(tmp_path, exports)
    for names, recipes, run, fold in zip(groups.values(), every, runs, folds, strict=True):
        x = torch.randn(5, *fold.input_shape, generator=torch.Generator().manual_seed(1))
        index, actual = run(x)
        assert torch.equal(index, actual.argmax(1))
        sizes = [prod(recipe.output_shape) for recipe in recipes]
        for name, found, recipe in zip(names, actual.split(sizes, 1), recipes, strict=True):
            assert relative_error(found, Fold(recipe)(x).flatten(1)) < 1e-5, name


def in_double(recipe: Recipe) -> Recipe:
    """Put casts around the only operation of a recipe."""
    (operation,) = recipe.operations
    casts = [
        layer.Cast(inputs=(INPUT,), outputs=("exact",), to=layer.WIDE),
        layer.Cast(inputs=operation.outputs, outputs=("rounded",), to=layer.WORKING),
    ]
    middle = replace(operation, inputs=("exact",))
    names = frozenset(name for _, name in operation.constants())
    operations = (casts[0], middle, casts[1])
    return replace(recipe, operations=operations, output="rounded", wide=names)


@needs_compiler
def test_every_layer_in_double(tmp_path: Path) -> None:
    recipes: dict[Any, Recipe] = {}
    for name in WRITTEN:
        recipe = CASES[name].build()
        if len(recipe.operations) == 1:
            operation = recipe.operations[0]
            recipes[operation.kind, getattr(operation, "function", None)] = in_double(recipe)
    folds, exports = [Fold(recipe) for recipe in recipes.values()], []
    for number, fold in enumerate(folds):
        exports.append(export(fold, tmp_path, name=f"case{number}"))
    for kind, run, fold in zip(recipes, compiled(tmp_path, exports), folds, strict=True):
        x = torch.randn(5, *fold.input_shape, generator=torch.Generator().manual_seed(1))
        assert relative_error(run(x)[1], fold(x).flatten(1)) < 1e-7, kind


@needs_compiler
def test_programs_take_every_sample_and_step_beside_no_memory(tmp_path: Path) -> None:
    command = [str(COMPILER), *FLAGS, *SANITIZED]
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    line = [str(COMPILER), *SANITIZED, probe.name, "-o", "probe"]
    if subprocess.run(line, cwd=tmp_path, capture_output=True, check=False).returncode:
        command = [str(COMPILER), *FLAGS]
    names = [*POINTS, *(n for n in WRITTEN if "2d stride and padding" in n or "pad 2d" in n)]
    folds = [Fold(CASES[name].build()) for name in names]
    exports = [export(fold, tmp_path, name=f"case{i}") for i, fold in enumerate(folds)]
    inputs = [hard(fold.input_shape) for fold in folds]
    for name, found, fold, x in zip(
        names, run_program(tmp_path, exports, inputs, command), folds, inputs, strict=True
    ):
        tame = slice(None) if name in POINTS else slice(0, 3)
        check((found[0][tame], found[1][tame]), fold, x[tame], 1e-5)


@needs_compiler
def test_programs_are_cpp_too(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    folds = [Fold(CASES[name].build()) for name in POINTS[::3]]
    exports = [export(fold, tmp_path, name=f"case{i}") for i, fold in enumerate(folds)]
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O1", "-x", "c++"]
    inputs = [hard(fold.input_shape) for fold in folds]
    every = run_program(tmp_path, exports, inputs, ["c++", *flags])
    for found, fold, x in zip(every, folds, inputs, strict=True):
        check(found, fold, x, 1e-5)


@pytest.mark.parametrize("name", sorted(set(CASES) - set(WRITTEN)))
def test_other_operations_are_refused_by_name(name: str, tmp_path: Path) -> None:
    recipe = CASES[name].build()
    kind = next(op.kind for op in recipe.operations if type(op) not in WRITE)
    with pytest.raises(ConformalError, match=rf"operations that C has, got {kind}\. Fold"):
        export(Fold(recipe), tmp_path / "new")
    assert not list(tmp_path.iterdir())
