"""The record of a C export, and the text of its files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from ...utils.text import count, size
from ..places import Array
from .constants import QUAD, Constant, number
from .program import Program
from .text import fill, quoted

DEFAULT = "cl_model"
_NAN_SPREADS = "With a NaN in the image or in an output, all outputs are NaN and the result is -1."
_NAN_IS_ZERO = "A NaN in the image counts as 0."
_LIMIT = 1e-3  # error of the self-test, relative to the largest output: rounding stays far below


@dataclass(frozen=True)
class CExport:
    """What :func:`export_c` wrote; prints as two lines.

    Attributes:
        header, source: the files.
        name: the prefix of functions and macros.
        dtype: of the weights.
        constant_bytes: of all constant arrays.
        work_bytes: of work memory, the arena.
        caller_bytes: of one image and its outputs in float32, which the caller has.
        multiply_adds: of one image.
        makefile, example: the files of an example, or None.
        written: whether the files were written.
    """

    header: Path
    source: Path
    name: str
    dtype: str
    constant_bytes: int
    work_bytes: int
    caller_bytes: int
    multiply_adds: int
    makefile: Path | None = None
    example: Path | None = None
    written: bool = True

    @property
    def ram_bytes(self) -> int:
        """Work memory, one image and its outputs."""
        return self.work_bytes + self.caller_bytes

    def __str__(self) -> str:
        files = (self.header, self.source, self.makefile, self.example)
        names = ", ".join(str(path) for path in files if path)
        return f"{names}{'' if self.written else ' (not written)'}\n{self.report}"

    __repr__ = __str__

    @property
    def report(self) -> str:
        """Sizes and work of the program, without the names of its files."""
        return (
            f"{self.dtype}: constants {size(self.constant_bytes)}, work memory "
            f"{size(self.work_bytes)}, {count(self.multiply_adds)} multiply-adds per image\n"
            f"flash: {size(self.constant_bytes)} and the code; RAM: {size(self.ram_bytes)}, of which "
            f"{size(self.caller_bytes)} are the image and the outputs"
        )


def texts_of(
    folded: Any, program: Program, image: Array, outputs: Array, result: CExport
) -> dict[Path, str]:
    """Return the text of every file.

    Args:
        folded: the network.
        program: its arrays and statements.
        image, outputs: of the self-test: bytes, which stand for byte / 255, and what is expected.
        result: files and sizes, for the header.
    """
    name, macro = result.name, result.name.upper()
    # Texts that can neither end a comment nor a string in C.
    given = (text or "" for text in (folded.origin, folded.strategy))
    origin, strategy = (x if re.fullmatch(r"[\w:.+-]*", x, re.ASCII) else "" for x in given)
    needed, body = program.code
    arrays = "\n".join(constant.text() for constant in program.constants)
    arrays = QUAD + arrays if any(constant.quads for constant in program.constants) else arrays
    digest = hashlib.sha256("\n".join([arrays, needed, body, origin]).encode())
    words: dict[str, Any] = vars(result) | {
        "macro": macro,
        "id": f"0x{digest.hexdigest()[:8]}",
        "inputs": prod(folded.input_shape),
        "input_shape": ", ".join(map(str, folded.input_shape)),
        "outputs": prod(folded.output_shape),
        "output_shape": ", ".join(map(str, folded.output_shape)),
        "work": result.work_bytes // 4,
        "flash_bytes": result.constant_bytes,
        "version": __version__,
        "origin": origin,
        "strategy": strategy,
        "labels": _labels(macro, folded.labels),
        "nan": _NAN_IS_ZERO if result.dtype == "int8" else _NAN_SPREADS,
    }
    default = name == DEFAULT
    words |= _optional("header{}.h", words, default, program.reads_bytes)
    header = fill("header.h", words)
    words |= {"constants": arrays, "helpers": needed, "body": body}
    words["levels"] = "const uint8_t *levels, " if program.reads_bytes else ""
    words["none"] = "NULL, " if program.reads_bytes else ""
    tests = (
        Constant("self_test_image", "uint8_t", image.ravel()),
        Constant("self_test_out", "float", outputs.astype(np.float32)),
    )
    words["arrays"] = "\n".join(array.text() for array in tests)
    words["limit"] = number(float(np.float32(_LIMIT * np.abs(outputs).max())), "float")
    words |= _optional("source{}.c", words, default, program.reads_bytes)
    source = fill("source.c", words).rstrip() + "\n" + fill("self_test.c", words)
    texts = {result.source: source, result.header: header}
    if result.makefile is not None and result.example is not None:
        texts |= {
            result.makefile: fill("example.mk", words),
            result.example: fill("example.c", words),
        }
    return texts


def _optional(file: str, words: dict[str, Any], default: bool, reads_bytes: bool) -> dict[str, str]:
    """Return the functions of the default name, and those for images of bytes."""
    found = {"bytes": fill(file.format("_bytes"), words) if reads_bytes else ""}
    found["aliases"] = fill(file.format("_aliases"), words) if default else ""
    if default and reads_bytes:
        found["aliases"] += fill(file.format("_bytes_aliases"), words)
    return found


def _labels(macro: str, labels: Sequence[str] | None) -> str:
    """Return the names of the classes as a macro for an array of strings, or nothing."""
    if labels is None:
        return ""
    names = ", \\\n".join(f"    {quoted(str(label))}" for label in labels)
    return (
        "/* The names of the outputs in UTF-8: const char *const names[] = "
        f"{macro}_LABELS; */\n#define {macro}_LABELS {{ \\\n{names}}}\n"
    )
