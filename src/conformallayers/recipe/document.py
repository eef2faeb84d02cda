"""Recipes ↔ plain JSON values, for files and state dicts; docs/deploy.md has the schema."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from .operation import OPERATIONS, Operation, Positive, expect
from .recipe import Recipe

LARGEST = 2**53  # of an integer; beyond it JavaScript would round


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
        typed(document["input_shape"], tuple[Positive, ...]),
        typed(document["output_shape"], tuple[Positive, ...]),
        tuple(map(_operation, document["operations"])),
        typed(document["output"], str),
        dict(constants),
        frozenset(typed(document["wide"], tuple[str, ...])),
    )
    recipe.shapes()
    used = {array for operation in recipe.operations for _, array in operation.constants()}
    expect(used == set(constants) and recipe.wide <= used, "constants that no operation reads")
    return recipe


def _operation(item: Any) -> Operation:
    _expect_entries(item, "an operation", "operation reads writes constants settings")
    kind: Any = OPERATIONS.get(typed(item["operation"], str))
    expect(kind is not None, f"no operation {item['operation']!r:.60}")
    constants = {field.name for field in fields(kind) if "constant" in field.metadata}
    hints = _hints(kind)
    for role, known in (("constants", constants), ("settings", hints.keys() - constants)):
        expect(isinstance(item[role], dict), f"{kind.kind} without {role}")
        expect(item[role].keys() <= known, f"{kind.kind} with other {role}")
    given = {**item["constants"], **item["settings"]}
    values = {name: typed(value, hints[name]) for name, value in given.items()}
    names = (typed(item[role], tuple[str, ...]) for role in ("reads", "writes"))
    try:
        return kind(*names, **values)  # type: ignore[no-any-return]
    except TypeError as error:
        raise ValueError(f"{kind.kind} lacks a setting or a constant") from error


@lru_cache(maxsize=256)
def _hints(kind: Any) -> dict[str, Any]:
    """Return the type hint of every field but the names of values."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)[2:]}


def typed(value: Any, hint: Any) -> Any:
    """Return a value of JSON as a type hint has it, or raise ValueError; lists become tuples."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        (other,) = (item for item in arguments if item is not NoneType)
        return None if value is None else typed(value, other)
    if kind is Annotated:
        number = typed(value, arguments[0])
        expect(number >= arguments[1], f"{value} where {arguments[1]} is the least")
        return number
    if kind is tuple:
        expect(isinstance(value, (list, tuple)), f"{value!r:.60} is no list")
        hints = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        expect(len(value) == len(hints), f"{value!r:.60} of another length")
        return tuple(typed(item, hint) for item, hint in zip(value, hints, strict=True))
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST
    if hint is float:
        fits = whole or (isinstance(value, float) and math.isfinite(value))
    else:
        fits = whole if hint is int else isinstance(value, hint)
    expect(fits, f"{value!r:.60} is no {hint.__name__}")
    return value


def _expect_entries(item: Any, what: str, entries: str) -> None:
    fits = isinstance(item, Mapping) and set(item) == set(entries.split())
    expect(fits, f"{what} with other entries")
