"""Power iteration for alpha="spectral": the operator norm of the layers between two activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ..functional import full_precision, wide_dtype
from .activations import RadialActivation
from .registry import linear_part
from .supported import LayerSpec

Layer = tuple[nn.Module, LayerSpec, tuple[int, ...]]  # with the shape of one input sample

_WARM_UP = 8  # steps before the first use; a random vector gives far too small a norm


# torch.compiler.disable would import the compiler at once, which takes as long as the import of torch.
@_disable_dynamo
def power_step(activation: RadialActivation, segment: Sequence[Layer], x: Tensor) -> Tensor:
    """Advance the vector and the norm of the activation by one step, and return the norm.

    The norm is that of the layers of ``segment`` on samples like those of x. It is 0-dim, in the wide
    dtype, and differentiable in the weights but not in the vector.
    """
    with full_precision(x):
        dtype = next((p.dtype for m, *_ in segment for p in m.parameters()), x.dtype)
        vector = activation.vector
        layout = (1, *x.shape[1:]), dtype, x.device
        if vector is None or (vector.shape, vector.dtype, vector.device) != layout:
            vector = _random_unit(*layout)
            for _ in range(_WARM_UP):
                vector = _advance(segment, vector)[1]
        norm, activation.vector = _advance(segment, vector)
        with torch.no_grad():
            activation.norm.copy_(norm)
    # Use the rounded norm that evaluation reads back, with the gradient of the exact one.
    stored = activation.norm.detach().to(wide_dtype(x.device))
    wide = norm.to(wide_dtype(x.device))
    return stored + (wide - wide.detach())


def _advance(segment: Sequence[Layer], vector: Tensor) -> tuple[Tensor, Tensor]:
    """Return ‖U v‖ and the next unit vector UᵀU v / ‖UᵀU v‖."""
    with torch.enable_grad():
        start = vector.detach().requires_grad_()
        image = start
        for module, spec, _ in segment:
            image = linear_part(module, spec, image)
        norm = torch.linalg.vector_norm(image)
        (gradient,) = torch.autograd.grad(norm, start, retain_graph=True)  # UᵀU v / ‖U v‖
    length = torch.linalg.vector_norm(gradient)
    return norm, torch.where(length > 0, gradient / length, vector).detach()


def _random_unit(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a fixed random unit vector: reproducible, and independent of the global seed."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(shape, generator=generator, dtype=torch.float64)
    unit: Tensor = vector / torch.linalg.vector_norm(vector)
    return unit.to(device, dtype)
