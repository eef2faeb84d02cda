"""Check the health of a model on a batch: measure every layer, and warn of unusual values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .errors import ignored_warnings, refusal, shape_text
from .functional import norm, norm_unit, scale_samples
from .graph.capture import capture_parts
from .graph.graph import INPUT, Graph
from .graph.trace import trace_part
from .nn.activations import RadialActivation
from .nn.branches import Join
from .nn.registry import BATCH_NORMS
from .utils.text import Block, Printed, Table

_LISTED = 3  # names in a warning that are written out

_ADDED = 1e-3, 0.999  # share of t that a useful activation adds
_LENGTHS = 1e-4, 1e4  # of points, in the unit
_ENTRIES = 1e-3  # root mean square of the outputs of a ConformalLayers
_OFFSETS = 1e-2, 1e2  # of an offset, relative to the length of inputs
_MOST = 0.5  # share of channels of a norm that are "most"
_DEAD_MAPS, _DEAD_UNITS = 0.25, 0.75  # shares of channels; of single numbers many are 0 by chance
_SETTLED = 0.05  # share of its initial value that a settled running statistic has at most


@dataclass(frozen=True)
class LayerHealth:
    """One layer, activation or map on a batch; numbers are medians over its samples or channels.

    Attributes:
        path: of the module in the model.
        module: a frozen copy of it, in float64.
        shape: of one sample after it.
        length: of the points after it: their norm, or their root mean square, by the unit.
        finite: whether all of their numbers are.
        alpha: of an activation, with the ``arriving`` length and the share of the new t that it has ``added``.
        dead: the number of channels after a map that are zero in all samples, of ``channels``.
        variance: of a batch norm, and the share of its channels that are ``below_eps``: its running
            variances, or those of the batch where they are not settled yet.
    """

    path: str
    module: nn.Module
    shape: tuple[int, ...]
    length: float
    finite: bool
    alpha: float | None = None
    arriving: float | None = None
    added: float | None = None
    dead: int | None = None
    channels: int | None = None
    variance: float | None = None
    below_eps: float | None = None

    @property
    def kind(self) -> str:
        """The class of the module."""
        return type(self.module).__name__


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
            f"{self.path or 'model'}: unit {self.unit}, offset {self.offset:.3g}, input length "
            f"{self.entering:.3g}, output entries {self.leaving:.3g}"
        )
        header = ["path", "kind", "output", "length"]
        header += ["alpha", "arriving", "added to t", "dead", "variance"]
        rows = [_cells(layer) for layer in self.layers]
        kept = [i for i in range(len(header)) if i < 4 or any(row[i] for row in rows)]
        yield Table([header[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _cells(layer: LayerHealth) -> list[str]:
    dead, added = layer.dead, layer.added
    return [
        *(layer.path, layer.kind, shape_text(layer.shape), f"{layer.length:.3g}"),
        *(_number(layer.alpha), _number(layer.arriving)),
        "" if added is None else f"{100 * added:.3g} %",
        "" if dead is None else f"{dead} of {layer.channels}",
        _number(layer.variance),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


@dataclass(frozen=True, repr=False)
class HealthWarning(Printed):
    """One problem, with its measured value, its consequence and a remedy.

    Attributes:
        kind: a word or two, equal for warnings of the same kind.
        paths: of the modules; modules of one part with warnings of one kind and remedy share one.
        seen: the measured value, of the first module.
        why: the consequence.
        remedy: the suggested change.
    """

    kind: str
    paths: tuple[str, ...]
    seen: str
    why: str
    remedy: str

    @property
    def path(self) -> str:
        """The paths as text; of more than three, the first three and the number of the others."""
        shown = ", ".join(path or "model" for path in self.paths[:_LISTED])
        more = len(self.paths) - _LISTED
        return f"{shown} and {more} more" if more > 0 else shown

    def _blocks(self) -> Iterator[Block]:
        yield f"{self.path}: {self.seen}; {self.why}. {self.remedy}"


@dataclass(frozen=True, repr=False)
class Diagnosis(Printed):
    """The result of :func:`conformallayers.diagnose`; prints as tables and one line for each warning.

    Attributes:
        samples: the size of the batch.
        parts: every ConformalLayers, in the order in which they run.
        warnings: empty for a healthy model.
    """

    samples: int
    parts: tuple[PartHealth, ...]
    warnings: tuple[HealthWarning, ...]

    def _blocks(self) -> Iterator[Block]:
        for part in self.parts:
            yield from (*part._blocks(), "")
        found, samples = len(self.warnings), f"{self.samples} samples"
        yield f"{found or 'no'} warning{'s' * (found != 1)} on {samples}"
        for warning in self.warnings:
            yield from warning._blocks()


def diagnose(model: nn.Module, x: Tensor) -> Diagnosis:
    """Check the health of a model on a batch; the model is not changed.

    A frozen copy runs the batch in float64 and evaluation semantics, whatever the mode of the model. A batch norm
    that has seen few batches uses the statistics of this one. Hooks do not run.
    Warnings are about: NaN and infinity, points that vanish or explode, α far from the length of its input
    points, variances below eps, channels that are dead after a rectifier, an
    offset that does not fit the inputs, and networks without any homogeneous map.

    Args:
        model: a :class:`ConformalLayers`, or a module with some inside that torch.fx can trace.
        x: (B, ...), a batch as in training; 16 to 256 samples are enough.

    Returns:
        A :class:`Diagnosis`; prints as tables and one line for each warning.

    Examples:
        >>> import conformallayers as cl
        >>> layers = cl.AvgPool2d(2), cl.ReSPro(100.0, projective=True), nn.LPPool2d(2, 2)
        >>> model = cl.ConformalLayers(*layers, offset=1.0, unit="rms")
        >>> print(cl.diagnose(model, torch.ones(2, 1, 8, 8)))
        model: unit rms, offset 1, input length 1, output entries 0.0283
        path  kind       output     length  alpha  arriving  added to t    dead
        ----  ---------  ---------  ------  -----  --------  ----------  ------
        0     AvgPool2d  (1, 4, 4)   0.707
        1     ReSPro     (1, 4, 4)  0.0141    100     0.707     0.005 %
        2     LPPool2d   (1, 2, 2)  0.0283                               0 of 1
        <BLANKLINE>
        1 warning on 2 samples
        1: adds 0.005 % of t: alpha 100, points of length 0.707; it only multiplies all points by one factor. Set alpha to about 0.71, the root mean square of its input: docs/training.md.
    """
    _check(x)
    with torch.no_grad(), torch.random.fork_rng(), ignored_warnings():
        shape = tuple(x.shape[1:])
        graph = capture_parts(model, shape, where="diagnose", keep_hooks=True)
        broken = tuple(_non_finite(model))
        if broken:  # nothing that depends on them can be measured
            paths = tuple(dict.fromkeys(name.rpartition(".")[0] for name in broken))
            seen = f"NaN or infinity in {', '.join(broken[:_LISTED])}"
            why = "every output that depends on it is NaN or infinite, and so are gradients"
            remedy = "Resume an earlier checkpoint, and lower the learning rate."
            warning = HealthWarning("non-finite", paths, seen, why, remedy)
            return Diagnosis(len(x), (), (warning,))
        parts, y = _measured(graph, x)
    return Diagnosis(len(x), parts, tuple(_warnings(graph, parts, y)))


def _check(x: object) -> None:
    """Refuse a batch that cannot be measured."""
    expected = "a floating-point batch of at least one sample"
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2 or 0 in x.shape:
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        remedy = "The order is diagnose(model, x), and x has a batch axis."
        raise refusal("diagnose(x)", expected, got, remedy)
    if not bool(x.isfinite().all()) or not bool(x.any()):
        expected, got = "finite samples that are not all zero", "NaN, infinity or zeros alone"
        raise refusal("diagnose(x)", expected, got, "Pass samples of the data.")


# -- measurements ------------------------------------------------------------------------------------


def _measured(graph: Graph, x: Tensor) -> tuple[tuple[PartHealth, ...], Any]:
    """Run a batch through a graph in float64; return every call of a ConformalLayers, and the output.

    Inside of one a value is a pair of points x/t and their coordinates t, elsewhere t is None.
    """
    traces = {part.embed: trace_part(graph, part) for part in graph.parts}
    values: dict[int, tuple[Any, Any]] = {INPUT: (x.detach().to(torch.float64, copy=True), None)}
    parts, layers = list[PartHealth](), list[LayerHealth]()
    for number, node in enumerate(graph.nodes):
        inputs, (p, t) = [values[source][0] for source in node.sources], values[node.sources[0]]
        module: Any = node.module.double()
        if node.kind == "embed":
            start, trace, layers = number, traces[number], []
            rms, entering = trace.unit == "rms", _lengths(p, trace.unit == "rms")
            t = torch.hypot(entering, p.new_tensor(trace.offset))
            values[number] = scale_samples(p, torch.where(t > 0, 1 / t, 0.0)), t
        elif node.kind == "leave":
            leaving, about = float(p.square().mean().sqrt()), (trace.offset, trace.unit)
            lengths = _median(entering), leaving
            parts.append(PartHealth(graph.nodes[start].path, *about, *lengths, tuple(layers)))
            values[number] = p, None
        elif t is None or isinstance(module, Join):
            joined = isinstance(module, Join)
            values[number] = module.merge(inputs) if joined else module(*inputs), t
        else:
            alpha = trace.steps[number - start - 1].alpha
            after, t, measured = _passed(module, p, t, alpha, rms)
            values[number] = after, t
            if node.kind == "homogeneous":
                peaks = after.abs().amax((0, *range(2, after.dim())))
                measured |= {"dead": int((peaks == 0).sum()), "channels": len(peaks)}
            health = (
                tuple(after.shape[1:]),
                _median(_lengths(after, rms)),
                bool(after.isfinite().all()),
            )
            layers.append(LayerHealth(node.path, node.module, *health, **measured))
    return tuple(parts), values[graph.output][0]


def _passed(
    module: Any, p: Tensor, t: Tensor, alpha: float | None, rms: bool
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return points and coordinates after a module, and the measurements at it."""
    if isinstance(module, RadialActivation):
        alpha, arriving = alpha or 1.0, _lengths(p, rms)
        factor, after = module.activate((arriving / alpha) ** 2, t, alpha)
        added = (1 - factor * alpha / module.slope)[t > 0]  # 1 − 1/growth
        measured = {"alpha": alpha, "arriving": _median(arriving), "added": _median(added)}
        return scale_samples(p, factor), after, measured
    if not isinstance(module, BATCH_NORMS):
        return module(p), t, {}
    module.train(not _settled(module) and len(p) > 1)
    axes = 0, *range(2, p.dim())
    running: Any = module.running_var
    variance: Tensor = p.var(axes, correction=0) if module.training else running
    below = float((variance < module.eps).double().mean())
    return module(p), t, {"variance": _median(variance), "below_eps": below}


def _non_finite(model: nn.Module) -> Iterator[str]:
    """Yield the names of tensors with NaN or infinity; a buffer such as a mask may be infinite."""
    norms = {path for path, module in model.named_modules() if isinstance(module, BATCH_NORMS)}
    parameters = dict(model.named_parameters())
    for name, tensor in model.state_dict().items():
        mask = name not in parameters and name.rpartition(".")[0] not in norms
        if bool((tensor.isnan() if mask else ~tensor.isfinite()).any()):
            yield name


def _settled(module: Any) -> bool:
    """Check whether running statistics have forgotten their initial values."""
    if module.running_var is None or module.num_batches_tracked is None:
        return module.running_var is not None
    batches = int(module.num_batches_tracked)
    if module.momentum is None:  # the plain mean of all batches
        return batches > 0
    # After n batches the initial value has the weight (1 − momentum)ⁿ in the running average.
    return batches > 0 and float((1 - module.momentum) ** batches) <= _SETTLED


def _lengths(points: Tensor, rms: bool) -> Tensor:
    """Return the lengths of samples, in the unit."""
    return norm(points) / norm_unit(points.shape[1:], rms)


def _median(values: Tensor) -> float:
    return float(values.median()) if values.numel() else 0.0


# -- warnings ----------------------------------------------------------------------------------------


def _warnings(graph: Graph, parts: tuple[PartHealth, ...], y: Any) -> list[HealthWarning]:
    """Return all warnings; those of one part that differ in numbers alone are one."""
    warnings = [warning for part in parts for warning in _merged(_of_part(part))]
    if not any(node.kind == "homogeneous" for node in graph.nodes[: graph.parts[-1].leave]):
        why = "the direction of its output is odd in x, so average pooling cancels it"
        remedy = "Rectify between the layers, with nn.LPPool2d(2, k) instead of average pooling: docs/conformal-layers.md."
        paths = tuple(part.path for part in parts)
        warnings.append(HealthWarning("no map", paths, "no homogeneous map", why, remedy))
    outputs = [leaf for leaf in tree_leaves(y) if isinstance(leaf, Tensor)]
    finite = all(bool(output.isfinite().all()) for output in outputs)
    if not finite and "non-finite" not in {warning.kind for warning in warnings}:
        seen = "NaN or infinity in the output"
        why = "the loss is NaN, and so are all gradients"
        remedy = "Check the layers outside of ConformalLayers: all weights and all points inside are finite."
        warnings.append(HealthWarning("non-finite", ("",), seen, why, remedy))
    return warnings


def _merged(warnings: Iterable[HealthWarning]) -> Iterator[HealthWarning]:
    """Merge warnings of one kind and consequence: all paths, with the numbers of the first."""
    alike: dict[tuple[str, str], list[HealthWarning]] = {}
    for warning in warnings:
        alike.setdefault((warning.kind, warning.why), []).append(warning)
    for first, *others in alike.values():
        paths = tuple(path for warning in (first, *others) for path in warning.paths)
        yield replace(first, paths=paths)


def _of_part(part: PartHealth) -> Iterator[HealthWarning]:
    yield from _of_embedding(part)
    for layer in part.layers:
        if not layer.finite:
            seen = f"NaN or infinity after this {layer.kind}"
            why = "all later values are NaN, and so are all gradients"
            remedy = "Its weights are finite: scale its inputs or its weights down."
            yield HealthWarning("non-finite", (layer.path,), seen, why, remedy)
            return  # all later numbers mean nothing
        if isinstance(layer.module, RadialActivation):
            yield from _of_activation(layer, layer.module, part.unit)
        yield from _of_norm(layer)
        yield from _of_map(layer)
    yield from _of_lengths(part)


def _of_lengths(part: PartHealth) -> Iterator[HealthWarning]:
    """Check the order of magnitude of points, and of the outputs of the part."""
    for layer in part.layers:
        if _LENGTHS[0] <= layer.length <= _LENGTHS[1]:
            continue
        seen = f"points of length {layer.length:.2g} after this {layer.kind}"
        why = "gradients are of another order of magnitude than the weights"
        kind, remedy = "exploding", "Scale its weights down, or put a BatchNorm after it."
        if layer.length < _LENGTHS[0]:
            kind = "vanishing"
            remedy = 'Use alpha="spectral", unit="rms" or a cl.Scale before it: docs/training.md.'
        yield HealthWarning(kind, (layer.path,), seen, why, remedy)
        return
    if part.leaving < _ENTRIES:
        seen = f"output entries of {part.leaving:.2g}"
        why = "the head learns slowly from such small features"
        remedy = 'End it with cl.Scale(100.0), or use unit="rms": docs/training.md.'
        yield HealthWarning("small features", (part.path,), seen, why, remedy)


def _of_activation(
    layer: LayerHealth, module: RadialActivation, unit: str
) -> Iterator[HealthWarning]:
    """Compare α with the length of the points that arrive."""
    added, arriving = layer.added or 0.0, layer.arriving or 0.0
    if _ADDED[0] <= added <= _ADDED[1] or arriving == 0:
        return
    name = "root mean square" if unit == "rms" else "norm"
    remedy = f"Set alpha to about {arriving:.2g}, the {name} of its input"
    kind, why = "alpha too large", "it only multiplies all points by one factor"
    if added > _ADDED[1]:
        kind, why = "alpha too small", "this energy dominates t: longer points come out shorter"
        if not module.on_points:  # its energy grows with t, whatever alpha is
            remedy = "Use projective=True or a larger alpha, and no bias before it"
    elif module.alpha == "young":
        remedy = 'Use alpha="spectral" or "learned", or a number near that length'
    elif module.alpha == "spectral" and float(module.norm) == 0:
        remedy = "Train a few steps: until then it is the bound of alpha=None"
    points = f"alpha {layer.alpha:.3g}, points of length {arriving:.3g}"
    seen = f"adds {100 * added:.3g} % of t: {points}"
    yield HealthWarning(kind, (layer.path,), seen, why, f"{remedy}: docs/training.md.")


def _of_norm(layer: LayerHealth) -> Iterator[HealthWarning]:
    """Compare the variances of a batch norm with eps."""
    if layer.below_eps is not None and layer.below_eps > _MOST:
        share = f"{100 * layer.below_eps:.0f} % of the variances are below eps={layer.module.eps:g}"
        seen = f"{share}, their median is {layer.variance:.2g}"
        why = "it divides by √eps and hardly normalizes"
        remedy = 'Use unit="rms", or cl.Scale before it: docs/conformal-layers.md.'
        yield HealthWarning("variance below eps", (layer.path,), seen, why, remedy)


def _of_map(layer: LayerHealth) -> Iterator[HealthWarning]:
    """Check for channels that are zero in all samples after a rectifier."""
    if not layer.dead or not layer.channels:
        return
    limit = _DEAD_MAPS if len(layer.shape) > 1 else _DEAD_UNITS
    if layer.dead < limit * layer.channels:
        return
    channels = f"{layer.dead} of {layer.channels} channels"
    seen = f"{channels} are zero in all samples after this {layer.kind}"
    why = "these channels have stopped learning, but cost as much as the others"
    if layer.dead == layer.channels:
        why = "no gradient reaches the stage before it"
    remedy = "Rectify with nn.LPPool2d(2, k) or cl.Abs, which pass both signs, use bias=False, or lower the learning rate."
    yield HealthWarning("dead", (layer.path,), seen, why, remedy)


def _of_embedding(part: PartHealth) -> Iterator[HealthWarning]:
    """Compare the offset with the length of the inputs."""
    modules = [layer.module for layer in part.layers]
    blind = all(one.on_points for one in modules if isinstance(one, RadialActivation))
    maps = any(layer.dead is not None for layer in part.layers)
    low, high = (limit * part.entering for limit in _OFFSETS)
    seen = f"an offset of {part.offset:.3g} for inputs of length {part.entering:.3g}"
    near = f"{part.entering:.2g}"
    if part.offset > high:
        why = "all points are short, and every activation is close to a constant factor"
        remedy = f"Use an offset of about {near}, or scale the inputs up."
    elif blind and part.offset < low and maps:
        why = "the output does not depend on the contrast of the input"
        remedy = f"Scale the inputs down, or use an offset near {near}: docs/conformal-layers.md."
        if not part.offset:
            seen = "no offset, and no activation of the published form"
            remedy = f'Use offset="learned", or a number near {near}: docs/conformal-layers.md.'
    else:
        return
    yield HealthWarning("offset", (part.path,), seen, why, remedy)
