"""Write recipes as JSON for JavaScript: operations with all settings and shapes, constants in base64."""

from __future__ import annotations

import base64
from functools import partial
from importlib.resources import files
from typing import Any

import numpy as np

from ...errors import refusal
from ...nn.formula import FUNCTIONS, OPERATORS, Formula
from .. import layer_operations as layer
from .. import places
from .. import point_operations as point
from ..integer_operations import KINDS as INTEGER
from ..places import Array, Table
from ..recipe import OPERATIONS, Operation, Recipe, Runtime, Shape
from ..simplify import simplified

_SOURCES = "layers", "points", "network"  # in the order that they need each other
_LACKS = (*INTEGER, layer.Call)
WRITE = Runtime("JavaScript")


def javascript_source() -> str:
    """Return the runtime: a script that defines ``ConformalLayers``, and exports it in node."""
    folder = files(__package__)
    parts = [folder.joinpath(f"{name}.js").read_text("utf-8") for name in _SOURCES]
    inside = "\n".join(['"use strict";', *parts, "return { Network, OPERATIONS };"])
    exports = 'if (typeof module !== "undefined") module.exports = ConformalLayers;'
    return f"const ConformalLayers = (() => {{\n{inside}\n}})();\n{exports}\n"


def javascript_document(recipe: Recipe, dtype: str) -> dict[str, Any]:
    """Return a recipe as JSON values, the argument of ``new ConformalLayers.Network(document)``.

    Args:
        recipe: its constants are arrays that numpy can convert.
        dtype: of features, ``"float32"`` or ``"float64"``.

    Raises:
        ConformalError: JavaScript lacks an operation.
    """
    where = "javascript_document(recipe)"
    for operation in recipe.operations:
        if isinstance(operation, INTEGER):
            raise refusal(
                where, "a fold in floats", "one in int8", "Pass the fold from before cl.quantize."
            )
        WRITE.check(operation, where)
    recipe = simplified(recipe.with_constants(lambda _, array: np.asarray(array)))
    shapes = recipe.shapes()
    document: dict[str, Any] = {
        "input_shape": recipe.input_shape,
        "output_shape": recipe.output_shape,
        "output": recipe.output,
        "dtype": dtype,
        "operations": [],
    }
    for operation in recipe.operations:
        entry: dict[str, Any] = {
            "operation": operation.kind,
            "reads": operation.inputs,
            "writes": operation.outputs,
            "constants": dict(operation.constants()),
            "settings": dict(operation.settings(defaults=True)),
        }
        document["operations"].append(entry)
        entry["from"] = [shapes[name] for name in operation.inputs]
        entry["to"] = [shapes[name] for name in operation.outputs]
        if isinstance(operation, point.Advance):
            entry["formula"] = _tree(operation.parsed)
        entry["tables"] = _tables(operation, entry["from"][0])
    document["constants"] = {}
    for name, kind in recipe.constant_dtypes(dtype).items():
        little = np.asarray(recipe.constants[name], np.dtype(kind).newbyteorder("<"))
        data = base64.b64encode(little.tobytes()).decode()
        document["constants"][name] = {"dtype": kind, "shape": little.shape, "data": data}
    return document


def _tree(formula: Formula) -> Any:
    """Return a formula as nested lists: [operator or function, operand, …]."""
    names = (*OPERATORS, *FUNCTIONS)
    heads = {name: partial(lambda head, *x: [head, *x], name) for name in names}
    return formula.evaluate({name: name for name in ("tau", "m", "n")}, heads)


@WRITE.runs(*(kind for kind in OPERATIONS.values() if kind not in _LACKS))
def _tables(op: Operation, shape: Shape) -> list[dict[str, Any]]:
    """Return the tables of a pooling, a pad or an interpolation, so that JavaScript computes no indices."""
    if isinstance(op, layer.MaxPool):
        axes = enumerate(op.axes(shape), 1)
        return [_table(axis, places.sliding(n, k, m, s, p, d)) for axis, (n, m, k, s, p, d) in axes]
    op = op.averages if isinstance(op, layer.NormPool) else op
    if isinstance(op, places.Resampling):
        return [_table(*found) for found in places.resampled(op, shape)]
    return []


def _table(axis: int, table: Table, weights: Array | None = None) -> dict[str, Any]:
    """Return a table (taps, positions) of one axis; -1 is no entry."""
    entry = {"axis": axis, "positions": table.shape[1], "places": table.ravel().tolist()}
    if weights is not None and not places.copies_entries(weights):
        entry["weights"] = weights.ravel().tolist()
    return entry
