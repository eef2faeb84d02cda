"""Data-parallel training; a single process is the case of world size 1."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

_BUFFER_OPTIONS = ("forward_sync_buffers", "broadcast_buffers")  # torch's new name and its old one


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among those that train together."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files and prints."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return a model whose gradients are averaged over the ranks.

        Buffers are not broadcast: spectral norms follow from the weights, which are equal.
        """
        if self.world_size == 1:
            return model
        known = inspect.signature(DistributedDataParallel).parameters
        options: dict[str, Any] = {next(n for n in _BUFFER_OPTIONS if n in known): False}
        return DistributedDataParallel(model, **options)

    def sum(self, *values: float, device: str = "cpu") -> list[float]:
        """Return the sum of each value over the ranks."""
        if self.world_size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64, device=device)
        distributed.all_reduce(sums)
        return [float(value) for value in sums]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.world_size > 1:
            distributed.barrier()


@contextmanager
def process_group(device: str) -> Iterator[Ranks]:
    """Join the process group of ``torchrun``, if it has started this process."""
    if distributed.is_available() and distributed.is_initialized():
        yield Ranks(distributed.get_rank(), distributed.get_world_size())
    elif "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        yield Ranks()
    else:
        if device != "cpu":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("gloo" if device == "cpu" else "nccl")
        try:
            yield Ranks(distributed.get_rank(), distributed.get_world_size())
        finally:
            distributed.destroy_process_group()
