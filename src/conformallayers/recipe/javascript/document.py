"""Recipes as JSON for JavaScript: operations with all settings and shapes, constants in base64."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import fields
from importlib.resources import files
from typing import Any

import numpy as np

from .. import layer_operations as layer
from .. import places
from .. import point_operations as point
from ..document import describe
from ..integer_operations import KINDS as INTEGER
from ..operation import OPERATIONS, Runtime, Shape
from ..places import Array, Table
from ..recipe import Recipe

_SOURCES = "layers", "points", "network"  # in the order that they need each other
_LACKS = (*point.SPECTRAL, *INTEGER, layer.Call)
_DENSE = 'Fold with strategy="dense"'
Entries = dict[str, Any]  # what an operation has beside its settings

# Functions of (operation, shape of its input, dtype of its input).
WRITE = Runtime("JavaScript")
for _kind in OPERATIONS.values():
    if _kind not in _LACKS:
        WRITE[_kind] = lambda *_: {}


def javascript_source() -> str:
    """Return the runtime: a script that defines ``ConformalLayers``, and exports it in node."""
    folder = files(__package__)
    parts = [folder.joinpath(f"{name}.js").read_text("utf-8") for name in _SOURCES]
    inside = "\n".join(['"use strict";', *parts, "return { Network, OPERATIONS };"])
    exports = 'if (typeof module !== "undefined") module.exports = ConformalLayers;'
    return f"const ConformalLayers = (() => {{\n{inside}\n}})();\n{exports}\n"


def javascript_document(recipe: Recipe, dtype: str) -> dict[str, Any]:
    """Return a recipe as plain JSON values that ``new ConformalLayers.Network(document)`` takes.

    Args:
        recipe: its constants are arrays that numpy can convert.
        dtype: of features, ``"float32"`` or ``"float64"``.

    Raises:
        ConformalError: JavaScript lacks an operation.
    """
    for operation in recipe.operations:
        remedy = f"{_DENSE}, which keeps no layers inside a ConformalLayers."
        if isinstance(operation, point.SPECTRAL):
            remedy = f"{_DENSE}."
        if isinstance(operation, INTEGER):
            remedy = "Take the fold before cl.quantize."
        WRITE.check(operation, "javascript_document(recipe)", remedy)
    shapes, indices, wide = recipe.shapes(), recipe.integer_constants(), recipe.wide_values()
    document = describe(recipe) | {"dtype": dtype}
    del document["wide"]  # the dtype of each constant says it
    for entry, operation in zip(document["operations"], recipe.operations, strict=True):
        entry["settings"] = {
            item.metadata["setting"]: getattr(operation, item.name)
            for item in fields(operation)
            if "setting" in item.metadata
        }
        entry["from"] = [shapes[name] for name in operation.inputs]
        entry["to"] = [shapes[name] for name in operation.outputs]
        given = "float64" if operation.inputs[0] in wide else dtype
        entry |= WRITE[type(operation)](operation, entry["from"][0], given)
    document["constants"] = {
        name: _encoded(array, "float64" if name in recipe.wide else dtype)
        if name not in indices
        else _encoded(array, indices[name])
        for name, array in recipe.constants.items()
    }
    return document


def _encoded(array: Any, dtype: str) -> Mapping[str, Any]:
    little = np.ascontiguousarray(array, np.dtype(dtype).newbyteorder("<"))
    data = base64.b64encode(little.tobytes()).decode()
    return {"dtype": dtype, "shape": np.shape(array), "data": data}


# -- tables, so that JavaScript has no arithmetic of windows and interpolations ---------------------


@WRITE.runs(layer.AvgPool, layer.AdaptiveAvgPool, layer.AdaptiveMaxPool)
def _averages(
    op: layer.AvgPool | layer.AdaptiveAvgPool | layer.AdaptiveMaxPool, shape: Shape, dtype: str
) -> Entries:
    found = places.resampled(op, shape, dtype)
    return {"tables": [_table(axis, np.where(w > 0, table, -1), w) for axis, table, w in found]}


@WRITE.runs(layer.NormPool)
def _norms(op: layer.NormPool, shape: Shape, dtype: str) -> Entries:
    return _averages(op.averages, shape, dtype)


@WRITE.runs(layer.MaxPool)
def _maxima(op: layer.MaxPool, shape: Shape, dtype: str) -> Entries:
    tables = [places.sliding(n, k, m, s, p, d) for n, m, k, s, p, d in op.axes(shape)]
    return {"tables": [_table(axis, table) for axis, table in enumerate(tables, 1)]}


@WRITE.runs(layer.Upsample)
def _interpolation(op: layer.Upsample, shape: Shape, dtype: str) -> Entries:
    return {"tables": [_table(*found) for found in places.resampled(op, shape, dtype)]}


@WRITE.runs(layer.Pad)
def _pad(op: layer.Pad, shape: Shape, dtype: str) -> Entries:
    if op.mode != "zeros":
        return {"tables": [_table(axis, t) for axis, t, _ in places.resampled(op, shape, dtype)]}
    first = len(shape) - len(op.pads)
    tables = []
    for axis, (before, after) in enumerate(op.pads, first):
        size = shape[axis] + before + after
        tables.append(_table(axis, places.sliding(shape[axis], 1, size, 1, before, 1)))
    return {"tables": tables}


def _table(axis: int, table: Table, weights: Array | None = None) -> Entries:
    """Return a table (taps, positions) of one axis; -1 is no entry."""
    entry: Entries = {"axis": axis, "positions": table.shape[1], "places": table.ravel().tolist()}
    return entry if weights is None else entry | {"weights": weights.ravel().tolist()}
