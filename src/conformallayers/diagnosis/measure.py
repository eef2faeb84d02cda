"""Run the graph of a model on a batch, and measure points, coordinates and statistics layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import refusal, shape_text
from ..functional import norm, norm_unit, scale_samples
from ..graph.capture import capture
from ..graph.graph import INPUT, Graph, Node, Part
from ..graph.trace import trace_part
from ..nn.activations import RadialActivation
from ..nn.branches import Join
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


class Measurement:
    """Run a batch through the graph of a model in float64, and measure every ConformalLayers.

    Attributes:
        parts: every call of a ConformalLayers.
        modules: the layers, activations and maps inside, by path.
        rectified: whether a homogeneous map stands in a ConformalLayers, or before one.
        tensors: names of parameters and buffers with NaN or infinity; with any, nothing is measured.
        finite: whether all numbers of the output are.
    """

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.parts, self.modules = list[PartHealth](), dict[str, nn.Module]()
        self.rectified = self.finite = True
        self.tensors = list(_non_finite(model))
        if self.tensors:
            return
        graph = capture(model, tuple(x.shape[1:]), where="diagnose", keep_hooks=True)
        if not graph.parts:
            expected, remedy = "a model that runs its ConformalLayers", "Pass the ConformalLayers."
            raise refusal("diagnose(model)", expected, "none", remedy)
        last = graph.parts[-1].leave
        self.rectified = any(node.kind == "homogeneous" for node in graph.nodes[:last])
        for node in graph.nodes:
            for module in node.module.double().modules():
                if isinstance(module, BATCH_NORMS) and not _settled(module):
                    module.train(len(x) > 1)
        y = self._run(graph, x.detach().to(torch.float64, copy=True))
        tensors = [leaf for leaf in tree_leaves(y) if isinstance(leaf, Tensor)]
        self.finite = all(bool(tensor.isfinite().all()) for tensor in tensors)

    def _run(self, graph: Graph, x: Tensor) -> Any:
        values: dict[int, Any] = {INPUT: x}
        ends, number = {part.embed: part for part in graph.parts}, 0
        while number < len(graph.nodes):
            node = graph.nodes[number]
            inputs = [values[source] for source in node.sources]
            if number in ends:
                part = ends[number]
                values[part.leave] = self._run_part(graph, part, inputs[0])
                number = part.leave
            else:
                values[number] = (
                    node.module.merge(inputs)
                    if isinstance(node.module, Join)
                    else node.module(*inputs)
                )
            number += 1
        return values[graph.output]

    def _run_part(self, graph: Graph, part: Part, x: Tensor) -> Tensor:
        """Run a ConformalLayers on points x/t and their coordinates t."""
        trace, layers = trace_part(graph, part), list[LayerHealth]()
        rms = trace.unit == "rms"
        t = torch.hypot(_lengths(x, rms), x.new_tensor(trace.offset))
        values = [(scale_samples(x, torch.where(t > 0, 1 / t, 0.0)), t)]
        for node, step in zip(graph.nodes[part.embed + 1 : part.leave], trace.steps, strict=True):
            entering = [values[source + 1] for source in step.sources]
            points, t = entering[0]
            if isinstance(node.module, Join):
                values.append((node.module.merge([point for point, _ in entering]), t))
                continue
            measured = dict[str, Any]()
            if isinstance(node.module, RadialActivation):
                alpha, arriving = step.alpha or 1.0, _lengths(points, rms)
                growth = node.module.step(torch.ones_like(t), t, (arriving / alpha) ** 2)
                slope = node.module.slope / alpha
                after, t = scale_samples(points, slope / growth), t * growth / slope
                measured = {"alpha": alpha, "arriving": _median(arriving)}
                measured["added"] = _median((1 - 1 / growth)[t > 0])
            else:
                if isinstance(node.module, BATCH_NORMS):
                    measured["norm"] = _statistics(node.module, points.detach())
                after = node.module(points)
            values.append((after, t))
            layers.append(_layer(node, after.detach(), rms, measured))
            self.modules[node.path] = node.module
        y, entering_length = values[-1][0], _median(_lengths(x, rms))
        leaving = float(y.detach().square().mean().sqrt())
        path = graph.nodes[part.embed].path
        health = PartHealth(path, trace.offset, trace.unit, entering_length, leaving, tuple(layers))
        self.parts.append(health)
        return y


def _layer(node: Node, points: Tensor, rms: bool, measured: dict[str, Any]) -> LayerHealth:
    if node.kind == "homogeneous":
        peaks = points.abs().amax((0, *range(2, points.dim())))
        measured |= {"dead": int((peaks == 0).sum()), "channels": len(peaks)}
    finite, length = bool(points.isfinite().all()), _median(_lengths(points, rms))
    shape, kind = tuple(points.shape[1:]), type(node.module).__name__
    return LayerHealth(node.path, kind, shape, length, finite, **measured)


def _non_finite(model: nn.Module) -> Iterator[str]:
    """Yield the names of tensors with NaN or infinity; a buffer such as a mask may be infinite."""
    norms = {path for path, module in model.named_modules() if isinstance(module, BATCH_NORMS)}
    for name, tensor in model.named_parameters():
        if not bool(tensor.isfinite().all()):
            yield name
    for name, buffer in model.named_buffers():
        mask = name.rpartition(".")[0] not in norms
        if bool((buffer.isnan() if mask else ~buffer.isfinite()).any()):
            yield name


def _settled(module: Any) -> bool:
    """Tell whether running statistics have forgotten their initial values."""
    if module.running_var is None or module.num_batches_tracked is None:
        return module.running_var is not None
    batches = int(module.num_batches_tracked)
    if module.momentum is None:  # the plain mean of all batches
        return batches > 0
    # After n batches the initial value has the weight (1 − momentum)ⁿ in the running average.
    return batches > 0 and float((1 - module.momentum) ** batches) <= _SETTLED


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


def _lengths(points: Tensor, rms: bool) -> Tensor:
    """Return the lengths of samples, in the unit."""
    return norm(points) / norm_unit(points.shape[1:], rms)


def _median(values: Tensor) -> float:
    return float(values.median()) if values.numel() else 0.0
