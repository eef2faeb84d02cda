"""Plain values ↔ JSON: numbers, tuples, and the small records that a folded network carries."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import refusal
from ..folding.certificate import Certificate
from ..folding.plan import Candidate, Plan
from ..folding.strategies import Cost
from ..folding.strategies.banded import Layout
from ..folding.strategies.composed import Geometry
from ..folding.strategies.routes import Move
from ..nn.activations import GNOMONIC, PROJECTIVE, PUBLISHED, RADIAL_TANH, Rule

RULES = {rule.name: rule for rule in (PUBLISHED, PROJECTIVE, GNOMONIC, RADIAL_TANH)}
_RECORDS: dict[str, Any] = {
    record.__name__: record
    for record in (Candidate, Certificate, Cost, Geometry, Layout, Move, Plan)
}
Put = Callable[[str, Tensor], dict[str, Any]]
Take = Callable[[dict[str, Any]], Tensor]


def encode(value: Any, name: str, put: Put) -> Any:
    """Return a value as JSON has it; tensors go to ``put`` under their name.

    A number that JSON has no word for is ``{"is": "float", "value": "inf"}``, a record is an
    object whose ``is`` names it.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, numbers.Integral):  # such as numpy's
        return int(value)
    if isinstance(value, numbers.Real):
        value = float(value)
        return value if math.isfinite(value) else {"is": "float", "value": repr(value)}
    if isinstance(value, Tensor):
        return put(name, value)
    if isinstance(value, Rule):
        return {"is": "Rule", "name": known_rule(value)}
    record = type(value).__name__
    if _RECORDS.get(record) is type(value):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {key: encode(getattr(value, key), f"{name}.{key}", put) for key in names}
        return {"is": record, **fields}
    if isinstance(value, (tuple, list)):
        return [encode(item, f"{name}.{index}", put) for index, item in enumerate(value)]
    raise refusal(
        f"save: {name}", "a number, a text or a tuple of them", f"a {record}", "Set it to one."
    )


def decode(value: Any, take: Take) -> Any:
    """Return the value of :func:`encode`; lists come back as tuples."""
    if isinstance(value, list):
        return tuple(decode(item, take) for item in value)
    if not isinstance(value, dict):
        return value
    fields = {key: item for key, item in value.items() if key != "is"}
    if value["is"] == "float":
        return float(fields["value"])
    if value["is"] == "tensor":
        return take(value)
    if value["is"] == "Rule":
        return RULES[fields["name"]]
    return _RECORDS[value["is"]](**{key: decode(item, take) for key, item in fields.items()})


def known_rule(rule: Rule) -> str:
    """Return the name of a built-in rule, or refuse one that only its own class can compute."""
    known = RULES.get(rule.name)
    if known is None or known != rule or _function(known) is not _function(rule):
        raise refusal(
            "save",
            f"activations of the library: {', '.join(RULES)}",
            f"the rule of {rule.name}",
            "A file holds no code: save the model's state_dict and fold where its class is known.",
        )
    return rule.name


def _function(rule: Rule) -> Any:
    return getattr(rule.growth, "__func__", rule.growth)
