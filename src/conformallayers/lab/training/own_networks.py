"""Find networks by name: classes of the package, and classes or functions in files, as FILE.py:NAME."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...errors import ConformalError, cause_line, refusal, shape_text
from ...utils.text import suggest

if TYPE_CHECKING:
    from torch import nn

Build = Callable[..., "nn.Module"]
_REMEDY = "Name a class or function that returns an nn.Module: FILE.py:NAME."


def is_own(network: str) -> bool:
    """Return whether a network is given as a file and a name in it."""
    return ":" in network or network.endswith(".py")


def absolute(network: str) -> str:
    """Return the network with the absolute path of its file; a name of the package as it is."""
    file, _, name = network.rpartition(":")
    return f"{Path(file).expanduser().absolute()}:{name}" if file else network


def source_hash(network: str) -> str | None:
    """Return the SHA-256 of the file of a network; None for a network of the package."""
    return hashlib.sha256(_read(network)).hexdigest() if is_own(network) else None


def find_network(network: str, source: str | None = None) -> Build:
    """Return the class or function of a network.

    Args:
        network: a name of :mod:`conformallayers.networks`, or ``FILE.py:NAME``. The file is run.
        source: the SHA-256 that the file must have; None takes any.
    """
    from ... import networks

    if is_own(network):
        return _from_file(network, source)
    known = [name for name in networks.__all__ if name != "IMAGE_SHAPE"]
    if network not in known:
        remedy = f"Name one, or FILE.py:NAME.{suggest(str(network), known)}"
        raise refusal("network", f"one of {', '.join(known)}", repr(network), remedy)
    build: Build = getattr(networks, network)
    return build


def build_own(network: str, build: Build, given: Mapping[str, Any]) -> nn.Module:
    """Call the class or function of a file and check that it returns a module."""
    from torch import nn

    try:
        inspect.signature(build).bind(**given)
        module = build(**given)
    except ConformalError:
        raise
    except (Exception, SystemExit) as error:  # code of the user
        got = f"{type(error).__name__}: {error}"
        remedy = "Give further arguments default values."
        raise refusal(f"network {network}", f"a network for {dict(given)}", got, remedy) from error
    if not isinstance(module, nn.Module):
        raise refusal(f"network {network}", "an nn.Module", f"{type(module).__name__}", _REMEDY)
    return module


def plain_network(network: str, weights: Path | None) -> nn.Module:
    """Return the network of PACKAGE:FACTORY or FILE.py:FACTORY, called without arguments, with weights from a file."""
    package, _, name = network.rpartition(":")
    if package.endswith(".py"):
        module = build_own(network, find_network(network), {})
    else:
        sys.path.insert(0, os.getcwd())  # as python -m does
        try:
            build = getattr(importlib.import_module(package), name)
        except (ImportError, AttributeError) as error:
            remedy = "Name a module and a class or function in it."
            raise refusal(f"network {network}", "it", cause_line(error), remedy) from error
        finally:
            sys.path.remove(os.getcwd())
        module = build_own(network, build, {})
    if weights is None:
        return module
    import torch
    from safetensors.torch import load_file

    try:
        torch_file = weights.suffix != ".safetensors"
        options: Any = {"map_location": "cpu", "weights_only": True}
        state = torch.load(weights, **options) if torch_file else load_file(weights)
        module.load_state_dict(state)
    except Exception as error:  # of torch, pickle or safetensors
        expected, remedy = f"a state_dict of {name}", "Save model.state_dict(), nothing around it."
        raise refusal(f"--weights {weights}", expected, cause_line(error), remedy) from error
    return module


def check_outputs(model: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """Refuse a network that has no score for every class, or that cannot be folded, before it is trained."""
    import torch

    from ...container import ConformalLayers, layer_by_layer
    from ...folding.fold import fold

    if not any(parameter.requires_grad for parameter in model.parameters()):
        remedy = "Give it layers with weights; conformallayers fold takes one without."
        raise refusal("network", "parameters to train", "none", remedy)
    expected = f"scores of shape (2, {classes}) for images of {shape_text((2, *shape))}"
    remedy = "Let the network take num_classes and in_shape as arguments."
    device = next(model.parameters()).device
    try:
        with torch.no_grad(), layer_by_layer():
            scores = model.eval()(torch.zeros(2, *shape, device=device))
        found = getattr(scores, "shape", ())
        if tuple(found) != (2, classes):
            raise refusal("network", expected, shape_text(found), remedy)
        if any(isinstance(module, ConformalLayers) for module in model.modules()):
            fold(model, shape)
    except ConformalError:
        raise
    except Exception as error:  # code of the user
        raise refusal("network", expected, cause_line(error), remedy) from error
    finally:
        model.train()


def _read(network: str) -> bytes:
    file, _, name = network.rpartition(":")
    if not file or not name.isidentifier():
        raise refusal("network", "FILE.py:NAME", repr(network), _REMEDY)
    try:
        return Path(file).read_bytes()
    except OSError as error:
        remedy = "Check the path; the code of a run must stay there unchanged."
        raise refusal("network", f"the code of {name} in {file}", str(error), remedy) from error


def _from_file(network: str, source: str | None) -> Build:
    code = _read(network)
    found = hashlib.sha256(code).hexdigest()
    file, _, name = network.rpartition(":")
    if source is not None and found != source:
        expected, got = f"{file} with the SHA-256 {source[:12]}…", f"{found[:12]}…"
        remedy = "The code has changed since the training: restore it, or train again."
        raise refusal("network", expected, got, remedy)
    module = _import(file, code)
    build = getattr(module, name, None)
    if not callable(build):
        own = [key for key, value in vars(module).items() if callable(value)]
        remedy = f"{_REMEDY}{suggest(name, own)}"
        raise refusal(f"network {network}", f"a class or function {name}", "none", remedy)
    result: Build = build
    return result


@lru_cache(maxsize=32)
def _import(file: str, code: bytes) -> ModuleType:
    """Run the code of a file as a module; modules beside it can be imported, as Python does for a script."""
    module = ModuleType(f"conformallayers_own_{hashlib.sha256(code).hexdigest()[:16]}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # which dataclasses look for
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    try:
        exec(compile(code, file, "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:  # code of the user
        got = f"{type(error).__name__}: {error}"
        raise refusal(f"network {file}", "code that can be imported", got, "Correct it.") from error
    finally:
        del sys.path[0]
    return module
