"""Find networks by name: classes of the package, and the user's own as FILE.py:NAME or PACKAGE:NAME."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
import zipfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...errors import ConformalError, refusal
from ...utils.text import suggest
from ..checks import require_choice

if TYPE_CHECKING:
    from torch import nn

Build = Callable[..., "nn.Module"]
_REMEDY = "Name a class or function that returns an nn.Module: FILE.py:NAME or PACKAGE:NAME."


def is_own(network: str) -> bool:
    """Return whether a network is given as a file and a name in it."""
    return ":" in network or network.endswith(".py")


def absolute(network: str) -> str:
    """Return the network with the absolute path of its file; other names as they are."""
    file, _, name = network.rpartition(":")
    return f"{Path(file).expanduser().absolute()}:{name}" if file.endswith(".py") else network


def source_hash(network: str) -> str | None:
    """Return the SHA-256 of the file of a network; None for a network of a package."""
    file, _, name = network.rpartition(":")
    return hashlib.sha256(_read(file, name)).hexdigest() if file.endswith(".py") else None


def find_network(network: str, source: str | None = None) -> Build:
    """Return the class or function of a network, from a file only if that has the SHA-256 ``source``."""
    from ... import networks

    file, _, name = network.rpartition(":")
    if not is_own(network):
        known = [name for name in networks.__all__ if name != "IMAGE_SHAPE"]
        require_choice("network", network, known, "Name one, or FILE.py:NAME.")
        return getattr(networks, network)  # type: ignore[no-any-return]
    if not file or not name.isidentifier():
        raise refusal("network", "FILE.py:NAME or PACKAGE:NAME", repr(network), _REMEDY)
    is_file = file.endswith(".py")
    code = _read(file, name, source) if is_file else b""
    # Modules beside it can be imported, as Python does for a script; of a package, as python -m does.
    folder = os.path.dirname(os.path.abspath(file)) if is_file else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = _run_file(file, code) if is_file else importlib.import_module(file)
    except (Exception, SystemExit) as error:  # code of the user
        got, remedy = f"{type(error).__name__}: {error}", "Correct the code."
        if isinstance(error, ModuleNotFoundError):
            remedy = f"Install {error.name}, or correct the name."
        raise refusal(f"network {file}", "code that can be imported", got, remedy) from error
    build: Build | None = getattr(module, name, None)
    if not callable(build):
        own = [key for key, value in vars(module).items() if callable(value)]
        remedy = f"{_REMEDY}{suggest(name, own)}"
        raise refusal(f"network {network}", f"a class or function {name}", "none", remedy)
    return build


def build_own(network: str, build: Build, given: Mapping[str, Any]) -> nn.Module:
    """Call the class or function of a file and check that it returns a module."""
    from torch import nn

    takes = ", ".join(f"{key}={value!r}" for key, value in given.items()) or "no arguments"
    expected, remedy = (
        f"a network that takes {takes}",
        "Give other arguments default values, or name a function that does.",
    )
    try:
        inspect.signature(build).bind(**given)
        expected, remedy = "an nn.Module", "Correct the code."
        module = build(**given)
    except ConformalError:
        raise
    except (Exception, SystemExit) as error:  # code of the user
        got = f"{type(error).__name__}: {error}"
        raise refusal(f"network {network}", expected, got, remedy) from error
    if not isinstance(module, nn.Module):
        raise refusal(f"network {network}", "an nn.Module", type(module).__name__, _REMEDY)
    return module


def plain_network(network: str, weights: Path | None) -> nn.Module:
    """Return a network of PACKAGE:NAME or FILE.py:NAME, called without arguments, with weights from a file."""
    module = build_own(network, find_network(network), {})
    if weights is None:
        return module
    import torch
    from safetensors.torch import load_file

    try:
        options: Any = {"map_location": "cpu", "weights_only": True}
        is_torch = weights.suffix != ".safetensors"
        if is_torch and zipfile.is_zipfile(weights):
            with zipfile.ZipFile(weights) as archive:  # torch.save compresses nothing
                if sum(one.file_size for one in archive.infolist()) > weights.stat().st_size:
                    raise ValueError("members that unpack to more than the file")
        state = torch.load(weights, **options) if is_torch else load_file(weights)
        keys = module.load_state_dict(state, strict=False)
        for kind, names in zip(("missing", "unexpected"), keys, strict=True):
            if names:
                raise ValueError(f"{len(names)} {kind} keys, such as {', '.join(names[:3])}")
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:  # of torch, pickle or safetensors
        expected, remedy = f"a state_dict of {network}", "Save model.state_dict(), nothing else."
        got = f"{' '.join(str(error).split()):.400}".rstrip(".")
        raise refusal(f"--weights {weights}", expected, got, remedy) from error
    return module


def _read(file: str, name: str, source: str | None = None) -> bytes:
    """Return the code of a file; refuse one that has changed since the training."""
    try:
        code = Path(file).read_bytes()
    except OSError as error:
        remedy = "Check the path; the code of a run must stay there unchanged."
        got = str(error.strerror)
        raise refusal("network", f"the code of {name} in {file}", got, remedy) from error
    found = hashlib.sha256(code).hexdigest()
    if source not in (None, found):
        expected, got = f"{file} with the SHA-256 {str(source)[:12]}…", f"{found[:12]}…"
        remedy = "The code has changed since the training: restore it, or train again."
        raise refusal("network", expected, got, remedy)
    return code


@lru_cache(maxsize=32)
def _run_file(file: str, code: bytes) -> ModuleType:
    """Run the code of a file as a module."""
    module = ModuleType(f"conformallayers_own_{hashlib.sha256(code).hexdigest()[:16]}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # which dataclasses look for
    exec(compile(code, file, "exec", dont_inherit=True), vars(module))
    return module
