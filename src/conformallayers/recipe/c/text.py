"""The text of C programs: functions from ``templates``, indentation. ASCII only."""

from __future__ import annotations

import re
import string
import textwrap
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

WIDTH = 98
_FOLDER = Path(__file__).parent / "templates"
_TYPES = {"f": "float", "b": "int8_t"}  # by suffixes of functions


@lru_cache(maxsize=1)
def helpers() -> dict[str, str]:
    """Return the templates of functions by name; a function calls only those before it."""
    found: dict[str, str] = {}
    for file in ("helpers.c", "integers.c"):
        _, *parts = re.split(r"^//: ", (_FOLDER / file).read_text("ascii"), flags=re.MULTILINE)
        found |= {
            name: f"{text.rstrip()}\n" for name, text in (one.split("\n", 1) for one in parts)
        }
    return found


def functions(text: str) -> str:
    """Return the functions and macros that a text uses, and those these use, which come first."""
    order = list(helpers())
    found: dict[tuple[int, str], str] = {}
    waiting = [text]
    while waiting:
        for name in set(re.findall(r"\b([A-Za-z]\w*)\(", waiting.pop())):
            base, _, suffix = name.rpartition("_")
            template = name if name in helpers() else base if suffix in _TYPES else ""
            key = order.index(template) if template in helpers() else -1, name
            if key[0] >= 0 and key not in found:
                word = helpers()[template]
                word = word.replace("$V", _TYPES.get(suffix, "")).replace("$s", f"_{suffix}")
                found[key] = word
                waiting.append(word)
    return "\n".join(found[key] for key in sorted(found))


def fill(template: str, words: dict[str, object]) -> str:
    """Return a file of ``templates`` with its words replaced."""
    return string.Template((_FOLDER / template).read_text("ascii")).substitute(words)


def quoted(text: str) -> str:
    """Return a string literal of UTF-8 for C and C++; other than plain characters are octal escapes.

    Examples:
        >>> quoted("T-shirt"), quoted('a "ü"?')
        ('"T-shirt"', '"a \\\\042\\\\303\\\\274\\\\042\\\\077"')
    """
    plain = set(string.ascii_letters + string.digits + " !#$%&'()*+,-./:;<=>@[]^_`{|}~")
    letters = (chr(c) if chr(c) in plain else f"\\{c:03o}" for c in text.encode())
    return f'"{"".join(letters)}"'


def indented(lines: Iterable[str], depth: int = 1) -> str:
    """Indent statements by their braces and wrap them."""
    found = []
    for line in lines:
        depth -= line.startswith("}")
        margin = "    " * depth
        wrapper = textwrap.TextWrapper(
            WIDTH, margin, margin + "    ", break_long_words=False, break_on_hyphens=False
        )
        found += wrapper.wrap(line)
        depth += line.endswith("{")
    return "\n".join(found)
