"""Set torch's threads and seed for a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_settings(threads: int | None = None, seed: int | None = None) -> Iterator[None]:
    """Set threads and seed, unless None; restore threads and random state afterwards."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        torch.set_num_threads(threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)
