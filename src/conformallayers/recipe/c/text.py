"""The text of C programs: the functions they call, from ``templates/helpers.c``. ASCII only."""

from __future__ import annotations

import re
import string
import textwrap
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

WIDTH = 98
_FOLDER = Path(__file__).parent / "templates"
_SUFFIXES = {"f": "float", "d": "double", "b": "int8_t"}  # of functions: the type of values
# How entries are read, written and pointed at: pattern, for float, for double, for whole numbers.
_ENTRIES = (
    (r"\$get\((\w+), ([^()]*)\)", r"\1[\2]", r"load(\1, \2)", r"\1[\2]"),
    (r"\$at\((\w+), ([^()]*)\)", r"\1 + \2", r"\1 + 2 * (size_t)(\2)", r"\1 + \2"),
    (
        r"\$put\((\w+), (\w+), (.*)\);",
        r"\1[\2] = \3;",
        r"store(\1, \2, \3);",
        r"\1[\2] = (int8_t)(\3);",
    ),
    (r"\bfloat \*", "float *", "float *", "int8_t *"),
)
# Functions of one number v; d is v as a double, a and b are parameters of type double.
MAPS = {
    "multiply": "v * ($V)a",
    "divide": "v / ($V)a",
    "abs": "v < 0 ? -v : v",
    "relu": "v < 0 ? 0 : v",  # NaN stays, as everywhere
    "relu6": "v < 0 ? 0 : v > 6 ? 6 : v",
    "leaky_relu": "v < 0 ? ($V)a * v : v",
    "gelu": "($V)(0.5 * d * erfc(-0.7071067811865476 * d))",
    "silu": "($V)(d / (1 + exp(-d)))",
    "sigmoid": "($V)(1 / (1 + exp(-d)))",
    "tanh": "($V)tanh(d)",
    "hardswish": "v <= -3 ? 0 : v >= 3 ? v : v * (v + 3) / 6",
    "hardsigmoid": "v <= -3 ? 0 : v >= 3 ? 1 : v / 6 + ($V)0.5",
}
# Functions of v and an entry of a constant that broadcasts.
BROADCASTS = {
    "add_constant": "v + c[j]",
    "multiply_constant": "v * c[j]",
    "prelu": "v > 0 ? v : v * c[j]",
}
# How windows are reduced: declarations, the statement for each entry v, and the result. NaN is the largest.
POOLS = {
    "max_pool": ("$V found = ($V)-INFINITY", "found = v > found || v != v ? v : found", "found"),
    "norm_pool": (
        "double sum = 0; int32_t count = 0",
        "sum += (double)v * (double)v; count++",
        "($V)sqrt(sum * g[10] / count)",
    ),
}
WHOLE_POOLS = {"max_pool": ("int8_t found = -128", "found = v > found ? v : found", "found")}
_FAMILIES = {
    **dict.fromkeys(MAPS, "map"),
    **dict.fromkeys(BROADCASTS, "broadcast"),
    **dict.fromkeys((*POOLS, *WHOLE_POOLS), "pool"),
}
# The end of a sum p of products of integers: type, parameters, the parameters from a channel on, the result.
SUMS = {
    "whole": (
        "int8_t",
        "const int32_t *multiplier, const int32_t *addend, int32_t shift, int32_t low, int32_t factor",
        "multiplier + at, addend == NULL ? NULL : addend + at, shift, low, factor",
        "feature(p * multiplier[c], shift, factor, addend == NULL ? NULL : addend + c, low)",
    ),
    "number": (
        "float",
        "const double *scale, const double *addend, double tau",
        "scale + at, addend == NULL ? NULL : addend + at, tau",
        "numeric(p, scale[c], tau, addend == NULL ? NULL : addend + c)",
    ),
}


@lru_cache(maxsize=1)
def helpers() -> dict[str, str]:
    """Return the templates of functions by name; a function calls only those before it."""
    found: dict[str, str] = {}
    for file in ("integers.c", "helpers.c"):
        _, *parts = re.split(r"^//: ", (_FOLDER / file).read_text("ascii"), flags=re.MULTILINE)
        found |= dict(part.split("\n", 1) for part in parts)
    return found


def functions(text: str) -> str:
    """Return the functions that a text calls, and their callees, which come first."""
    order = list(helpers())
    found: dict[tuple[int, str], str] = {}
    waiting = [text]
    while waiting:
        for name in set(re.findall(r"\b([a-z]\w*)\(", waiting.pop())):
            template = _template(name)
            key = order.index(template) if template else -1, name
            if template and key not in found:
                found[key] = _written(template, name)
                waiting.append(found[key].split("{", 1)[1])
    return "\n".join(found[key].rstrip() + "\n" for key in sorted(found))


def _template(name: str) -> str | None:
    """Return the template of a function; None for functions of the C library."""
    base, _, suffix = name.rpartition("_")
    if name in helpers() and "$" not in helpers()[name]:
        return name
    if suffix in SUMS and f"{base}_sums" in helpers():
        return f"{base}_sums"
    if suffix not in _SUFFIXES:
        return None
    template = _FAMILIES.get(base, base)
    return template if template in helpers() else None


def _written(template: str, name: str) -> str:
    """Write a function for one type of values."""
    base, _, suffix = name.rpartition("_")
    values = _SUFFIXES.get(suffix, "")
    first, each, result = (WHOLE_POOLS if values == "int8_t" else POOLS).get(base, ("", "", ""))
    expression = {**MAPS, **BROADCASTS}.get(base, each)
    words = set(re.findall(r"\w+", expression))
    parameters = "".join(f", double {letter}" for letter in "ab" if letter in words)
    if suffix in SUMS:
        values, parameters, first, expression = SUMS[suffix]
    text = helpers()[template]
    mark = r"^\$D" if re.search(r"\bd\b", expression) else r"^\$D.*\n"
    text = re.sub(mark, "", text, flags=re.MULTILINE)
    for token, word in (
        ("$E", expression),
        ("$I", first),
        ("$R", result),
        ("$N", base),
        ("$P", parameters),
        ("$V", values),
        ("$s", f"_{suffix}"),
    ):
        text = text.replace(token, word)
    kind = ("float", "double", "int8_t").index(values) if values else 0
    for pattern, *written in _ENTRIES:
        text = re.sub(pattern, written[kind], text)
    return text


def fill(template: str, words: dict[str, object]) -> str:
    """Return a file of ``templates`` with its words replaced."""
    return string.Template((_FOLDER / template).read_text("ascii")).substitute(words)


def comment(lines: Sequence[str]) -> str:
    """Return a block comment; nothing in it can end it early."""
    safe = [line.encode("ascii", "replace").decode().replace("*/", "* /") for line in lines]
    body = "\n".join(f" * {line}".rstrip() for line in safe)
    return f"/*\n{body}\n */\n"


def quoted(text: str) -> str:
    """Return a string literal of UTF-8 for C and C++; other than plain characters are octal escapes.

    Examples:
        >>> quoted("T-shirt"), quoted('a "ü"?')
        ('"T-shirt"', '"a \\\\042\\\\303\\\\274\\\\042\\\\077"')
    """
    plain = set(string.ascii_letters + string.digits + " !#$%&'()*+,-./:;<=>@[]^_`{|}~")
    letters = (chr(c) if chr(c) in plain else f"\\{c:03o}" for c in text.encode())
    return f'"{"".join(letters)}"'


def indented(lines: Iterable[str]) -> str:
    """Indent statements by their braces and wrap them."""
    depth, found = 1, []
    for line in lines:
        depth -= line.startswith("}")
        margin = "    " * depth
        wrapper = textwrap.TextWrapper(
            WIDTH, margin, margin + "    ", break_long_words=False, break_on_hyphens=False
        )
        found += wrapper.wrap(line)
        depth += line.endswith("{")
    return "\n".join(found)
