"""Training checkpoints: weights, optimizer state and history, in the file format of cl.save."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from ... import __version__
from ...errors import refusal
from ...folding.files import read_tensor
from ...folding.model_files import STORED_DTYPES
from ...recipe.archive import FORMAT, Archive, open_archive, unbuildable, write_archive
from ...utils.fingerprint import tensor_bytes
from .config import TrainConfig, make_config

_REMEDY = "Name a folder or checkpoint that conformallayers train has written."


class TrainState(BaseModel):
    """The configuration, the row of each epoch, and the md5 of the training images of a run."""

    model_config = ConfigDict(extra="forbid")

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
    arrays = {
        name: (STORED_DTYPES[tensor.dtype], tuple(tensor.shape), tensor_bytes(tensor))
        for name, tensor in tensors.items()
    }
    head = {"format": FORMAT, "library": __version__, "kind": "checkpoint"}
    write_archive(path, {**head, "state": state.model_dump()}, arrays)


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint; refuse a file that is damaged or something else."""
    return read(open_archive(path))


def read(archive: Archive) -> Checkpoint:
    """Read the checkpoint in an open archive."""
    if archive.document["kind"] != "checkpoint":
        got = "a file of cl.save"
        raise refusal(archive.path, "a training checkpoint", got, _REMEDY)
    try:
        state = TrainState(**archive.document["state"])
    except ValidationError as error:
        raise unbuildable(archive.path, error) from error
    tensors = {name: read_tensor(archive, name) for name in archive.entries}
    return Checkpoint(archive.path, tensors, state)


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
