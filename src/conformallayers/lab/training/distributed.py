"""Data-parallel training; a single process is the case of world size 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed, nn


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among those that train together."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files and prints."""
        return self.rank == 0

    def add_gradients(self, model: nn.Module) -> None:
        """Add up the gradients of all ranks, whose shares of a batch may differ in size."""
        for parameter in model.parameters() if self.world_size > 1 else ():
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad)

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
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        yield Ranks()
    else:
        if device != "cpu":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("gloo" if device == "cpu" else "nccl")
        try:
            yield Ranks(distributed.get_rank(), distributed.get_world_size())
        finally:
            distributed.destroy_process_group()
