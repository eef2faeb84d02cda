"""The text of a C program: the functions that it calls, from ``templates/helpers.c``. ASCII only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from string import Template

from ..layer_operations import FUNCTIONS

WIDTH = 98
_FOLDER = Path(__file__).parent / "templates"
_SUFFIXES = {  # of functions: type of the weights, type of values
    "f": ("float", "float"),
    "i": ("int8_t", "float"),
    "s": ("int16_t", "float"),
    "d": ("double", "double"),
}
# Functions of one number v, or of the double d where they need <math.h>; a and b are parameters.
MAPS = {
    "relu": "v < 0 ? 0 : v",  # NaN stays, as everywhere
    "relu6": "v < 0 ? 0 : v > 6 ? 6 : v",
    "leaky_relu": "v < 0 ? ($V)a * v : v",
    "elu": "v < 0 ? ($V)(a * expm1(d)) : v",
    "celu": "v < 0 ? ($V)(a * expm1(d / a)) : v",
    "selu": "($V)(1.0507009873554805 * (v < 0 ? 1.6732632423543772 * expm1(d) : d))",
    "gelu": "($V)(0.5 * d * erfc(-0.7071067811865476 * d))",
    "gelu_tanh": "($V)(d / (1 + exp(-1.5957691216057308 * d * (1 + 0.044715 * d * d))))",
    "silu": "($V)(d / (1 + exp(-d)))",
    "mish": "($V)(d * tanh(log1p(exp(d))))",
    "sigmoid": "($V)(1 / (1 + exp(-d)))",
    "tanh": "($V)tanh(d)",
    "softplus": "a * d > b ? v : ($V)(log1p(exp(a * d)) / a)",
    "hardtanh": "d < a ? ($V)a : d > b ? ($V)b : v",
    "hardswish": "v <= -3 ? 0 : v >= 3 ? v : v * (v + 3) / 6",
    "hardsigmoid": "v <= -3 ? 0 : v >= 3 ? 1 : v / 6 + ($V)0.5",
}
# Functions of v and an entry of a constant that broadcasts.
BROADCASTS = {
    "add_constant": "v + c[j]",
    "multiply_constant": "v * c[j]",
    "prelu": "v > 0 ? v : v * c[j]",
}


@lru_cache(maxsize=1)
def helpers() -> dict[str, str]:
    """Return the functions by name, in an order in which they may call each other."""
    _, *parts = re.split(r"^//: ", (_FOLDER / "helpers.c").read_text("ascii"), flags=re.MULTILINE)
    return dict(part.split("\n", 1) for part in parts)


def functions(text: str) -> str:
    """Return the functions that a text calls, and those that they call."""
    found: dict[tuple[int, str], str] = {}
    order = list(helpers())
    waiting = [text]
    while waiting:
        for name in set(re.findall(r"\b([a-z]\w*)\(", waiting.pop())):
            written = _function(name)
            if written is not None and (order.index(written[0]), name) not in found:
                found[order.index(written[0]), name] = written[1]
                waiting.append(written[1].split("{", 1)[1])
    return "\n".join(found[key].rstrip() + "\n" for key in sorted(found))


def _function(name: str) -> tuple[str, str] | None:
    """Return the snippet that a function comes from, and its text; None where it is none of ours."""
    snippets = helpers()
    if name in snippets and "$" not in snippets[name]:
        return name, snippets[name]
    base, _, suffix = name.rpartition("_")
    if suffix not in _SUFFIXES:
        return None
    if base in MAPS:
        snippet, expression = "map", MAPS[base]
    elif base in BROADCASTS:
        snippet, expression = "broadcast", BROADCASTS[base]
    elif base in snippets:
        snippet, expression = base, ""
    else:
        return None
    count = FUNCTIONS.get(base, 0) if snippet == "map" else 0
    parameters = "".join(f", double {letter}" for letter in "ab"[:count])
    text = snippets[snippet].replace("$E", expression).replace("$N", base).replace("$P", parameters)
    text = re.sub(r"\$D" if re.search(r"\bd\b", expression) else r"\$D.*\n", "", text)
    return snippet, _typed(text, suffix)


def _typed(text: str, suffix: str) -> str:
    """Write a function down for one type of weights and values."""
    weights, values = _SUFFIXES[suffix]
    scaled, wide = suffix in ("i", "s"), values == "double"
    lines = [line for line in text.splitlines() if scaled or not line.startswith("$Q")]
    text = "\n".join(line.removeprefix("$Q") for line in lines)
    text = re.sub(r" \$S(\s)", r" const float *scale,\1" if scaled else r"\1", text)
    text = text.replace("$T", "scale[r] * " if scaled else "")
    text = text.replace("$W", weights).replace("$V", values).replace("$s", f"_{suffix}")
    text = _expand(text, "$get(", lambda x, i: f"load({x}, {i})" if wide else f"{x}[{i}]")
    text = _expand(text, "$at(", lambda x, i: f"{x} + 2 * (size_t)({i})" if wide else f"{x} + {i}")
    return _expand(
        text, "$put(", lambda y, i, v: f"store({y}, {i}, {v})" if wide else f"{y}[{i}] = {v}"
    )


def _expand(text: str, token: str, write: Callable[..., str]) -> str:
    """Replace a token and the arguments in its parentheses; the last one may have commas."""
    count = 3 if token == "$put(" else 2
    while token in text:
        start = text.index(token)
        stop, depth = start + len(token), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[stop], 0)
            stop += 1
        inside = text[start + len(token) : stop - 1].split(", ", count - 1)
        text = text[:start] + write(*inside) + text[stop:]
    return text


def fill(template: str, words: dict[str, object]) -> str:
    """Return a file of ``templates`` with its words replaced."""
    return Template((_FOLDER / template).read_text("ascii")).substitute(words)


def comment(lines: Sequence[str]) -> str:
    """Return a block comment; nothing in it can end it early."""
    safe = [line.encode("ascii", "replace").decode().replace("*/", "* /") for line in lines]
    body = "\n".join(f" * {line}".rstrip() for line in safe)
    return f"/*\n{body}\n */\n"


def indented(lines: Iterable[str]) -> str:
    """Indent statements by their braces and wrap them."""
    return "\n".join(_indented(lines))


def _indented(lines: Iterable[str]) -> Iterator[str]:
    depth = 1
    for line in lines:
        depth -= line.startswith("}")
        margin = "    " * depth
        while len(line) > WIDTH - len(margin) and " " in line:
            cut = line.rfind(" ", 0, WIDTH - len(margin))
            cut = line.find(" ") if cut < 0 else cut
            yield margin + line[:cut]
            line, margin = line[cut + 1 :], "    " * (depth + 1)
        yield margin + line
        depth += line.endswith("{")
