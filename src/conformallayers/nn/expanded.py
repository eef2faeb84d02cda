"""Expanded layers: convolutions and linear layers whose weight is a sum of several terms while they train.

An expanded layer is the plain layer with a computed ``weight``. A batch passes one convolution, whatever the weight
is made of, so stride, padding, dilation and groups keep their meaning, and the deployed layer is the plain one.
Terms begin at zero: training starts from the weight of the plain layer, trained or not.
Terms have the shape (groups, outputs, inputs, *kernel), with channels counted in one group; that of a linear layer
has one tap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from ..functional import full_precision, may_look
from . import layers

Shape = tuple[int, ...]
KINDS = ("chain", "branches", "chain+branches")
_CONVOLVE: tuple[Any, ...] = F.conv1d, F.conv2d, F.conv3d
_LONGEST = 3  # kernels of a chain


class Chain(nn.Module):
    """Convolutions in a row whose kernels compose to one, wider inside.

    Kernels of 3 taps or fewer stand between two pointwise layers; longer ones are split into kernels of 3 taps.
    """

    def __init__(self, shape: Shape, width: float, **factory: Any) -> None:
        super().__init__()
        self.groups, outputs, inputs = shape[:3]
        sizes = _chain_sizes(shape[3:])
        wide = max(1, round(width * inputs)), max(1, round(width * outputs))
        channels = [inputs, *[wide[1]] * (len(sizes) - 1), outputs]
        if len(sizes) > 2 and math.prod(sizes[0]) == 1:
            channels[1] = wide[0]
        self.kernels = nn.ParameterList(
            torch.empty(self.groups * channels[i + 1], channels[i], *size, **factory)
            for i, size in enumerate(sizes)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw kernels that keep the mean square, pointwise ones orthogonal; the last one is zero."""
        *drawn, last = self.kernels
        nn.init.zeros_(last)
        for kernel in drawn:
            outputs, inputs = kernel.shape[0] // self.groups, kernel.shape[1]
            if math.prod(kernel.shape[2:]) > 1:
                nn.init.normal_(kernel, std=kernel[0].numel() ** -0.5)
                continue
            for matrix in kernel.data.view(self.groups, outputs, inputs):
                gain = max(1.0, outputs / inputs) ** 0.5
                matrix.copy_(nn.init.orthogonal_(matrix.float(), gain))  # half precision has no QR

    def forward(self) -> Tensor:
        """Compose the kernels."""
        first, *others = self.kernels
        # A kernel is convolved as an image, with its input channels as the batch. torch correlates, hence the flip.
        whole: Tensor = first.movedim(1, 0)
        for kernel in others:
            if whole[0, 0].numel() == 1:  # one pixel: a product of matrices for each tap
                taps = kernel.unflatten(0, (self.groups, -1))
                pixel = whole.reshape(len(whole), self.groups, -1)
                whole = torch.einsum("gow...,igw->igo...", taps, pixel).flatten(1, 2)
                continue
            reach = [size - 1 for size in kernel.shape[2:]]
            convolve, axes = _CONVOLVE[kernel.dim() - 3], list(range(2, kernel.dim()))
            whole = convolve(whole, kernel.flip(axes), padding=reach, groups=self.groups)
        grouped: Tensor = whole.movedim(0, 1).unflatten(0, (self.groups, -1))
        return grouped


class Branches(nn.Module):
    """A pointwise layer and, between as many channels, the identity, each with a scale for every output."""

    def __init__(self, shape: Shape, **factory: Any) -> None:
        super().__init__()
        groups, outputs, inputs, *self.kernel = shape
        self.pointwise = nn.Parameter(torch.empty(groups, outputs, inputs, **factory))
        self.scale = nn.Parameter(torch.empty(groups, outputs, 1, **factory))
        self.register_parameter("identity", None)
        if inputs == outputs:
            self.identity = nn.Parameter(torch.empty(groups, outputs, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the pointwise layer; all scales are zero."""
        nn.init.normal_(self.pointwise, std=self.pointwise.shape[2] ** -0.5)
        nn.init.zeros_(self.scale)
        if self.identity is not None:
            nn.init.zeros_(self.identity)

    def forward(self) -> Tensor:
        """Put the branches into the middle of a kernel of zeros."""
        matrix = self.scale * self.pointwise
        if self.identity is not None:
            matrix = matrix + torch.diag_embed(self.identity)
        margins = [n for size in reversed(self.kernel) for n in (size // 2, (size - 1) // 2)]
        return F.pad(matrix.view(*matrix.shape, *[1] * len(self.kernel)), margins)


_OWN = Chain, Branches


class Expanded(nn.Module):
    """The part that expanded layers share: a weight that is the sum of a kernel and of terms.

    ``kernel`` has the shape of the weight. The modules of ``terms`` return tensors to add to it: a user's own in
    the shape of the weight, :class:`Chain` and :class:`Branches` by groups.
    """

    kernel: nn.Parameter
    terms: nn.ModuleList
    plain_type: type[nn.Module]
    bias: nn.Parameter | None
    _composed: tuple[list[Tensor], Tensor] | None = None  # in evaluation: copies, the weight

    @property
    def weight(self) -> Tensor:
        """The sum, with gradients to its parts; in evaluation without gradients it is composed once."""
        known = all(isinstance(term, _OWN) for term in self.terms)  # others may depend on anything
        if self.training or torch.is_grad_enabled() or not known or not may_look(self.kernel.data):
            return self.compose()
        parts, kept = [self.kernel, *self.terms.parameters(), *self.terms.buffers()], self._composed
        if kept is None or not _equal([kept[1], *parts], kept[0]):
            weight = self.compose()
            self._composed = kept = [part.clone() for part in (weight, *parts)], weight
        return kept[1]

    def compose(self) -> Tensor:
        """Return kernel plus terms, in the dtype of the kernel, autocast or not."""
        with full_precision(self.kernel):
            total: Tensor = self.kernel
            for term in self.terms:
                made = term()
                total = total + (self._from_groups(made) if isinstance(term, _OWN) else made)
        return total

    def reset_parameters(self) -> None:
        """Draw the parameters of the plain layer as it does, and those of the terms."""
        for part in (*self.terms, self._modules.get("norm")):
            if hasattr(part, "reset_parameters"):
                cast(Any, part).reset_parameters()
        layer: Any = self.plain()
        layer.bias = self.bias
        layer.reset_parameters()
        self.set_weight(layer.weight)

    def set_weight(self, weight: Tensor) -> None:
        """Change the kernel so that the sum is the given weight."""
        with torch.no_grad():
            self.kernel.add_(weight - self.compose())

    def plain(self) -> nn.Module:
        """Return the layer as it was before the expansion, with the composed weight."""
        layer = self.plain_type.__new__(self.plain_type)
        kept = {k: v for k, v in vars(self).items() if k not in ("plain_type", "_composed")}
        layer.__dict__.update(kept)
        weight = nn.Parameter(self.compose().detach().clone(), self.kernel.requires_grad)
        bias, norm = self._parameters.get("bias"), cast(Any, self._modules.get("norm"))
        if norm is not None:
            statistics = norm.running_mean, norm.running_var, norm.eps
            weight, bias = fuse_conv_bn_weights(weight, bias, *statistics, norm.weight, norm.bias)
        layer._parameters = {"weight": weight, "bias": bias}
        layer._modules = {}
        return layer

    def _from_groups(self, term: Tensor) -> Tensor:
        """Bring (groups, outputs, inputs, *kernel) into the shape of the weight."""
        if issubclass(self.plain_type, nn.modules.conv._ConvTransposeNd):
            term = term.transpose(1, 2)
        return term.reshape(self.kernel.shape)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_composed"}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"  # without its terms: one line

    def extra_repr(self) -> str:
        """Return the options of the plain layer and the number of parameters while training."""
        return f"{super().extra_repr()}, {self.counted_weights} weights in training"

    @property
    def counted_weights(self) -> int:
        """The number of parameters of the layer, without its bias."""
        return sum(p.numel() for name, p in self.named_parameters() if name != "bias")


class _Normalized(Expanded):
    """An expanded convolution with a BatchNorm behind it, which :meth:`plain` merges."""

    norm: nn.Module

    def _conv_forward(self, *inputs: Any) -> Any:
        return self.norm(super()._conv_forward(*inputs))  # type: ignore[misc]


def _made_class(prefix: str, kind: type[nn.Module], base: type[Expanded]) -> type[Expanded]:
    """Return the expanded layer of a kind, under its name in this module, where pickle looks for it."""
    name = f"{prefix}{kind.__name__}"
    text = f"An expanded :class:`torch.nn.{kind.__name__}`."
    globals()[name] = type(name, (base, kind), {"__module__": __name__, "__doc__": text})
    return cast(type[Expanded], globals()[name])


_PLAIN: tuple[type[nn.Module], ...] = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_EXPANDED = {kind: _made_class("Expanded", kind, Expanded) for kind in _PLAIN}
_NORMS = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}
_NORMALIZED = {kind: _made_class("Normalized", kind, _Normalized) for kind in _NORMS}
# A plain layer, or that of the package with the same forward.
_EXPANDED |= {getattr(layers, kind.__name__): found for kind, found in _EXPANDED.items()}
EXPANDABLE = tuple(_EXPANDED)


def expanded(
    layer: Any,
    make_terms: Callable[[Shape], list[nn.Module]],
    tied: Expanded | None = None,
    normalized: bool = False,
) -> Expanded:
    """Return an expanded layer with the same weight and bias, and a BatchNorm if asked for and if it can be merged.

    ``make_terms`` takes the shape (groups, outputs, inputs, *kernel) of the weight. A layer that shares its weight
    with an expanded one shares the parts of that.
    """
    normalized = normalized and layer.bias is not None and type(layer) in _NORMALIZED
    kind = (_NORMALIZED if normalized else _EXPANDED)[type(layer)]
    copy = kind.__new__(kind)
    copy.__dict__.update(vars(layer))
    copy.plain_type, copy._modules = type(layer), {}
    if tied is not None:
        copy._parameters = {"kernel": tied.kernel, "bias": layer.bias}
        copy.terms = tied.terms
        return copy
    weight = layer.weight.detach()
    copy._parameters = {"kernel": nn.Parameter(weight.clone()), "bias": layer.bias}
    copy.terms = nn.ModuleList(make_terms(grouped_shape(copy)))
    copy.set_weight(weight)
    if normalized:
        norm: Any = _NORMS[type(layer)](layer.out_channels).to(weight).train(layer.training)
        norm.running_var -= norm.eps  # the identity at first
        copy.norm = norm
    return copy


def terms_of(kind: str, width: float, like: Tensor) -> Callable[[Shape], list[nn.Module]]:
    """Return a function from the shape of a weight to the terms of a kind of expansion."""
    factory = {"device": like.device, "dtype": like.dtype}

    def make(shape: Shape) -> list[nn.Module]:
        terms: list[nn.Module] = []
        if "chain" in kind:
            terms.append(Chain(shape, width, **factory))
        if "branches" in kind:
            terms.append(Branches(shape, **factory))
        return terms

    return make


def grouped_shape(layer: Any) -> Shape:
    """Return (groups, outputs, inputs, *kernel) of a layer."""
    if isinstance(layer, nn.Linear):
        return 1, layer.out_features, layer.in_features, 1
    groups = layer.groups
    return groups, layer.out_channels // groups, layer.in_channels // groups, *layer.kernel_size


def _chain_sizes(kernel: Shape) -> list[Shape]:
    """Return the kernel sizes of a chain: 1, k, 1 up to three taps, 3, 3, … beyond."""
    count = min(_LONGEST, max((size // 2 for size in kernel), default=0))
    if count < 2:
        ones = (1,) * len(kernel)
        return [ones, ones] if count == 0 else [ones, kernel, ones]
    rest = [size - 1 for size in kernel]
    sizes = []
    for left in range(count, 0, -1):
        taps = [-(-n // left) for n in rest]
        rest = [n - tap for n, tap in zip(rest, taps, strict=True)]
        sizes.append(tuple(tap + 1 for tap in taps))
    return sizes


def _equal(parts: list[Tensor], copies: list[Tensor]) -> bool:
    return len(parts) == len(copies) and all(
        part.device == copy.device and part.dtype == copy.dtype and torch.equal(part, copy)
        for part, copy in zip(parts, copies, strict=True)
    )
