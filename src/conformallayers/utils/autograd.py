"""Apply functions of autograd with little Python."""

from __future__ import annotations

from typing import Any

import torch


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply a function of autograd, without the Python of ``Function.apply`` where nothing needs it.

    It binds arguments to names, for transforms; that takes longer than a small operation.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
