"""Compile the C program of a fold for this machine and load it: the engine "c".

Compiled programs are cached in a folder of the user, under a hash of the source, the compiler and the processor
that it compiles for.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import refusal
from ..folding.folded import Folded
from ..recipe.c.export import export_c
from ..recipe.places import Array
from ..utils.files import cache_folder, replace_files

_WHERE = 'Session(engine="c")'
_NAME = "cl_session"
_LONGEST = 300  # seconds of a compilation
_FLAGS = ("-std=c99", "-O3", "-march=native", "-fPIC", "-shared")
_BATCH = f"""#include <stddef.h>
#include "{_NAME}.h"
void {_NAME}_run(const float *x, float *y, size_t count, float *work)
{{
    for (size_t i = 0; i < count; i++)
        {_NAME}_predict_with(x + i * {_NAME.upper()}_INPUT_SIZE, y + i * {_NAME.upper()}_OUTPUT_SIZE, work);
}}
"""


def compile_fold(folded: Folded, folder: Path | None = None) -> Callable[[Array], Array]:
    """Return a function of float32 batches, (B, *input_shape) → (B, *output_shape), that threads may share.

    The folder caches the compiled program; None takes one in the user's cache.
    """
    compiler = _compiler()
    folder = folder or _private_folder()
    with tempfile.TemporaryDirectory(prefix="conformallayers-") as name:
        sources = Path(name)
        made = export_c(folded, sources, name=_NAME)
        (sources / "batch.c").write_text(_BATCH)
        texts = [(sources / file).read_bytes() for file in (f"{_NAME}.h", f"{_NAME}.c", "batch.c")]
        key = hashlib.sha256(b"\0".join([*texts, _target(compiler)])).hexdigest()
        loaded = _loaded(folder / key, lambda: _compile(compiler, sources))
    run = getattr(loaded, f"{_NAME}_run")
    run.restype, run.argtypes = None, [ctypes.c_void_p] * 2 + [ctypes.c_size_t, ctypes.c_void_p]
    shape, work_size = folded.output_shape, made.work_bytes // 4

    def call(x: Array) -> Array:
        x = np.ascontiguousarray(x, np.float32)
        y = np.empty((len(x), math.prod(shape)), np.float32)
        work = np.empty(work_size, np.float32)
        run(x.ctypes.data, y.ctypes.data, len(x), work.ctypes.data)
        return y.reshape(len(x), *shape)

    return call


def _compiler() -> tuple[str, ...]:
    """Return the command of the compiler: that of CC, or cc."""
    words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    found = shutil.which(words[0])
    if found is None:
        remedy = "Install gcc or clang, or set CC; other engines need none."
        raise refusal(_WHERE, "a C compiler", f"no {words[0]!r} on the path", remedy)
    return (os.path.abspath(found), *words[1:])


def _loaded(stem: Path, compile: Callable[[], bytes]) -> Any:
    """Load a compiled program; compile it if it is missing or does not match its checksum."""
    library, digest = stem.with_suffix(".so"), stem.with_suffix(".sha256")
    try:
        kept = library.read_bytes()
        fits = hashlib.sha256(kept).hexdigest() == digest.read_text("ascii")
    except OSError:
        fits = False
    try:
        if not fits:
            data = compile()
            written = hashlib.sha256(data).hexdigest().encode()
            replace_files({library: [data], digest: [written]})
        return ctypes.CDLL(str(library))
    except OSError as error:
        remedy = "Set CONFORMALLAYERS_CACHE to a folder whose programs may run."
        raise refusal(_WHERE, "a compiled program", f"{error}", remedy) from error


def _private_folder() -> Path:
    """Return the folder of compiled programs; refuse one that other users may write to.

    Loading a library runs its code, so that a file of another user must never be loaded.
    """
    folder: Path | None = None
    try:
        folder = cache_folder() / "programs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        mine = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if mine and os.access(folder, os.W_OK):
            return folder
        got = f"{folder}, which others can write to or you cannot"
    except OSError as error:
        got = f"{folder}: {error.strerror}"
    except (AttributeError, RuntimeError) as error:  # no getuid on Windows, no home folder
        got = str(error)
    remedy = "Set CONFORMALLAYERS_CACHE to a folder of yours."
    raise refusal(_WHERE, "a folder for compiled programs", got, remedy)


@lru_cache(maxsize=4)
def _target(compiler: tuple[str, ...]) -> bytes:
    """Return the version of the compiler, and the macros by which it describes this processor.

    Machines may share a home folder, and ``-march=native`` means another program on each.
    """
    found = [b" ".join(flag.encode() for flag in _FLAGS)]
    for options in (["--version"], ["-march=native", "-dM", "-E", "-x", "c", os.devnull]):
        with contextlib.suppress(OSError):  # a compiler that does not run is refused by _compile
            found.append(subprocess.run([*compiler, *options], capture_output=True).stdout)
    return b"\0".join(found)


def _compile(compiler: tuple[str, ...], folder: Path) -> bytes:
    command = [*compiler, *_FLAGS, f"{_NAME}.c", "batch.c", "-lm", "-o", "all.so"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_LONGEST)
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        if done.returncode == 0:
            return (folder / "all.so").read_bytes()
    except (OSError, subprocess.TimeoutExpired) as error:
        lines = [str(error)]
    got, remedy = f"{Path(compiler[0]).name}: {lines[0][:200]}", "Set CC to another compiler."
    raise refusal(_WHERE, "a compiler of C99", got, remedy)
