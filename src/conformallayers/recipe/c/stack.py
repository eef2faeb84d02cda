"""The stack of a C program, estimated from its text: the frames of the deepest chain of calls."""

from __future__ import annotations

import re

SAVED = 104  # bytes: the return address and the registers that a function of a Cortex-M4F may save
MARGIN = 512  # bytes of functions of math.h, of double without hardware, and of unrolled loops
_WORD = 8  # bytes of a variable: a double, or a pointer of a larger machine
_DECLARED = re.compile(
    r"(?:^|[;{(])\s*(?:const |volatile )?"
    r"(?:float|double|int|u?int(?:8|16|32|64)_t|size_t) ([^;{}]*?)(?=;| = \{|$)",
    re.MULTILINE,
)
_FUNCTION = re.compile(
    r"^static [\w ]+?\*?(\w+)\(([^{]*)\)\n\{\n(.*?)^\}", re.MULTILINE | re.DOTALL
)


def stack_bytes(functions: str, body: str) -> int:
    """Return an upper estimate of the bytes of stack of a program.

    Every variable and argument counts eight bytes in memory, as if no register held it, and each function
    the registers that it may save. A margin covers the C library. Compilers need less.

    Args:
        functions: the functions that the program calls, callees first.
        body: of the function that calls them; it has three arguments.
    """
    depth: dict[str, int] = {}
    for name, arguments, inner in _FUNCTION.findall(functions):
        needed = _frame(arguments.count(",") + 1, inner) + _deepest(inner, depth)
        depth[name] = max(needed, depth.get(name, 0))  # some have a version for each machine
    return _frame(3, body) + _deepest(body, depth)


def _frame(arguments: int, body: str) -> int:
    """Return the bytes of one function without its callees."""
    variables = arguments
    for text in _DECLARED.findall(body):
        flat = _without_brackets(text)
        names = flat.count(",") + 1
        sizes = [int(size) for size in re.findall(r"^\**\w+\[(\d+)\]", text)]
        variables += names + sum(sizes)
    return SAVED + _WORD * variables


def _without_brackets(text: str) -> str:
    """Remove brackets and their contents, from the inside."""
    shorter = re.sub(r"\([^()]*\)|\[[^\[\]]*\]", "", text)
    return text if shorter == text else _without_brackets(shorter)


def _deepest(body: str, depth: dict[str, int]) -> int:
    called = set(re.findall(r"\b([a-z]\w*)\(", body))
    return max(MARGIN, *(depth.get(name, 0) for name in called), 0)
