"""export_c: programs compile without a warning and compute what torch computes, or are refused by name."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import conformallayers as cl
from conformallayers.errors import ConformalError
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder
from conformallayers.testing import relative_error
from nets import SHAPE, net
from programs import (
    COMPILER,
    FLAGS,
    Fold,
    check,
    compiled,
    export,
    hard,
    needs_compiler,
    run_program,
)
from recipe_cases import RECIPE_CASES

CASES = {case.name: case for case in RECIPE_CASES}
POINTS = [name for name in CASES if name.startswith(("points", "rebase", "stages"))]
POINTS += [name for name in CASES if "_form" in name]


def joined(recipes: list[Recipe]) -> Recipe:
    """Return one recipe whose output is that of several behind each other: few files to compile."""
    builder = RecipeBuilder(recipes[0].input_shape)
    flat = [
        builder.add(layer.Reshape, builder.splice(one, INPUT), shape=(prod(one.output_shape),))
        for one in recipes
    ]
    return builder.recipe(builder.add(layer.Concatenate, *flat, axis=0))


@needs_compiler
def test_every_operation(tmp_path: Path) -> None:
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in CASES:
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


@needs_compiler
def test_calls_with_work_memory_of_their_own_run_at_once(tmp_path: Path) -> None:
    names = ["points published", "points projective"]
    folds = [Fold(CASES[name].build()) for name in names]
    exports = [export(fold, tmp_path, name=f"case{i}") for i, fold in enumerate(folds)]
    for run, fold in zip(compiled(tmp_path, exports), folds, strict=True):
        x = torch.randn(8, 200, *fold.input_shape, generator=torch.Generator().manual_seed(1))
        expected = [run(batch)[1] for batch in x]
        with ThreadPoolExecutor(8) as pool:  # ctypes lets go of the lock of Python
            found = [y for _, y in pool.map(run, x)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for made in exports:
        # Nothing that two calls could share but constants and the memory of predict; a self-test is one call.
        text = made.source.read_text("ascii").split(f"#ifdef {made.name.upper()}_SELF_TEST")[0]
        statics = re.findall(r"^\s*static (?!const)(.*)[;=]", text, re.M)
        assert [line.split("[")[0] for line in statics] == ["float memory"]


@needs_compiler
def test_programs_are_cpp_too(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    folds = [Fold(CASES[name].build()) for name in POINTS[::3]]
    exports = [export(fold, tmp_path, name=f"case{i}") for i, fold in enumerate(folds)]
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", "-x", "c++"]
    inputs = [hard(fold.input_shape) for fold in folds]
    every = run_program(tmp_path, exports, inputs, ["c++", *flags])
    for found, fold, x in zip(every, folds, inputs, strict=True):
        check(found, fold, x, 1e-5)


# -- whole networks -----------------------------------------------------------------------------


def network(strategy: str = "dense") -> Recipe:
    """Return a conformal part, by forms or by its maps, and a head."""
    return cl.fold(net("torus head"), SHAPE, strategy=strategy, dtype=torch.float64).recipe


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_folds_of_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    made = export(Fold(network(), dtype), tmp_path)
    x = torch.randn(9, *SHAPE)
    exact = Fold(network(), torch.float64)(x.double())
    limit = 1e-6 if dtype == torch.float64 else 5e-3
    assert relative_error(compiled(tmp_path, [made])[0](x)[1], exact) < limit


@needs_compiler
@pytest.mark.parametrize("strategy", ["auto", pytest.param("dense", marks=pytest.mark.slow)])
def test_a_28_by_28_model_takes_at_most_512_kib_or_a_triangle(
    strategy: str, tmp_path: Path
) -> None:
    """Convolutions fit; a form over 784 pixels written out takes the triangle of its factor."""
    torch.manual_seed(0)
    before = torch.nn.ZeroPad2d(2), cl.RepeatChannels(3)
    model = torch.nn.Sequential(*before, cl.networks.LeNetCL()).eval()
    folded = cl.fold(model, (1, 28, 28), strategy=strategy)
    made = export(folded, tmp_path)
    (run,) = compiled(tmp_path, [made])
    x = torch.rand(4, 1, 28, 28)
    command = [str(COMPILER), *FLAGS, "-c", made.source.name, "-o", "model.o"]
    subprocess.run(command, cwd=tmp_path, check=True)
    limit = 512 * 1024 + (4 * 784 * 785 // 2 if strategy == "dense" else 0)
    assert made.constant_bytes + made.work_bytes < limit
    assert (tmp_path / "model.o").stat().st_size < limit
    assert relative_error(run(x)[1], folded(x)) < 1e-5


# -- names, compilers, files --------------------------------------------------------------------


@needs_compiler
def test_the_default_name_has_the_short_functions(tmp_path: Path) -> None:
    fold = Fold(network())
    made = export(fold, tmp_path)
    assert (made.header.name, made.source.name) == ("cl_model.h", "cl_model.c")
    other = export(fold, tmp_path, name="other")
    assert "cl_predict" not in other.header.read_text("ascii")
    main = tmp_path / "short.c"
    main.write_text(
        '#include "cl_model.h"\n#include "other.h"\n'
        "int main(void)\n{\n    static float x[CL_INPUT_SIZE], y[CL_OUTPUT_SIZE], w[CL_WORK_SIZE];\n"
        "    static const int shape[] = CL_MODEL_INPUT_SHAPE;\n    x[3] = 1;\n"
        "    return cl_predict(x, y) != other_predict(x, y) || shape[0] != 2 ||\n"
        "           cl_predict_with(x, y, w) != cl_model_predict(x, y) ||\n"
        "           sizeof CL_MODEL_VERSION < 2 || sizeof CL_MODEL_ORIGIN != 10;\n}\n"
    )
    sources = ["short.c", "cl_model.c", "other.c", "-lm", "-o", "short"]
    subprocess.run([str(COMPILER), *FLAGS, *sources], cwd=tmp_path, check=True)
    subprocess.run([str(tmp_path / "short")], check=True)


@needs_compiler
def test_names_of_classes_are_in_the_header(tmp_path: Path) -> None:
    """Quotes, backslashes, line ends, trigraphs and other letters reach the program as they are."""
    fold: Any = Fold(network())
    outputs = prod(fold.output_shape)
    fold.labels = ('a "b"\\', "x\n*/??=%s", "Übung 3")
    export(fold, tmp_path)
    main = Path(__file__).parents[3] / "examples" / "c" / "main.c"
    line = [str(COMPILER), *FLAGS, "-I.", str(main), "cl_model.c", "-lm", "-o", "classify"]
    subprocess.run(line, cwd=tmp_path, check=True)
    x = torch.randn(20, *SHAPE)
    x[7, 0, 0, 0] = float("nan")
    run = [str(tmp_path / "classify")]
    said = subprocess.run(run, input=x.numpy().tobytes(), capture_output=True, check=True).stdout
    expected, position = fold(x), 0
    for index, row in enumerate(expected):  # each begins with the label, or -1
        label = "-1 " if index == 7 else f"{fold.labels[int(row.argmax())]} "
        position = said.decode().index(label, position) + len(label)
        if index != 7:
            words = said.decode()[position:].split("\n", 1)[0].split()
            assert relative_error(torch.tensor([list(map(float, words))]), row[None]) < 1e-4
    fold.labels = ("a",)
    with pytest.raises(ConformalError, match=rf"expected {outputs} labels, got 1"):
        export(fold, tmp_path)


@needs_compiler
def test_pairs_that_do_not_belong_together_do_not_compile(tmp_path: Path) -> None:
    export(Fold(network("conv")), tmp_path)
    header = (tmp_path / "cl_model.h").read_bytes()
    export(Fold(network()), tmp_path)

    def errors(*flags: str) -> str:
        command = [str(COMPILER), *FLAGS, *flags, "-c", "cl_model.c", "-o", "model.o"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.stderr

    assert not errors()
    assert "compile without -ffast-math" in errors("-ffast-math")
    (tmp_path / "cl_model.h").write_bytes(header)
    assert "come from different exports" in errors()


def test_equal_folds_give_equal_files(tmp_path: Path) -> None:
    texts = []
    for _ in range(2):
        made = export(Fold(network()), tmp_path)
        texts.append(made.header.read_bytes() + made.source.read_bytes())
    assert texts[0] == texts[1]
    assert max(map(len, texts[0].decode("ascii").splitlines())) <= 100


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "2x", "a-b", "a b", "_x", "é", "a\n", 3])
def test_names_that_are_no_identifiers(name: Any, tmp_path: Path) -> None:
    with pytest.raises(ConformalError, match=r"export_c\(name=.*expected a C identifier"):
        export(Fold(network()), tmp_path, name=name)
    assert not list(tmp_path.iterdir())


def test_arguments_that_are_refused(tmp_path: Path) -> None:
    fold, target = Fold(network()), tmp_path / "new"
    with pytest.raises(ConformalError, match=r"Fold it first"):
        export(torch.nn.Identity(), target)
    fold.constants.matrix[0, 0] = float("inf")
    with pytest.raises(ConformalError, match=r"expected finite weights.*infinity in matrix"):
        export(fold, target)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConformalError, match=r"expected a folder, got the file .*file\. Give the"):
        export(Fold(network()), tmp_path / "file")
    assert "cl_model.c (not written)\n" in str(export(Fold(network()), target, report=True))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_programs_too_large_for_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformallayers.recipe.c.export._LIMIT", 2**12)
    with pytest.raises(ConformalError, match=r"at most 4 KiB of constants.*got \d"):
        export(Fold(network()), tmp_path)


@needs_compiler
def test_upsampling_of_large_images(tmp_path: Path) -> None:
    builder = RecipeBuilder((1, 100, 100))
    fold = Fold(builder.recipe(builder.add(layer.Upsample, INPUT, scales=(2, 2))))
    made = export(fold, tmp_path)
    assert made.constant_bytes < 2**14
    x = torch.randn(2, 1, 100, 100, generator=torch.Generator().manual_seed(1))
    assert relative_error(compiled(tmp_path, [made])[0](x)[1], fold(x).flatten(1)) < 1e-6
