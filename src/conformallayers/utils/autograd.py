"""Apply custom autograd functions with less overhead."""

from __future__ import annotations

from typing import Any

import torch


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply a custom autograd function, without the overhead of ``Function.apply`` outside transforms.

    ``Function.apply`` binds the arguments to names, which takes longer than a small operation.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
