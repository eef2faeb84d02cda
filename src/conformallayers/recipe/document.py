"""Recipes ↔ plain JSON values, for files and state dicts; docs/deploy.md has the schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fields import name, positives, several
from .operation import OPERATIONS, Operation, expect, read_fields
from .recipe import Recipe

_names = several(name)


def describe(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe without its arrays, as values that JSON can hold."""
    return {
        "input_shape": list(recipe.input_shape),
        "output_shape": list(recipe.output_shape),
        "output": recipe.output,
        "wide": sorted(recipe.wide),
        "operations": [
            {
                "operation": operation.kind,
                "reads": list(operation.inputs),
                "writes": list(operation.outputs),
                "constants": dict(operation.constants()),
                "settings": dict(operation.settings()),
            }
            for operation in recipe.operations
        ],
    }


def read_recipe(document: Mapping[str, Any], constants: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a description.

    Args:
        document: a result of :func:`describe`, possibly damaged.
        constants: anything with a ``shape``, by name.

    Raises:
        ValueError: something is missing, unknown, or does not fit together.
    """
    _expect_entries(document, "a recipe", "input_shape output_shape output wide operations")
    expect(isinstance(document["operations"], list), "a recipe without a list of operations")
    recipe = Recipe(
        positives(document["input_shape"]),
        positives(document["output_shape"]),
        tuple(map(_operation, document["operations"])),
        name(document["output"]),
        dict(constants),
        frozenset(_names(document["wide"])),
    )
    recipe.shapes()
    used = {array for operation in recipe.operations for _, array in operation.constants()}
    expect(used == set(constants) and recipe.wide <= used, "constants that no operation reads")
    return recipe


def _operation(item: Any) -> Operation:
    _expect_entries(item, "an operation", "operation reads writes constants settings")
    stored = item["operation"]
    kind = OPERATIONS.get(stored) if isinstance(stored, str) else None
    if kind is None:
        raise ValueError(f"no operation {stored!r:.60}")
    values = read_fields(kind, "setting", item["settings"])
    values |= read_fields(kind, "constant", item["constants"])
    return kind(inputs=_names(item["reads"]), outputs=_names(item["writes"]), **values)


def _expect_entries(item: Any, what: str, entries: str) -> None:
    fits = isinstance(item, Mapping) and set(item) == set(entries.split())
    expect(fits, f"{what} with other entries")
