"""Recipes ↔ plain JSON values, for files and state dicts; docs/files.md has the schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .fields import name, positives, several
from .operation import OPERATIONS, Operation, read_settings
from .recipe import Recipe

_names = several(name)


def describe(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe without its arrays as plain JSON values."""
    return {
        "input_shape": list(recipe.input_shape),
        "output_shape": list(recipe.output_shape),
        "output": recipe.output,
        "wide": sorted(recipe.wide),
        "operations": [_described(operation) for operation in recipe.operations],
    }


def _described(operation: Operation) -> dict[str, Any]:
    return {
        "operation": operation.kind,
        "reads": list(operation.inputs),
        "writes": list(operation.outputs),
        "constants": dict(operation.constants()),
        "settings": {key: _plain(value) for key, value in operation.settings()},
    }


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def read_recipe(document: Mapping[str, Any], constants: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a description.

    Args:
        document: a result of :func:`describe`, possibly damaged.
        constants: anything with a ``shape``, by name.

    Raises:
        ValueError: something is missing, unknown, or does not fit together.
    """
    expected = {"input_shape", "output_shape", "output", "wide", "operations"}
    if not isinstance(document, Mapping) or set(document) != expected:
        raise ValueError("a recipe with other entries")
    operations = document["operations"]
    if not isinstance(operations, list):
        raise ValueError("a recipe without a list of operations")
    recipe = Recipe(
        positives(document["input_shape"]),
        positives(document["output_shape"]),
        tuple(_operation(item) for item in operations),
        name(document["output"]),
        dict(constants),
        frozenset(_names(document["wide"])),
    )
    recipe.shapes()
    used = {array for operation in recipe.operations for _, array in operation.constants()}
    if used != set(constants) or not recipe.wide <= used:
        raise ValueError("constants that no operation reads")
    return recipe


def _operation(item: Any) -> Operation:
    entries = {"operation", "reads", "writes", "constants", "settings"}
    if not isinstance(item, dict) or set(item) != entries:
        raise ValueError("an operation with other entries")
    stored = item["operation"]
    kind = OPERATIONS.get(stored) if isinstance(stored, str) else None
    if kind is None:
        raise ValueError(f"no operation {stored!r:.60}")
    if not isinstance(item["settings"], dict) or not isinstance(item["constants"], dict):
        raise ValueError(f"{stored} without settings or constants")
    values = read_settings(kind, item["settings"])
    known = {f.metadata["constant"]: f for f in fields(kind) if "constant" in f.metadata}
    given = item["constants"]
    needed = {key for key, f in known.items() if not f.metadata["optional"]}
    if not needed <= set(given) <= set(known):
        raise ValueError(f"{stored} with other constants")
    values |= {known[key].name: name(array) for key, array in given.items()}
    return kind(inputs=_names(item["reads"]), outputs=_names(item["writes"]), **values)
