"""Training checkpoints: one safetensors file with weights and optimizer state, and the history in its header."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ...errors import first_line, refusal
from ...utils.files import staged_files
from .config import TrainConfig, make_config

_REMEDY = "Name a folder or checkpoint that conformallayers train has written."


@dataclass(frozen=True)
class TrainState:
    """The configuration, the row of each epoch, and the md5 of the training images of a run."""

    config: dict[str, Any]
    history: list[dict[str, Any]]
    data: str

    @property
    def epoch(self) -> int:
        """The number of finished epochs."""
        return len(self.history)


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint: its path, tensors by flat name, and everything else."""

    path: str
    tensors: dict[str, Tensor]
    state: TrainState


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
) -> None:
    """Write a checkpoint of a model, its optimizer and the state of the run.

    The optimizer's state is stored by the names of parameters; torch numbers them instead.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, buffer in model.named_buffers():  # non-persistent: the vectors of spectral norms
        if f"model.{name}" not in tensors:
            tensors[f"buffer.{name}"] = buffer
    names = [name for name, _ in model.named_parameters()]
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{names[index]}:{key}"] = value
    # Copies, because safetensors refuses tensors that share memory.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    with staged_files(path) as (staged,):
        save_file(copies, staged, {"state": json.dumps(asdict(state))})


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint; refuse a file that is damaged or something else."""
    where = os.fspath(path)
    try:
        with safe_open(where, "pt") as file:
            state = TrainState(**json.loads((file.metadata() or {})["state"]))
            names = list(file.keys())
            return Checkpoint(where, {name: file.get_tensor(name) for name in names}, state)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        got = f"another file ({first_line(error)})"
        raise refusal(where, "a training checkpoint", got, _REMEDY) from error


def trained(checkpoint: Checkpoint, device: str = "cpu") -> tuple[TrainConfig, nn.Module]:
    """Return the configuration and the network of a checkpoint."""
    config = make_config(**{**checkpoint.state.config, "device": device})
    model = config.build().to(device)
    restore(checkpoint, model)
    return config, model


def restore(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Load a checkpoint into a model, and into its optimizer if one is given."""
    try:
        model.load_state_dict(_with_prefix("model.", checkpoint.tensors))
        device = next(model.parameters()).device
        for name, buffer in _with_prefix("buffer.", checkpoint.tensors).items():
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._buffers[leaf] = buffer.to(device)
        if optimizer is not None:
            positions = {name: index for index, (name, _) in enumerate(model.named_parameters())}
            entries: dict[int, dict[str, Tensor]] = {}
            for name, value in _with_prefix("optimizer.", checkpoint.tensors).items():
                parameter, _, key = name.rpartition(":")
                entries.setdefault(positions[parameter], {})[key] = value
            optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})
    except (RuntimeError, AttributeError, KeyError, ValueError) as error:
        expected, reason = f"weights of {type(model).__name__}", " ".join(str(error).split())
        raise refusal(checkpoint.path, expected, reason, _REMEDY) from error


def _with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
