"""Linear operators made from frozen modules, their adjoints, and chains of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.graph import device_of
from ..nn.bounds import Shape, channel_factor, per_axis
from ..nn.layers import ChannelScale
from ..nn.registry import computes_like, find_spec, is_affine


@dataclass(frozen=True, eq=False)
class Operator:
    """One linear map U between samples of fixed shapes, made from a frozen module."""

    module: nn.Module  # without a bias
    input_shape: Shape  # of one sample
    output_shape: Shape
    bias: Tensor | None = None  # float64 (*output_shape), added to U x at t = 1

    def apply(self, x: Tensor) -> Tensor:
        """Return U x for a batch of samples, (B, *input_shape) → (B, *output_shape)."""
        result: Tensor = self.module(x)
        return result

    @cached_property
    def norm(self) -> float:
        """A proven upper bound of the operator norm.

        A convolution that pads with zeros is a part of one on the infinite plane, whose norm is the
        largest norm of its transfer matrix over all frequencies. A trigonometric polynomial of degree
        d exceeds its largest value on N equal steps by at most 1/cos(πd/N).
        """
        module: Any = self.module
        bound = self.simple_bound
        convolves = is_plain(module, CONVOLUTIONS)
        if not convolves or module.padding_mode != "zeros" or module.groups != 1:
            return bound
        weight = module.weight.detach().double()
        sizes = [1 if n == 1 else 8 * n for n in weight.shape[2:]]
        transfer = torch.fft.rfftn(weight, s=sizes, dim=tuple(range(2, weight.dim())))
        # (frequencies, C_out, C_in), in this order in memory: products of strided matrices take ten times as long
        transfer = transfer.flatten(2).permute(2, 0, 1).contiguous()
        rows, columns = weight.shape[:2]
        gram = transfer.mH @ transfer if rows >= columns else transfer @ transfer.mH
        power = 1
        scale = torch.ones(len(gram), dtype=torch.float64, device=weight.device)
        # ‖G‖ ≤ tr(G^p)^(1/p), closer with every squaring. Dividing by the trace keeps the powers of G in
        # range; ``scale`` collects the roots of the traces.
        for _ in range(5):
            trace = gram.diagonal(dim1=1, dim2=2).real.sum(1).clamp_min(1e-300)
            gram = gram / trace[:, None, None]
            scale = scale * trace ** (1 / power)
            gram, power = gram @ gram, 2 * power
        trace = gram.diagonal(dim1=1, dim2=2).real.sum(1)
        largest = float((scale * trace ** (1 / power)).max()) ** 0.5
        # Centred, a kernel of k taps is a trigonometric polynomial of degree (k − 1)/2 along its axis.
        for size, kernel in zip(sizes, weight.shape[2:], strict=True):
            largest /= math.cos(math.pi * (kernel - 1) / 2 / size)
        return float(min(bound, largest * (1 + 1e-9)))

    @cached_property
    def simple_bound(self) -> float:
        """An upper bound of the operator norm that takes no time: Young's inequality."""
        kind = find_spec(self.module)
        return math.inf if kind is None else float(kind.bound(self.module, self.input_shape))

    @property
    def multiple(self) -> bool:
        """Whether it multiplies the whole sample by one number."""
        kind = find_spec(self.module)
        return kind is not None and kind.multiple

    @property
    def has_tensors(self) -> bool:
        """Whether the module holds weights or other tensors."""
        return next(self.module.buffers(), None) is not None

    def multiply_adds(self) -> int:
        """Count the multiply-adds of one sample, from the sizes of the weight and the output."""
        weight = getattr(self.module, "weight", None)
        outputs = math.prod(self.output_shape)
        if not isinstance(weight, Tensor):
            axes = max(1, len(self.output_shape) - 1)
            size = math.prod(per_axis(getattr(self.module, "kernel_size", 1), axes))
            return outputs * size if size > 1 else 0
        if "Transpose" in type(self.module).__name__:
            return math.prod(self.input_shape) * weight[0].numel()
        return outputs * weight[0].numel()


def operator_of(module: nn.Module, input_shape: Shape, output_shape: Shape) -> Operator:
    """Split a frozen affine module in float64 into a linear operator and its bias."""
    bias = None
    if is_affine(module):
        zero = torch.zeros(1, *input_shape, dtype=torch.float64, device=device_of([module]))
        with torch.no_grad():
            bias = module(zero)[0]
        module = _without_bias(copy.deepcopy(module))
    return Operator(module, input_shape, output_shape, bias)


def _without_bias(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return ChannelScale(channel_factor(module))
    for name, child in list(module.named_children()):
        setattr(module, name, _without_bias(child))
    if module._buffers.get("bias") is not None:
        module._buffers["bias"] = None
    return module


def apply_all(operators: Iterable[Operator], x: Tensor) -> Tensor:
    """Apply operators one after the other."""
    for operator in operators:
        x = operator.apply(x)
    return x


def push_constant(operators: Iterable[Operator], constant: Tensor | None = None) -> Tensor | None:
    """Return the image of a constant sample under operators and their biases; None stands for zeros."""
    with torch.no_grad():
        for operator in operators:
            if constant is not None:
                constant = operator.apply(constant.unsqueeze(0))[0]
            if operator.bias is not None:
                constant = operator.bias if constant is None else constant + operator.bias
    return constant


def adjoint(operators: Sequence[Operator], g: Tensor) -> Tensor:
    """Return Uᵀ g of the chain: (B, *output_shape) → (B, *input_shape)."""
    if not operators:
        return g
    with torch.enable_grad():  # linear: the gradient is the same at every point
        shape = (g.shape[0], *operators[0].input_shape)
        x = torch.zeros(shape, dtype=g.dtype, device=g.device, requires_grad=True)
        (result,) = torch.autograd.grad(apply_all(operators, x), x, g)
    return result


CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d
POOLINGS = nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d


def is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Tell whether a module is one of torch's kinds and computes what that kind computes."""
    return any(isinstance(module, kind) and computes_like(type(module), kind) for kind in kinds)


def impulses(shape: Shape, chunk: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the identity in float64 as batches of at most ``chunk`` samples of the given shape."""
    size = math.prod(shape)
    for start in range(0, size, chunk):
        rows = min(chunk, size - start)
        identity = torch.zeros(rows, size, dtype=torch.float64, device=device)
        identity.diagonal(start).fill_(1)
        yield identity.view(-1, *shape)
