"""Recipes in safetensors files, written and read without torch; ``docs/deploy.md`` has the schema.

The metadata of the header holds a JSON document, which follows from the fields of operations, with a checksum.
safetensors validates the rest of the header: arrays fill the file exactly, and their shapes fit their bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import lru_cache
from math import prod
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save as serialized

from .. import __version__
from ..errors import ConformalError, refusal
from ..utils.files import Path, kind_of_file, replace_file
from .integer_operations import IntegerRebase
from .layer_operations import Call
from .point_operations import FormulaOperation
from .recipe import OPERATIONS, Operation, Positive, Recipe, expect

FORMAT = 4  # raised when older readers could not understand a file
DTYPES = ("float64", "float32", "float16", "bfloat16")
STORED = {"bfloat16": "float32"}  # numpy has no bfloat16
LARGEST = 2**53  # of an integer; float64 has all integers below it
# A few numbers in a small file could ask for any amount of memory, so recipes in files have limits.
OPERATIONS_LIMIT = 10_000
VALUE_LIMIT = 2**27  # elements of one value of a sample, its padding included
WINDOWS_LIMIT = 2**30  # elements of all windows of a convolution or pooling together
# Operations that read scalars of samples only; all others read features first.
_ON_SCALARS = FormulaOperation, IntegerRebase
_DOCUMENT, _SUM = "conformallayers", "sha256"
_FOLD = "conformallayers fold writes one from a run, or from PACKAGE:NAME with --weights."
_AGAIN = "Save it again with cl.save of this version, or copy it again."


@dataclass(frozen=True)
class Stored:
    """A folded network as a file has it.

    Attributes:
        recipe: its constants are numpy arrays; bfloat16 is stored as float32.
        dtype: of inputs and outputs, one of ``DTYPES``.
        strategy: of each part, joined with "+".
        origin: the fingerprint of the weights that were folded, or None.
        labels, about: the names of the outputs and other notes, or None.
        plans: the plan of each part by its path, as JSON values.
    """

    recipe: Recipe
    dtype: str
    strategy: str = ""
    origin: str | None = None
    labels: tuple[str, ...] | None = None
    about: dict[str, Any] | None = None
    plans: Mapping[str, Any] = field(default_factory=dict)


# -- files ------------------------------------------------------------------------------------------


def write_file(path: Path, stored: Stored) -> None:
    """Write a file under a temporary name and rename it, so that no half of a file is left.

    Raises:
        ConformalError: the recipe could not be read back, or the notes are no JSON.
    """
    where, arrays = f"save({os.fspath(path)})", stored.recipe.constants
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    try:
        notes = {item.name: as_json(getattr(stored, item.name)) for item in fields(stored)[1:]}
        document = {"format": FORMAT, "library": __version__, **notes}
        document["recipe"] = describe(stored.recipe)
        document = json.loads(json.dumps(document, allow_nan=False))
        _stored(document, arrays)
    except (TypeError, ValueError) as error:
        remedy = "Notes are text and finite numbers, labels one text for each output."
        raise refusal(where, "a fold that can be read back", f"{error!s:.200}", remedy) from error
    text = json.dumps({_SUM: _checksum(document, arrays), **document})
    replace_file(path, [serialized(arrays, {_DOCUMENT: text})])


def read_file(path: Path) -> Stored:
    """Read a file, with every check that does not run the network.

    Raises:
        ConformalError: a file that is damaged or of another kind.
    """
    name = os.fspath(path)
    mode = os.stat(name).st_mode
    if not stat.S_ISREG(mode):
        remedy = f"Give the path of the file. {_FOLD}"
        raise refusal(f"load({name})", "a file of cl.save", kind_of_file(mode), remedy)
    try:
        with safe_open(name, "np") as file:
            text = (file.metadata() or {}).get(_DOCUMENT)
            if text is None:
                got, remedy = "weights or the like", f"Load weights into their model. {_FOLD}"
                raise refusal(f"load({name})", "a file of cl.save", got, remedy)
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        document = json.loads(text)
        if document["format"] != FORMAT:
            got = f"format {document['format']!r:.60}"
            raise refusal(f"load({name})", f"a file of format {FORMAT}", got, _AGAIN)
        claimed = document.pop(_SUM)
        expect(claimed == _checksum(document, arrays), "bytes that differ from its checksum")
        return _stored(document, arrays)
    except (FileNotFoundError, PermissionError, ConformalError):
        raise
    except Exception as error:  # of safetensors, a system file, JSON, checks, or an operation's own
        got, remedy = f"a damaged file or another one ({error!s:.120})", _AGAIN
        with suppress(OSError), open(name, "rb") as file:
            head = file.read(9)  # a number of 8 bytes, and JSON
            if head[8:] != b"{":
                got, remedy = "another kind of file", "cl.load reads files of cl.save only."
            if head[:4] == b"PK\x03\x04":
                got = "a zip archive, such as torch.save writes"
                remedy = "Read it with torch.load, and fold the model: cl.fold(model, input_shape)."
        raise refusal(f"load({name})", "a whole file of cl.save", got, remedy) from error


def _checksum(document: Mapping[str, Any], arrays: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a document and all arrays."""
    digest = hashlib.sha256(json.dumps(document).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"\n{name} {array.dtype.name} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _stored(document: Any, arrays: Mapping[str, Any]) -> Stored:
    """Return the content of a document; raise ValueError where something does not fit."""
    _limit(len(document["recipe"]["operations"]), OPERATIONS_LIMIT, "operations")
    recipe, dtype = read_recipe(document["recipe"], arrays), document["dtype"]
    expect(dtype in DTYPES, f"dtype {dtype!r:.60}")
    for name, kind in recipe.constant_dtypes(dtype).items():
        found = arrays[name].dtype.name
        expect(name.isidentifier(), f"a constant named {name!r:.60}")
        expect(found == STORED.get(kind, kind), f"the constant {name:.60} of dtype {found}")
    calls = any(isinstance(operation, Call) for operation in recipe.operations)
    expect(not calls, "the call of a module, which no file holds")
    _check_sizes(recipe)
    recipe.check_values()
    notes = {item.name: document.get(item.name) for item in fields(Stored)[2:]}
    hints = get_type_hints(Stored)
    for name in ("strategy", "origin", "labels"):
        notes[name] = typed(notes[name], hints[name])
    fits = isinstance(notes["about"], (dict, NoneType)) and isinstance(notes["plans"], dict)
    expect(fits, "notes or plans that are no object")
    outputs = prod(recipe.output_shape)
    labels = outputs if notes["labels"] is None else len(notes["labels"])
    expect(labels == outputs, f"{labels} labels for {outputs} outputs")
    return Stored(recipe, dtype, **notes)


def _check_sizes(recipe: Recipe) -> None:
    """Refuse values and windows that would take more memory than any network needs."""
    shapes = recipe.shapes()
    for name, shape in shapes.items():
        _limit(prod(shape), VALUE_LIMIT, f"elements of {name!r:.60}")
    for op in recipe.operations:
        before, after = shapes[op.inputs[0]], shapes[op.outputs[0]]
        expect(before or isinstance(op, _ON_SCALARS), f"{op.kind} of a number, not of features")
        padding, kernel = getattr(op, "padding", ()), getattr(op, "kernel", ())
        if padding and not kernel:
            kernel = recipe.constant_shape(op.weight)[2:]  # type: ignore[attr-defined]
        for shape in (before, after) if padding else ():
            sides = (n + 2 * p for n, p in zip(shape[1:], padding, strict=True))
            _limit(prod((shape[0], *sides)), VALUE_LIMIT, f"elements of {op.kind}, padded")
        if kernel:
            windows = prod((before[0], *kernel, *after[1:]))
            _limit(windows, WINDOWS_LIMIT, f"elements of the windows of {op.kind}")


def _limit(count: int, limit: int, what: str) -> None:
    expect(count <= limit, f"{count} {what}, and {limit} are the most")


# -- recipes and JSON -------------------------------------------------------------------------------


def describe(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe without its arrays, as values that JSON can hold."""
    return {
        "input_shape": list(recipe.input_shape),
        "output_shape": list(recipe.output_shape),
        "output": recipe.output,
        "operations": [{"operation": op.kind, **as_json(op)} for op in recipe.operations],
    }


def read_recipe(document: Mapping[str, Any], constants: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a description.

    Args:
        document: a result of :func:`describe`, possibly damaged.
        constants: anything with a ``shape``, by name.

    Raises:
        ValueError: something is missing, unknown, or does not fit together.
    """
    expected = {"input_shape", "output_shape", "output", "operations"}
    expect(isinstance(document, dict) and document.keys() == expected, "other entries of a recipe")
    expect(isinstance(document["operations"], list), "a recipe without a list of operations")
    recipe = Recipe(
        typed(document["input_shape"], tuple[Positive, ...]),
        typed(document["output_shape"], tuple[Positive, ...]),
        tuple(map(_operation, document["operations"])),
        typed(document["output"], str),
        dict(constants),
    )
    expect(recipe.input_shape, "samples without a coefficient")
    recipe.shapes()
    used = {array for operation in recipe.operations for _, array in operation.constants()}
    expect(used == set(constants), "constants that no operation reads")
    return recipe


def _operation(item: Any) -> Operation:
    expect(isinstance(item, dict), "an operation that is no object")
    kind = item.get("operation")
    expect(isinstance(kind, str) and kind in OPERATIONS, f"no operation {kind!r:.60}")
    given = {name: value for name, value in item.items() if name != "operation"}
    found: Operation = typed(given, OPERATIONS[kind])
    return found


def as_json(value: Any) -> Any:
    """Return a value for JSON: dataclasses as objects without the fields that have their defaults."""
    if is_dataclass(value):
        held = ((item, getattr(value, item.name)) for item in fields(value))
        return {item.name: as_json(kept) for item, kept in held if kept != item.default}
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, (tuple, list)) else value


def typed(value: Any, hint: Any) -> Any:
    """Return a value of JSON as a type hint has it; lists become tuples, objects dataclasses.

    Raises:
        ValueError: it is another value.
    """
    kind, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _dataclass(value, hint)
    if kind in (Union, UnionType):
        (other,) = (item for item in arguments if item is not NoneType)
        return None if value is None else typed(value, other)
    if kind is Annotated:
        number = typed(value, arguments[0])
        expect(number >= arguments[1], f"{value} where {arguments[1]} is the least")
        return number
    if kind is tuple:
        expect(isinstance(value, (list, tuple)), f"{value!r:.60} in place of a list")
        hints = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        expect(len(value) == len(hints), f"{value!r:.60} of another length")
        return tuple(typed(item, hint) for item, hint in zip(value, hints, strict=True))
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST
    if hint is float:
        fits = whole or (isinstance(value, float) and math.isfinite(value))
    else:
        fits = whole if hint is int else isinstance(value, hint)
    expect(fits, f"{value!r:.60} in place of {hint.__name__}")
    return value


def _dataclass(value: Any, kind: Any) -> Any:
    hints, name = _hints(kind), kind.__name__
    expect(isinstance(value, dict), f"{value!r:.60} in place of {name}")
    for key in value.keys() - hints.keys():
        raise ValueError(f"{name} has no {key!r:.60}")
    for item in fields(kind):
        there = item.name in value or item.default is not MISSING
        expect(there, f"{name} lacks its {item.name}")
    return kind(**{key: typed(item, hints[key]) for key, item in value.items()})


@lru_cache(maxsize=256)
def _hints(kind: Any) -> dict[str, Any]:
    """Return the type hints of the fields of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {item.name: hints[item.name] for item in fields(kind)}
