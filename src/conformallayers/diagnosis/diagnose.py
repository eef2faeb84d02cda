"""Check the health of a model on a batch: measure every layer, and warn of unusual values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..container import ConformalLayers
from ..errors import ignored_warnings, refusal
from ..nn.activations import RadialActivation
from ..nn.registry import is_homogeneous
from ..utils.html import Block, Printed
from .measure import LayerHealth, Measurement, PartHealth

_LISTED = 3  # names in a warning that are written out

_ADDED = 1e-3, 0.999  # share of t that a useful activation adds
_LENGTHS = 1e-4, 1e4  # of points, in the unit
_ENTRIES = 1e-3  # root mean square of the outputs of a ConformalLayers
_OFFSETS = 1e-2, 1e2  # of an offset, relative to the length of inputs
_MOST = 0.5  # share of channels of a norm that are "most"
_LAG = 5.0  # standard deviations between a running mean and the mean of a batch
_MEAN = 100.0  # standard deviations between a mean and 0
_DEAD_MAPS, _DEAD_UNITS = 0.25, 0.75  # shares of channels; of single numbers many are 0 by chance


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

    @property
    def line(self) -> str:
        """The warning as one line."""
        return f"{self.path}: {self.seen}; {self.why}. {self.remedy}"

    def _blocks(self) -> Iterator[Block]:
        yield f"{self.path}: {self.seen}\n  why: {self.why}\n  remedy: {self.remedy}"


@dataclass(frozen=True, repr=False)
class Diagnosis(Printed):
    """The result of :func:`conformallayers.diagnose`; prints as tables, and warnings with their remedies.

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
    Warnings are about: NaN and infinity, points that vanish or explode, α far from the length of the points
    that arrive, variances below eps and running means that are late, channels that are dead behind a rectifier, an
    offset that does not fit the inputs, and networks without any homogeneous map.

    Args:
        model: a :class:`ConformalLayers`, or a module with some inside that torch.fx can trace.
        x: (B, ...), a batch as in training; 16 to 256 samples are enough.

    Returns:
        A :class:`Diagnosis`; prints as tables and warnings with their remedies.

    Examples:
        >>> import conformallayers as cl
        >>> layers = cl.AvgPool2d(2), cl.ReSPro(100.0, projective=True), nn.LPPool2d(2, 2)
        >>> model = cl.ConformalLayers(*layers, offset=1.0, unit="rms")
        >>> print(cl.diagnose(model, torch.ones(2, 1, 8, 8)))
        model: unit rms, offset 1, inputs of length 1, entries of outputs 0.0283
        path  kind       output     length  alpha  arriving  added to t    dead
        ----  ---------  ---------  ------  -----  --------  ----------  ------
        0     AvgPool2d  (1, 4, 4)   0.707
        1     ReSPro     (1, 4, 4)  0.0141    100     0.707     0.005 %
        2     LPPool2d   (1, 2, 2)  0.0283                               0 of 1
        <BLANKLINE>
        1 warning on 2 samples
        1: adds 0.005 % of t: alpha 100, points of length 0.707
          why: it does no more than multiply all points by one number
          remedy: Set alpha to about 0.71, the root mean square that arrives: docs/training.md.
    """
    _check(model, x)
    with torch.no_grad(), torch.random.fork_rng(), ignored_warnings():
        found = Measurement(model, x)
    return Diagnosis(len(x), tuple(found.parts), tuple(_warnings(found)))


def _check(model: object, x: object) -> None:
    """Refuse arguments that cannot be measured."""
    order = "The order is diagnose(model, x)."
    if not isinstance(model, nn.Module):
        raise refusal("diagnose(model)", "an nn.Module", type(model).__name__, order)
    if not any(isinstance(module, ConformalLayers) for module in model.modules()):
        expected = "a cl.ConformalLayers, or a module with some inside"
        got, remedy = type(model).__name__, "Other layers are not looked at."
        raise refusal("diagnose(model)", expected, got, remedy)
    where = "diagnose(x)"
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise refusal(where, "a floating-point tensor", got, "Use torch.as_tensor(x).float().")
    if x.dim() < 2 or 0 in x.shape:
        got, remedy = f"a tensor of shape {tuple(x.shape)}", "Add the batch axis: x.unsqueeze(0)."
        raise refusal(where, "a batch of at least one sample", got, remedy)
    if not bool(x.isfinite().all()):
        raise refusal(where, "finite numbers", "NaN or infinity", "Leave those samples out.")
    if not bool(x.any()):
        raise refusal(where, "samples with a norm", "zeros", "Pass samples of the data.")


# -- warnings ----------------------------------------------------------------------------------------


def _warnings(found: Measurement) -> list[HealthWarning]:
    """Return the warnings of a measurement; those of one part that differ in numbers alone are one."""
    warnings = list(_of_model(found))
    for part in found.parts:
        warnings += _merged(_of_part(part, found))
    if not found.rectified:
        why = "what leaves is odd in x but for its length, so that average pooling cancels it"
        remedy = "Rectify between the layers, with nn.LPPool2d(2, k) in place of average pooling: docs/stages.md."
        paths = tuple(part.path for part in found.parts)
        warnings.append(HealthWarning("no map", paths, "no homogeneous map", why, remedy))
    if not found.finite and "non-finite" not in {warning.kind for warning in warnings}:
        seen = "NaN or infinity in the output"
        why = "a loss of it is NaN, and so are all gradients"
        remedy = "Look at the layers outside of ConformalLayers: all weights and all points inside are finite."
        warnings.append(HealthWarning("non-finite", ("",), seen, why, remedy))
    return warnings


def _of_model(found: Measurement) -> Iterator[HealthWarning]:
    """Check for weights that are NaN or infinite."""
    if found.tensors:
        paths = tuple(dict.fromkeys(name.rpartition(".")[0] for name in found.tensors))
        more = " and more" * (len(found.tensors) > _LISTED)
        seen = f"NaN or infinity in {', '.join(found.tensors[:_LISTED])}{more}"
        why = "every output that depends on it is NaN or infinite, and so are gradients"
        remedy = "Resume an earlier checkpoint, and lower the learning rate."
        yield HealthWarning("non-finite", paths, seen, why, remedy)


def _merged(warnings: Iterable[HealthWarning]) -> Iterator[HealthWarning]:
    """Merge warnings of one kind and consequence: all paths, with the numbers of the first."""
    alike: dict[tuple[str, str], list[HealthWarning]] = {}
    for warning in warnings:
        alike.setdefault((warning.kind, warning.why), []).append(warning)
    for first, *others in alike.values():
        paths = tuple(path for warning in (first, *others) for path in warning.paths)
        yield replace(first, paths=paths)


def _of_part(part: PartHealth, found: Measurement) -> Iterator[HealthWarning]:
    modules = [found.modules[layer.path] for layer in part.layers]
    yield from _of_embedding(part, modules)
    for layer, module in zip(part.layers, modules, strict=True):
        if not layer.finite:
            if not found.tensors:  # weights that are not finite are the cause, and have a warning
                seen = f"NaN or infinity behind this {layer.kind}"
                why = "everything behind it is NaN, and so are all gradients"
                remedy = "Its weights are finite: scale its inputs or its weights down."
                yield HealthWarning("non-finite", (layer.path,), seen, why, remedy)
            return  # all numbers behind it mean nothing
        if isinstance(module, RadialActivation):
            yield from _of_activation(layer, module, part.unit)
        yield from _of_norm(layer)
        yield from _of_map(layer)
    yield from _of_lengths(part)


def _of_lengths(part: PartHealth) -> Iterator[HealthWarning]:
    """Check the order of magnitude of points, and of the outputs of the part."""
    for layer in part.layers:
        if _LENGTHS[0] <= layer.length <= _LENGTHS[1]:
            continue
        seen = f"points of length {layer.length:.2g} behind this {layer.kind}"
        why = "gradients are of another order of magnitude than the weights"
        kind, remedy = "exploding", "Scale its weights down, or put a BatchNorm behind it."
        if layer.length < _LENGTHS[0]:
            kind = "vanishing"
            remedy = 'Use alpha="spectral", unit="rms" or a cl.Scale before it: docs/training.md.'
        yield HealthWarning(kind, (layer.path,), seen, why, remedy)
        return
    if part.leaving < _ENTRIES:
        seen = f"entries of {part.leaving:.2g} leave this ConformalLayers"
        why = "the head behind it learns slowly from such small features"
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
    remedy = f"Set alpha to about {arriving:.2g}, the {name} that arrives"
    kind, why = "alpha too large", "it does no more than multiply all points by one number"
    if added > _ADDED[1]:
        kind, why = "alpha too small", "t is this energy alone: longer points come out shorter"
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
    """Compare the variances and means of a batch norm with eps and with each other."""
    norm, paths = layer.norm, (layer.path,)
    if norm is None:
        return
    if norm.below_eps > _MOST:
        share = f"{100 * norm.below_eps:.0f} % of the variances are below eps={norm.eps:g}"
        seen = f"{share}, their median is {norm.variance:.2g}"
        why = "it divides by √eps and hardly normalises"
        remedy = 'Use unit="rms", or cl.Scale before it: docs/layers.md.'
        yield HealthWarning("variance below eps", paths, seen, why, remedy)
    if norm.lag is not None and norm.lag > _LAG:
        seen = f"the running mean is {norm.lag:.2g} σ away from that of the batch"
        why = "evaluation differs from training"
        remedy = "Train longer at a lower learning rate, use bias=False before it, or check that x has the statistics of the training data."
        yield HealthWarning("running mean", paths, seen, why, remedy)
    elif norm.lag is not None and norm.mean > _MEAN:
        seen = f"means are {norm.mean:.2g} times the standard deviation"
        why = "a running mean that is one percent late is off by a standard deviation"
        remedy = "Use bias=False before it, or subtract the mean image with cl.Centre."
        yield HealthWarning("mean above variance", paths, seen, why, remedy)


def _of_map(layer: LayerHealth) -> Iterator[HealthWarning]:
    """Check for channels that are zero in all samples behind a rectifier."""
    if not layer.dead or not layer.channels:
        return
    limit = _DEAD_MAPS if len(layer.shape) > 1 else _DEAD_UNITS
    if layer.dead < limit * layer.channels:
        return
    channels = f"{layer.dead} of {layer.channels} channels"
    seen = f"{channels} are zero in all samples behind this {layer.kind}"
    why = "these channels learn no more, and cost as much as the others"
    if layer.dead == layer.channels:
        why = "no gradient reaches the stage before it"
    remedy = "Rectify with nn.LPPool2d(2, k) or cl.Abs, which pass both signs, use bias=False, or lower the learning rate."
    yield HealthWarning("dead", (layer.path,), seen, why, remedy)


def _of_embedding(part: PartHealth, modules: list[nn.Module]) -> Iterator[HealthWarning]:
    """Compare the offset with the length of the inputs."""
    activations = [module for module in modules if isinstance(module, RadialActivation)]
    blind = all(activation.on_points for activation in activations)
    low, high = (limit * part.entering for limit in _OFFSETS)
    seen = f"an offset of {part.offset:.3g} for inputs of length {part.entering:.3g}"
    near = f"{part.entering:.2g}"
    if part.offset > high:
        why = "all points are short, and every activation is close to a constant factor"
        remedy = f"Use an offset of about {near}, or scale the inputs up."
    elif blind and part.offset < low and any(map(is_homogeneous, modules)):
        why = "the contrast of an input does not reach the output"
        remedy = f"Scale the inputs down, or use an offset near {near}: docs/stages.md."
        if not part.offset:
            seen = "no offset, and no activation as published"
            remedy = f'Use offset="learned", or a number near {near}: docs/stages.md.'
    else:
        return
    yield HealthWarning("offset", (part.path,), seen, why, remedy)
