"""Run a frozen copy of a model, and measure points, coordinates and statistics layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..container import ConformalLayers, layer_by_layer
from ..errors import shape_text
from ..functional import norm, norm_unit
from ..graph.freeze import device_of, frozen_wide, lost_hooks
from ..nn.activations import RadialActivation
from ..nn.branches import Composite
from ..nn.layerwise import LayerFlow, Points, embed_batch
from ..nn.registry import branches, flatten_modules, is_homogeneous
from ..nn.supported import BATCH_NORMS
from ..utils.html import Block, Printed, Table

_SETTLED = 0.05  # share of its initial value that a settled running statistic has at most


@dataclass(frozen=True)
class NormHealth:
    """The statistics of a batch norm; medians are those over its channels.

    Attributes:
        variance: the median variance; of the batch where the running ones are not settled yet.
        below_eps: the share of channels whose variance is below eps.
        mean: the median of ``|mean|/σ``.
        lag: the median of ``|running mean − mean of the batch|/σ``; None where it is not settled yet.
        eps: of the norm.
    """

    variance: float
    below_eps: float
    mean: float
    lag: float | None
    eps: float


@dataclass(frozen=True)
class LayerHealth:
    """One layer, activation or map on a batch; lengths and shares are medians over the samples.

    Attributes:
        path: of the module in the model.
        kind: its class.
        shape: of one sample behind it.
        length: of the points behind it: their norm, or their root mean square, by the unit.
        finite: whether all of their numbers are.
        alpha: of an activation, with the ``arriving`` length and the share of the new t that it has ``added``.
        dead: the number of channels behind a map that are zero in all samples, of ``channels``.
        norm: the statistics of a batch norm.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    length: float
    finite: bool
    alpha: float | None = None
    arriving: float | None = None
    added: float | None = None
    dead: int | None = None
    channels: int | None = None
    norm: NormHealth | None = None


@dataclass(frozen=True, repr=False)
class PartHealth(Printed):
    """One ConformalLayers on a batch.

    Attributes:
        path: of the ConformalLayers, empty if it is the model.
        offset, unit: of its embedding.
        entering: the median length of its inputs, in the unit.
        leaving: the root mean square of all entries of its outputs.
        layers: in the order in which they run.
    """

    path: str
    offset: float
    unit: str
    entering: float
    leaving: float
    layers: tuple[LayerHealth, ...]

    def _blocks(self) -> Iterator[Block]:
        yield (
            f"{self.path or 'model'}: unit {self.unit}, offset {self.offset:.3g}, inputs of length "
            f"{self.entering:.3g}, entries of outputs {self.leaving:.3g}"
        )
        header = ["path", "kind", "output", "length", "alpha", "arriving", "added to t", "dead"]
        header += ["variance", "|mean|/σ", "lag/σ"]
        rows = [_cells(layer) for layer in self.layers]
        kept = [i for i in range(len(header)) if i < 4 or any(row[i] for row in rows)]
        yield Table([header[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _cells(layer: LayerHealth) -> list[str]:
    norm, dead = layer.norm, layer.dead
    statistics = (None,) * 3 if norm is None else (norm.variance, norm.mean, norm.lag)
    return [
        *(layer.path, layer.kind, shape_text(layer.shape), f"{layer.length:.3g}"),
        *(_number(layer.alpha), _number(layer.arriving)),
        "" if layer.added is None else f"{100 * layer.added:.3g} %",
        "" if dead is None else f"{dead} of {layer.channels}",
        *map(_number, statistics),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


@dataclass
class Measurement:
    """The measurements of one batch.

    Attributes:
        parts: every call of a ConformalLayers.
        modules: the layers, activations and maps that ran inside, by path.
        rectified: whether a homogeneous map stands in a ConformalLayers, or before one.
        mapped: whether one has run outside of every ConformalLayers.
        gradients: of a random sum of the outputs by the name of each parameter that trains; None where it has
            no influence. Empty if the model does not return one tensor.
        hooked: paths of modules with forward hooks; these did not run.
        tensors: names of parameters and buffers with NaN or infinity.
        finite: whether all numbers of the output are.
    """

    parts: list[PartHealth] = field(default_factory=list)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    rectified: bool = False
    mapped: bool = False
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    hooked: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    finite: bool = True


def measure(model: nn.Module, x: Tensor) -> Measurement:
    """Run a batch through a frozen copy of the model, in float64 and evaluation semantics.

    A batch norm whose running statistics are not settled yet takes those of the batch, as in training.
    """
    frozen, found = _prepared(model, len(x)), Measurement()
    found.hooked = [path for path, module in model.named_modules() if lost_hooks(module)]
    found.tensors = list(_non_finite(model, frozen))
    inside: set[nn.Module] = set()
    for path, module in frozen.named_modules():
        if isinstance(module, ConformalLayers):
            vars(module)["_run_layers"] = _measured(path, module, found)  # of this copy alone
            inside |= set(module.modules())
    for module in set(frozen.modules()) - inside:
        if is_homogeneous(module):  # counts only before a ConformalLayers, not in the head
            module.register_forward_hook(lambda *_: setattr(found, "mapped", True))
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    # Freezing turns parameters into buffers of the same name.
    weights = {name: w.requires_grad_() for name, w in frozen.named_buffers() if name in names}
    x = x.detach().to(device_of([frozen]), torch.float64, copy=True)
    with torch.inference_mode(False), torch.enable_grad(), layer_by_layer():
        y = frozen(x)
    found.finite = all(bool(tensor.isfinite().all()) for tensor in _tensors(y))
    if isinstance(y, Tensor) and y.requires_grad:
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(y.shape, generator=generator, dtype=y.dtype).to(y.device)
        slopes = torch.autograd.grad(y, list(weights.values()), direction, allow_unused=True)
        found.gradients = dict(zip(weights, slopes, strict=True))
    return found


def _prepared(model: nn.Module, samples: int) -> nn.Module:
    """Return a frozen copy in float64, without hooks; norms that are not settled use their batch."""
    with torch.inference_mode(False):
        frozen = frozen_wide(model)
    for module in frozen.modules():
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
        if isinstance(module, BATCH_NORMS) and not _settled(module):
            module.train(samples > 1)
    return frozen


def _non_finite(model: nn.Module, frozen: nn.Module) -> Iterator[str]:
    """Yield the names of tensors with NaN or infinity; a buffer such as a mask may be infinite."""
    buffers = {name for name, _ in model.named_buffers()}
    for path, module in frozen.named_modules():
        for kind, tensor in module.named_buffers(recurse=False):
            name = f"{path}.{kind}" if path else kind
            mask = name in buffers and not isinstance(module, BATCH_NORMS)
            if bool((tensor.isnan() if mask else ~tensor.isfinite()).any()):
                yield name


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output: a tensor, or a mapping or sequence of outputs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _settled(module: Any) -> bool:
    """Tell whether running statistics have forgotten their initial values."""
    if module.running_var is None or module.num_batches_tracked is None:
        return module.running_var is not None
    batches = int(module.num_batches_tracked)
    if module.momentum is None:  # the plain mean of all batches
        return batches > 0
    # After n batches the initial value has the weight (1 − momentum)ⁿ in the running average.
    return batches > 0 and float((1 - module.momentum) ** batches) <= _SETTLED


def _measured(path: str, part: ConformalLayers, found: Measurement) -> Callable[[Tensor], Tensor]:
    """Return a function that takes the place of ``_run_layers`` and measures every layer."""

    def run(x: Tensor) -> Tensor:
        offset, unit = part.embedding
        pairs = list(flatten_modules(part, path))
        flow = _Measuring(unit == "rms")
        y = flow.run_chain(pairs, embed_batch(x, offset, flow.rms)).dehomogenize()
        found.modules.update(flow.modules)
        found.rectified |= found.mapped or any(map(is_homogeneous, flow.modules.values()))
        with torch.no_grad():
            length, leaving = _length(x, flow.rms), float(y.square().mean().sqrt())
        found.parts.append(PartHealth(path, offset, unit, length, leaving, tuple(flow.layers)))
        return y

    return run


class _Measuring(LayerFlow):
    """Run layers as training does, and record each of them."""

    def __init__(self, rms: bool) -> None:
        super().__init__(advance=False, rms=rms)
        self.layers: list[LayerHealth] = []
        self.modules: dict[str, nn.Module] = {}

    def step(self, path: str, module: nn.Module, value: Points, with_bias: bool = True) -> Points:
        if isinstance(module, Composite) and branches(module):
            return super().step(path, module, value, with_bias)  # records the modules inside
        with torch.no_grad():
            measured = dict(self._before(module, value))
            t = value.m * value.tau
        after = super().step(path, module, value, with_bias)
        with torch.no_grad():
            points = after.dehomogenize()
            if isinstance(module, RadialActivation):
                alive = t > 0
                growth = (after.m * after.tau)[alive] / t[alive]  # t has changed by growth·α/slope
                measured["added"] = _median(1 - 1 / growth)
            if is_homogeneous(module):
                peaks = points.abs().amax((0, *range(2, points.dim())))
                measured |= {"dead": int((peaks == 0).sum()), "channels": len(peaks)}
            finite, length = bool(points.isfinite().all()), _length(points, self.rms)
        shape, kind = tuple(points.shape[1:]), type(module).__name__
        self.layers.append(LayerHealth(path, kind, shape, length, finite, **measured))
        self.modules[path] = module
        return after

    def _before(self, module: nn.Module, value: Points) -> Iterator[tuple[str, Any]]:
        """Measure the points that enter a module; yield fields of LayerHealth."""
        if isinstance(module, RadialActivation):
            unit = norm_unit(value.z.shape[1:], self.rms)
            yield "alpha", float(value.segment.alpha(module, False, unit))
            yield "arriving", _length(value.dehomogenize(), self.rms)
        elif isinstance(module, BATCH_NORMS):
            yield "norm", _statistics(module, value.dehomogenize())


def _statistics(module: Any, points: Tensor) -> NormHealth:
    """Return the statistics that a batch norm uses, and their distance from those of the batch."""
    axes = (0, *range(2, points.dim()))
    variance, mean = torch.var_mean(points, axes, correction=0)
    lag, batch = None, mean
    if not module.training and module.running_var is not None:
        variance, mean = module.running_var, module.running_mean
    sigma = variance.sqrt().clamp_min(torch.finfo(variance.dtype).tiny)
    if _settled(module):
        lag = _median((mean - batch).abs() / sigma)
    below = float((variance < module.eps).double().mean())
    return NormHealth(_median(variance), below, _median(mean.abs() / sigma), lag, module.eps)


def _length(points: Tensor, rms: bool) -> float:
    """Return the median length of samples, in the unit."""
    return _median(norm(points)) / norm_unit(points.shape[1:], rms)


def _median(values: Tensor) -> float:
    return float(values.median()) if values.numel() else 0.0
