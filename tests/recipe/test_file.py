"""Documents of folds that were made to do harm, with a right checksum: refused, or some network."""

from __future__ import annotations

import json
import random
import resource
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.folding.folded import Folded
from conformallayers.recipe import file as limits
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.document import describe
from conformallayers.recipe.recipe import INPUT, RecipeBuilder
from nets import SHAPE, folds
from stored import JUNK, StoredFile, fold, places, refused
from support import samples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.safetensors"


# -- damage -------------------------------------------------------------------------------------


@pytest.fixture
def tiny(path: Path) -> tuple[Path, cl.Folded, Tensor]:
    model = cl.ConformalLayers(cl.Linear(2, 2, bias=True), cl.ReSPro(), cl.Linear(2, 1))
    folded = cl.fold(model, (2,), strategy="dense")
    cl.save(folded, path)
    return path, folded, samples((2,), torch.float32)


def outcome(path: Path, expected: Tensor, x: Tensor) -> bool:
    """Load a mutant both ways: refused by both, or equal numbers from both."""
    try:
        loaded = cl.load(path)
    except cl.ConformalError:
        with pytest.raises(cl.ConformalError):
            cln.load(path)
        return False
    assert torch.equal(loaded(x), expected)
    assert torch.allclose(torch.from_numpy(cln.load(path)(x.numpy())), expected, rtol=1e-5)
    return True


def test_every_damage_is_found_or_harmless(tiny: tuple[Path, cl.Folded, Tensor]) -> None:
    path, folded, x = tiny
    expected, content = folded(x), path.read_bytes()
    choice = random.Random(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for place in range(len(content)):
        mutant = bytearray(content)
        mutant[place] ^= 1 << choice.randrange(8)
        path.write_bytes(mutant)
        outcome(path, expected, x)
    for length in (*range(200), *range(200, len(content), 13), len(content) - 1):
        path.write_bytes(content[:length])
        assert not outcome(path, expected, x)
    for extra in (b"\0", b" " * 8, content):
        path.write_bytes(content + extra)
        assert not outcome(path, expected, x)
    for length in (0, 1, 2**31, 2**40, 2**63, 2**64 - 1):
        path.write_bytes(struct.pack("<Q", length) + content[8:])
        assert not outcome(path, expected, x)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100_000  # KiB


def attempt(load: Callable[[Path], Any], path: Path) -> tuple[Any, str]:
    """Return what was loaded, or None and the message of the refusal."""
    try:
        return load(path), ""
    except cl.ConformalError as error:
        return None, str(error)


@pytest.mark.parametrize("name", ["biases", "unpadded", "circular", "several", "linear branches"])
@pytest.mark.sampled(2)
def test_a_document_without_sense_is_refused_or_runs(name: str, path: Path) -> None:
    """Another number in a right place makes another network, the same for torch and numpy."""
    choice = random.Random(name)
    x = samples(SHAPE, torch.float32, batch=2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ran = 0
    for folded in folds(name, torch.float32):
        file = StoredFile(folded, path)
        text = json.dumps(file.document)
        for _ in range(40):
            file.document = json.loads(text)
            container, key = choice.choice(places(file.document))
            container[key] = choice.choice(JUNK)
            file.write()
            found = []
            for load in (cl.load, cln.load):
                loaded, message = attempt(load, path)
                assert loaded is not None or message.startswith(f"load({path})")
                found += [] if loaded is None else [loaded]
            if len(found) == 2 and tuple(found[0].input_shape) == SHAPE:
                y, other = found[0](x), torch.from_numpy(found[1](x.numpy()))
                assert y.shape == other.shape
                if bool(y.isfinite().all()):
                    atol = 1e-3 * float(y.abs().max())
                    assert torch.allclose(y, other, rtol=1e-3, atol=atol)
                ran += 1
    assert ran
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200_000  # KiB


# -- facts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("dtype", value) for value in ("int64", "load", None, ["float32"], "float64")),
        *(("kind", value) for value in (None, ["folded"], "other", "model")),
        *(("parts", value) for value in (None, {}, [], [1], "x")),
        *(("strategy", value) for value in (None, "conv", 1)),
        *(("labels", value) for value in ("ab", ["a"], [1] * 24)),
        ("about", [1]),
        ("origin", 1),
        ("recipe", []),
    ],
)
def test_facts_of_a_fold_are_facts(key: str, value: Any, path: Path) -> None:
    file = StoredFile(fold(), path)
    file.document[key] = value
    file.write()
    refused(path, "expected a whole file of cl.save")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("input_shape", value) for value in ([], [0], [2.0, 6, 6], "266", None, [3, 6, 6])),
        *(("output_shape", value) for value in ([-1], {}, [2**60], [5, 7])),
        *(("output", value) for value in (None, "", "none", "x", "peak", "tau")),
        *(("wide", value) for value in (None, ["factor"], ["none"], [1])),
    ],
)
def test_facts_of_a_recipe_are_facts(key: str, value: Any, path: Path) -> None:
    file = StoredFile(fold(), path)
    assert key in file.document["recipe"]
    file.document["recipe"][key] = value
    file.write()
    refused(path, "expected a whole file of cl.save, got a file that makes no network")


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("divide", "scale", "x"),
        ("divide", "scale", None),
        ("divide", "scale", 10**400),
        ("sum_squares", "weight", {"number": "inf"}),
        ("advance", "formula", "tau + own"),
        ("advance", "formula", "tau + n.real"),
        ("advance", "formula", "(" * 1000),
        ("advance", "more", 1),
        ("reshape", "shape", [0, 72]),
    ],
)
def test_settings_of_operations_are_checked(kind: str, key: str, value: Any, path: Path) -> None:
    file = StoredFile(fold(), path)
    file.operation(kind)["settings"][key] = value
    file.write()
    refused(path, "makes no network")


def test_parts_are_checked(path: Path) -> None:
    for key, value in (
        *(("path", 1), ("strategy", "conv"), ("reason", None), ("absorbed", -1)),
        *(("absorbed", True), ("candidates", []), ("candidates", [{}])),
    ):
        file = StoredFile(fold(), path)
        file.document["parts"][0][key] = value
        file.write()
        refused(path, "makes no network")
    for key, value in (("seconds", "x"), ("bytes", 0.5), ("multiply_adds", None), ("note", 1)):
        file = StoredFile(fold(), path)
        (item,) = (c for c in file.document["parts"][0]["candidates"] if c["strategy"] == "dense")
        item[key] = value
        file.write()
        refused(path, "makes no network")


# -- arrays -------------------------------------------------------------------------------------


def test_constants_have_the_dtype_of_the_fold(path: Path) -> None:
    file = StoredFile(fold(), path)
    shape = file.header["factor"]["shape"]
    file.replace("factor", "F64", shape, b"\0" * 8 * shape[0] * shape[1])
    file.write()
    refused(path, "the constant factor of dtype F64")


def test_constants_have_the_shape_that_operations_need(path: Path) -> None:
    file = StoredFile(fold(), path)
    file.header["factor"]["shape"].insert(0, 1)
    file.write()
    refused(path, "matmul of")


def test_an_empty_kernel_does_not_run_away(path: Path) -> None:
    model = cl.ConformalLayers(cl.ConvTranspose1d(2, 2, 3), cl.ReSPro(1.0))
    file = StoredFile(cl.fold(model, (2, 5), strategy="layers"), path)
    (name,) = (name for name in file.header if name.endswith("weight"))
    file.replace(name, "F32", [2, 0, 2**26])
    file.write()
    refused(path)


def test_constants_that_nobody_reads_are_refused(path: Path) -> None:
    file = StoredFile(fold(), path)
    end = len(file.data)
    file.header["more"] = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
    file.data += b"\0" * 4
    file.write()
    refused(path, "constants that no operation reads")


# -- limits -------------------------------------------------------------------------------------


def upsampling(size: int) -> Folded:
    builder = RecipeBuilder((1, 2))
    value = builder.add(layer.Upsample, INPUT, size=(size,))
    return Folded(
        builder.recipe(builder.add(layer.AdaptiveAvgPool, value, size=(2,))), torch.float32, {}
    )


def grown(path: Path, size: int) -> StoredFile:
    file = StoredFile(upsampling(4), path)
    file.operations[0]["settings"]["size"] = [size]
    file.write()
    return file


def test_a_small_file_cannot_ask_for_much_memory(path: Path) -> None:
    grown(path, 2**22)
    assert cl.load(path)(torch.ones(1, 1, 2)).shape == (1, 1, 2)
    assert path.stat().st_size < 2000
    grown(path, 2**27 + 1)
    refused(path, rf"{2**27 + 1} elements of 'z', and {limits.VALUE_LIMIT} are the most")
    grown(path, 2**27)
    refused(path, rf"{2**27} places of upsample along an axis, and {2**22} are the most")


_FAR = 2**28
_ONE = {"dilation": (1,)}
_FORGED: list[tuple[Any, dict[str, Any], str]] = [
    (layer.Conv, {"padding": (_FAR,), "stride": (_FAR,), **_ONE}, "with its padding"),
    (
        layer.ConvTranspose,
        {"padding": (_FAR,), "stride": (2 * _FAR,), "output_padding": (0,), **_ONE},
        "with its padding",
    ),
    (layer.AvgPool, {"kernel": (2**22,), "padding": (2**21,), "stride": (1,)}, "of avg_pool, and"),
    (layer.AdaptiveAvgPool, {"size": (2**20,)}, "places of adaptive_avg_pool"),
    (layer.Pad, {"pads": ((2**23, 0),), "mode": "replicate"}, "places of pad"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), _FORGED)
def test_settings_cannot_ask_for_much_memory(
    kind: Any, settings: dict[str, Any], message: str, path: Path
) -> None:
    builders = [RecipeBuilder((1, 2)) for _ in range(2)]
    for builder in builders:
        builder.constant("weight", torch.ones(1, 1, 1))
    small, forged = builders
    plain: dict[str, Any] = {"stride": (1,), "padding": (0,), "dilation": (1,), "weight": "weight"}
    file = StoredFile(
        Folded(small.recipe(small.add(layer.Conv, INPUT, **plain)), torch.float32, {}), path
    )
    if kind in (layer.Conv, layer.ConvTranspose):
        value = forged.add(kind, INPUT, weight="weight", **settings)
    else:
        value = forged.add(kind, forged.add(layer.Conv, INPUT, **plain), **settings)
    file.document["recipe"] = describe(forged.recipe(value))
    file.write()
    refused(path, message)


def test_recipes_have_a_most_of_operations(path: Path) -> None:
    builder = RecipeBuilder((1, 1))
    value = INPUT
    for _ in range(2):
        value = builder.add(layer.Reshape, value, shape=(1, 1))
    file = StoredFile(Folded(builder.recipe(value), torch.float32, {}), path)
    first = file.operations[0]
    names = ["x", *(f"v{index}" for index in range(limits.OPERATIONS_LIMIT + 1))]
    steps = [{**first, "reads": [a], "writes": [b]} for a, b in pairwise(names)]
    recipe = file.document["recipe"]
    for count, fits in ((limits.OPERATIONS_LIMIT, True), (limits.OPERATIONS_LIMIT + 1, False)):
        recipe["operations"], recipe["output"] = steps[:count], names[count]
        file.write()
        if fits:
            assert cl.load(path)(torch.ones(1, 1, 1)).tolist() == [[[1.0]]]
        else:
            refused(path, "10001 operations, and 10000 are the most")


def test_values_that_live_together_are_counted(path: Path) -> None:
    builder = RecipeBuilder((1, 2))
    values = [builder.add(layer.Pad, INPUT, pads=((0, 2),)) for _ in range(5)]
    total = builder.add(layer.Add, *values)
    recipe = builder.recipe(builder.add(layer.AdaptiveAvgPool, total, size=(2,)))
    file = StoredFile(Folded(recipe, torch.float32, {}), path)
    for operation in file.operations[:5]:
        operation["settings"]["pads"] = [[0, 2**26 - 2]]
    file.write()
    refused(path, rf"elements of a sample at a time, and {limits.SAMPLE_LIMIT} are the most")


def test_what_is_beyond_the_limits_is_not_saved(path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=rf"save: .*{2**23} places of upsample"):
        cl.save(upsampling(2**23), path)
    assert not path.exists()


def test_numpy_refuses_windows_that_do_not_fit(path: Path) -> None:
    builder = RecipeBuilder((1, 2**15))
    weight = builder.constant("weight", torch.ones(1, 1, 2**14))
    options: dict[str, Any] = {"stride": (1,), "padding": (2**14,), "dilation": (1,)}
    value = builder.add(layer.Conv, INPUT, weight=weight, **options)
    cl.save(Folded(builder.recipe(value), torch.float32, {}), path)
    refused(path, r"elements of windows, and \d+ are the most", cln.load)


# -- kinds of values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "operation", "reads", "message"),
    [
        ("dense", "advance", ["peak", "tau", "n"], "advance takes τ, but 'peak' is a peak"),
        ("dense", "sum_squares", ["peak"], "sum_squares takes features, but 'peak' is a peak"),
    ],
)
def test_peaks_go_where_they_belong(
    strategy: str, operation: str, reads: list[str], message: str, path: Path
) -> None:
    file = StoredFile(fold("unpadded", strategy), path)
    next(item for item in file.operations if item["operation"] == operation)["reads"] = reads
    file.write()
    refused(path, message)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (layer.AddConstant, {"value": "one"}),
        (layer.Matmul, {"weight": "square", "bias": "one"}),
        (layer.Elementwise, {"function": "tanh"}),
        (layer.Pad, {"pads": ((0, 0),), "value": 2.0}),
        (layer.Softmax, {"axis": 0}),
    ],
)
@pytest.mark.parametrize("rebased", [False, True])
def test_points_take_constants_when_they_are_divided(
    kind: Any, settings: dict[str, Any], rebased: bool, path: Path
) -> None:
    builder = RecipeBuilder((3,))
    names = "unit", "peak", "tau"
    constants = {"one": torch.ones(3), "square": torch.eye(3)}
    z, m, tau = builder.add_many(point.Normalize, INPUT, names=names)
    if rebased:
        options = {"scale": 1.0, "coordinate": 1.0}
        z, m, tau = builder.add_many(point.Rebase, z, m, tau, names=names, **options)
    for name in set(settings.values()) & set(constants):
        builder.constant(name, constants[name])
    z = builder.add(kind, z, **settings)
    folded = Folded(
        builder.recipe(builder.add(point.Divide, z, tau, m, scale=1.0)), torch.float32, {}
    )
    if rebased:
        cl.save(folded, path)
        return
    with pytest.raises(cl.ConformalError, match=rf"{kind.kind}, which no factor passes"):
        cl.save(folded, path)


def test_points_are_relative_to_one_peak() -> None:
    path = Path(__file__).parents[1] / "data" / "refused" / "two-peaks.safetensors"
    refused(path, "advance reads values that are relative to two peaks")
