"""SHA-256 of a state_dict."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


def fingerprint(model: nn.Module) -> str | None:
    """Return the SHA-256 of a model's state: names, dtypes, shapes and bytes; None on "meta".

    Examples:
        >>> layer = nn.Linear(2, 1)
        >>> before = fingerprint(layer)
        >>> _ = nn.init.zeros_(layer.weight)
        >>> fingerprint(layer) == before
        False
    """
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    if any(tensor.is_meta for tensor in state.values()):
        return None
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.cpu().contiguous().reshape(-1)
        flat = flat.as_strided(flat.shape, (1,))  # a single element may have any stride
        digest.update(flat.view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"
