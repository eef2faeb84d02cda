"""Training checkpoints: weights, optimizer state and metrics in one safetensors file, no pickle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from ...errors import refusal
from ...utils.files import replace_file
from .saved_models import CHECKPOINT_FORMAT as _KIND

_REMEDY = "Name a folder or checkpoint that conformallayers train has written."


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint: tensors by flat name, and everything else as JSON values."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Write a checkpoint of a model, its optimizer, and a state of JSON values."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, buffer in model.named_buffers():  # non-persistent: the vectors of spectral norms
        if f"model.{name}" not in tensors:
            tensors[f"buffer.{name}"] = buffer
    names = [name for name, _ in model.named_parameters()]
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{names[index]}:{key}"] = value
    tensors["rng"] = torch.get_rng_state()
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"format": _KIND, "state": json.dumps(state)}
    replace_file(path, [to_bytes(plain, metadata)])


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; raise an error if the file is something else."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _KIND:
                got = metadata.get("format", "another safetensors file")
                raise refusal(str(path), "a training checkpoint", got, _REMEDY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return Checkpoint(tensors, json.loads(metadata["state"]))
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise refusal(str(path), "a training checkpoint", reason, _REMEDY) from error


def restore(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    where: str = "checkpoint",
) -> None:
    """Load a checkpoint into a model, and with an optimizer also into that and torch's generator."""
    weights = _with_prefix("model.", checkpoint.tensors)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise refusal(where, f"weights of {type(model).__name__}", reason, _REMEDY) from error
    device = next(model.parameters()).device
    for name, buffer in _with_prefix("buffer.", checkpoint.tensors).items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, buffer.to(device))
    if optimizer is None:
        return
    positions = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    entries: dict[int, dict[str, Tensor]] = {}
    for name, value in _with_prefix("optimizer.", checkpoint.tensors).items():
        parameter, _, key = name.rpartition(":")
        entries.setdefault(positions[parameter], {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})
    torch.set_rng_state(checkpoint.tensors["rng"])


def _with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
