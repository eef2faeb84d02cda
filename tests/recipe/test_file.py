"""Files of recipes: every recipe comes back, and damaged, forged and foreign files are refused."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.folding.folded import Folded
from conformallayers.recipe import file as limits
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.file import describe, read_recipe, typed
from conformallayers.recipe.recipe import INPUT, Positive, RecipeBuilder, Size
from nets import SHAPE, net
from oracle import relative_error
from recipe_cases import RECIPE_CASES, RecipeCase
from stored import forge, refused
from support import samples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.safetensors"


@pytest.mark.parametrize("case", RECIPE_CASES, ids=lambda case: case.name)
def test_recipes_come_back(case: RecipeCase, path: Path) -> None:
    recipe = case.build()
    again = read_recipe(json.loads(json.dumps(describe(recipe))), recipe.constants)
    assert again.operations == recipe.operations
    folded = Folded(recipe, torch.float64, {})
    cl.save(folded, path)
    x = samples(recipe.input_shape, torch.float64, batch=2)
    assert torch.equal(cl.load(path)(x), folded(x))
    assert relative_error(torch.from_numpy(cln.load(path)(x.numpy())), folded(x)) < 1e-12


def test_other_readers_understand_the_arrays(path: Path) -> None:
    folded = cl.fold(net("chain"), SHAPE, strategy="dense")
    cl.save(folded, path)
    arrays = load_file(path)
    assert arrays.keys() == folded.recipe.constants.keys()
    for name, array in folded.recipe.constants.items():
        assert torch.equal(arrays[name], array)
    with safe_open(path, "pt") as file:
        assert list(file.metadata()) == ["conformallayers"]


# -- faults: soak/files.py has random ones --------------------------------------------------------


def resized(name: str, *shape: int) -> Callable[[Any, dict[str, Any]], None]:
    def change(document: Any, arrays: dict[str, Any]) -> None:
        arrays[name] = np.zeros(shape, np.float32)

    return change


DAMAGED, FORMULAS = "damaged file or another", ("tau + own", "tau + n.real", "(" * 1000, 1)


def advance(document: Any) -> dict[str, Any]:
    operations = document["recipe"]["operations"]
    return next(item for item in operations if item["operation"] == "advance")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, _: d.update(format=9), "expected a file of format 4, got format 9. Save"),
        (lambda d, _: d.update(dtype="int64"), "dtype 'int64'"),
        (lambda d, _: d.update(dtype="float64"), "the constant factor of dtype float32"),
        (lambda d, _: d.update(labels=["a"]), r"1 labels for \d+ outputs"),
        (lambda d, _: d.update(labels=[1] * 24), "1 in place of str"),
        (lambda d, _: d.update(about=[1]), "notes or plans that are no object"),
        (lambda d, _: d.update(origin=1), "1 in place of str"),
        (lambda d, _: d["recipe"].update(operations=[{}] * 10_001), "10001 operations, and 10000"),
        (lambda d, _: d["recipe"].update(input_shape=[2**28]), "damaged file or another"),
        (lambda _, a: a.update(more=np.zeros(1)), "constants that no operation reads"),
        *((lambda d, _, f=f: advance(d).update(formula=f), DAMAGED) for f in FORMULAS),
        (resized("factor", 2**20, 0), "matmul of"),
        (resized("factor", *[1] * 20), "matmul of"),
    ],
)
def test_faults_are_named(change: Any, message: str, path: Path) -> None:
    cl.save(cl.fold(net("unpadded"), SHAPE, strategy="dense"), path)
    forge(path, change)
    refused(path, message)


def test_plans_are_checked(path: Path) -> None:
    cl.save(cl.fold(net("unpadded"), SHAPE, strategy="dense"), path)
    forge(path, lambda d, _: d["plans"][""].update(reason=1))
    refused(path, "1 in place of str", cl.load)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(more=1), "other entries"),
        (lambda d: d.update(operations={}), "without a list of operations"),
        (lambda d: d.update(output="none"), "the output is None"),
        (lambda d: d.update(input_shape=[True]), "True in place of int"),
        (lambda d: d["operations"][0].update(operation="?"), r"no operation '\?'"),
        (lambda d: d["operations"][0].update(more=1), "Conv has no 'more'"),
        (lambda d: d["operations"][0].pop("stride"), "Conv lacks its stride"),
        (lambda d: d["operations"][0].pop("weight"), "Conv lacks its weight"),
        (lambda d: d["operations"][0].update(stride=[0, 1]), "0 where 1 is the least"),
    ],
)
def test_faults_of_recipes_are_named(change: Callable[[Any], Any], message: str) -> None:
    (case,) = (case for case in RECIPE_CASES if case.name == "conv 2d plain")
    recipe = case.build()
    document = json.loads(json.dumps(describe(recipe)))
    change(document)
    with pytest.raises(ValueError, match=message):
        read_recipe(document, recipe.constants)


def test_values_have_the_types_of_hints() -> None:
    for hint, good, bad in (
        (float, (2, -1e300), (True, None, "1", math.nan, math.inf, [1.0], 10**400)),
        (bool, (True,), (0, None, "true")),
        (Positive, (1, 2**31), (0, -1, 1.0, True, None, "1", [1], 2**60)),
        (Positive | None, (None, 3), (0, "3", True)),
        (tuple[Size, ...], ([], [0, 2]), ([-1], None, 1, "12", {1: 2}, [[1]])),
        (tuple[tuple[int, int], ...], ([[-1, 2]],), ([1], [["1", 2]], [[1, 2, 3]])),
    ):
        for value in good:
            assert json.loads(json.dumps(typed(value, hint))) == value
        for value in bad:
            with pytest.raises(ValueError, match=r" in place of | least| length"):
                typed(value, hint)


_FAR = 2**28
_ONE = {"dilation": [1], "weight": "weight"}
_LONG = {"operation": "upsample", "scales": [2**19]}
_WINDOWS = {"operation": "norm_pool", "kernel": [2**12], "stride": [1]}
_FORGED: list[tuple[list[dict[str, Any]], str]] = [
    (
        [{"operation": "conv", "padding": [_FAR], "stride": [_FAR], **_ONE}],
        "elements of conv, padded",
    ),
    (
        [
            {"operation": "conv_transpose", "padding": [_FAR], "stride": [2 * _FAR]}
            | {"output_padding": [0], **_ONE}
        ],
        "elements of conv_transpose, padded",
    ),
    ([_LONG, _WINDOWS], "elements of the windows of norm_pool"),
    ([_LONG | {"scales": [_FAR // 2]}], f"{_FAR} elements of 'z0', and {2**27} are the most"),
    ([{"operation": "pad", "pads": [[_FAR, 0]]}], "elements of 'z0'"),
]


@pytest.mark.parametrize(("operations", "message"), _FORGED)
def test_a_small_file_cannot_ask_for_much_memory(
    operations: list[dict[str, Any]], message: str, path: Path
) -> None:
    builder = RecipeBuilder((1, 2))
    weight = builder.constant("weight", torch.ones(1, 1, 1))
    plain: dict[str, Any] = {"stride": (1,), "padding": (0,), "dilation": (1,)}
    value = builder.add(layer.Conv, INPUT, name="y", weight=weight, **plain)
    more = builder.add(layer.AdaptiveAvgPool, value, name="last", size=(2,))
    cl.save(Folded(builder.recipe(more), torch.float32, {}), path)

    def change(document: Any, arrays: dict[str, Any]) -> None:
        first, last = document["recipe"]["operations"]
        names = ["y", *(f"z{index}" for index in range(len(operations)))]
        forged = [
            {"inputs": [before], "outputs": [after], **operation}
            for operation, before, after in zip(operations, names, names[1:], strict=False)
        ]
        document["recipe"]["operations"] = [first, *forged, {**last, "inputs": names[-1:]}]

    forge(path, change)
    refused(path, message)


def test_what_is_beyond_the_limits_is_not_saved(path: Path) -> None:
    builder = RecipeBuilder((1, 2))
    value = builder.add(layer.Upsample, INPUT, scales=(limits.VALUE_LIMIT,))
    value = builder.add(layer.AdaptiveAvgPool, value, size=(2,))
    with pytest.raises(cl.ConformalError, match=r"save\(.*elements of 'z', and"):
        cl.save(Folded(builder.recipe(value), torch.float32, {}), path)
    assert not path.exists()


# -- other files --------------------------------------------------------------------------------


def test_other_files_are_told_apart(path: Path) -> None:
    save_file({"weight": torch.ones(2)}, path)
    refused(path, r"weights or the like\. Load weights into their model\.")
    torch.save(nn.Linear(2, 2).state_dict(), path)
    refused(path, "such as torch.save writes. Read it with torch.load, and fold the model")
    refused(Path("/proc/self/mem"), "damaged file or another")
    path.write_text("label,score\n" * 9)
    refused(path, "another kind of file. cl.load reads files of cl.save only")
    for inside in (b"", b"{}", b"[" * 10**5, b'{"a": [' + b"[]," * 10**6 + b"0]}"):
        path.write_bytes(struct.pack("<Q", len(inside)) + inside)
        refused(path, "expected")
    for inside in ("NaN", "[]", "[" * 10**5, "1" * 5000, '{"format": 4}'):
        save_file({}, path, {"conformallayers": inside})
        refused(path, "expected")
    pipe = path.with_name("pipe")
    os.mkfifo(pipe)
    refused(pipe, "expected a file of cl.save, got a device or a pipe")
    refused(path.parent, "expected a file of cl.save, got a folder")
    with pytest.raises(FileNotFoundError):
        cl.load(path.with_name("none"))
