"""Operations: their stored names, settings and constants."""

from __future__ import annotations

from dataclasses import fields

import pytest

from conformallayers.errors import ConformalError
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.operation import (
    OPERATIONS,
    Operation,
    Runtime,
    expect,
    expect_shape,
    read_fields,
)

every_operation = pytest.mark.parametrize("kind", list(OPERATIONS))
CONV = {"stride": (1, 2), "padding": (0, 1), "dilation": (1, 1)}


@every_operation
def test_every_field_of_an_operation_is_stored(kind: str) -> None:
    cls = OPERATIONS[kind]
    assert cls.kind == kind
    declared = [item for item in fields(cls) if item.name not in ("inputs", "outputs")]
    stored = [item.metadata.get("setting", item.metadata.get("constant")) for item in declared]
    assert None not in stored
    assert len(set(stored)) == len(stored)


@every_operation
def test_an_unknown_setting_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind} has no setting 'surprise'"):
        read_fields(OPERATIONS[kind], "setting", {"surprise": 1})


def test_settings_that_equal_their_default_are_left_out() -> None:
    plain = layer.Conv(("x",), ("y",), weight="w", **CONV)
    grouped = layer.Conv(("x",), ("y",), weight="w", bias="b", groups=2, **CONV)
    assert dict(plain.constants()) == {"weight": "w"}
    assert dict(grouped.constants()) == {"weight": "w", "bias": "b"}
    assert dict(grouped.settings()) == {**dict(plain.settings()), "groups": 2}
    for operation in (plain, grouped):
        read = read_fields(layer.Conv, "setting", dict(operation.settings()))
        again = layer.Conv(
            operation.inputs, operation.outputs, weight="w", bias=operation.bias, **read
        )
        assert again == operation


def test_settings_are_checked_by_their_readers() -> None:
    stored = {"axis": 1, "start": 1, "stop": 3}
    assert read_fields(layer.Slice, "setting", stored) == stored
    with pytest.raises(ValueError, match="slice lacks its setting stop"):
        read_fields(layer.Slice, "setting", {"axis": 1, "start": 1})
    for name in stored:
        for bad in (-1, "1", None, 1.0, True, [1]):
            with pytest.raises(ValueError, match="whole number"):
                read_fields(layer.Slice, "setting", {**stored, name: bad})


def test_operations_are_values() -> None:
    one, two = (layer.Reshape(("x",), ("y",), shape=(6,)) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != layer.Reshape(("x",), ("y",), shape=(2, 3))
    with pytest.raises(AttributeError):
        one.shape = (7,)  # type: ignore[misc]


def test_an_operation_without_shapes_says_so() -> None:
    class Silent(Operation):
        kind = "silent"

    with pytest.raises(TypeError, match="Silent does not say what shapes it gives"):
        Silent(("x",), ("y",)).shapes([(3,)], lambda _: ())
    assert Silent.copies == 0


def test_averages_that_torch_refuses() -> None:
    padded = {"kernel": (3, 2, 2), "stride": (1, 1, 1), "padding": (1, 0, 0)}
    average = layer.AvgPool(("x",), ("y",), **padded)
    norm = layer.NormPool(("x",), ("y",), kernel=(3, 2, 2), stride=(2, 2, 2), ceil_mode=True)
    for pool in (average, norm):
        with pytest.raises(ValueError, match="beyond a volume"):
            pool.shapes([(1, 2, 4, 4)], lambda _: ())
        pool.shapes([(1, 3, 4, 4)], lambda _: ())
    most = layer.MaxPool(("x",), ("y",), dilation=(1, 1, 1), **padded)
    assert most.shapes([(1, 2, 4, 4)], lambda _: ()) == ((1, 2, 3, 3),)


def test_expectations() -> None:
    expect(1, "never said")
    expect_shape((2, 3), (2, 3), "x")
    with pytest.raises(ValueError, match=r"^two inputs$"):
        expect([], "two inputs")
    with pytest.raises(ValueError, match=r"^x has shape \(2,\) instead of \(3,\)$"):
        expect_shape((2,), (3,), "x")


def test_a_runtime_refuses_operations_and_rules_that_it_lacks() -> None:
    run = Runtime("lists")
    run.runs(point.Advance)(lambda op, holder, tau, m, n: tau)
    names = ("tau", "m", "n"), ("tau",)
    gnomonic = point.Advance(*names, rule="gnomonic")
    with pytest.raises(ConformalError, match=r"supported by lists, got the rule gnomonic\. Use an"):
        run.check(gnomonic, "run", "")
    run.rules = {"gnomonic"}
    run.check(gnomonic, "run", "")
    with pytest.raises(ConformalError, match="got Own, an activation defined outside the library"):
        run.check(point.Advance(*names, rule="Own", module="own"), "run", "")
    with pytest.raises(ConformalError, match=r"operations supported by lists, got slice\. Fold"):
        run.check(layer.Slice(("x",), ("y",), axis=0, start=0, stop=1), "run", "Fold.")
