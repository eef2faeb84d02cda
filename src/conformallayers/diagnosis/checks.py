"""Turn measurements into warnings, each with its consequence and a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import nn

from ..nn.activations import RadialActivation
from ..nn.registry import is_homogeneous
from ..utils.html import Block, Printed
from .measure import LayerHealth, Measurement, PartHealth

LISTED = 3  # names in a warning that are written out

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
        shown = ", ".join(path or "model" for path in self.paths[:LISTED])
        more = len(self.paths) - LISTED
        return f"{shown} and {more} more" if more > 0 else shown

    @property
    def line(self) -> str:
        """The warning as one line."""
        return f"{self.path}: {self.seen}; {self.why}. {self.remedy}"

    def _blocks(self) -> Iterator[Block]:
        yield f"{self.path}: {self.seen}\n  why: {self.why}\n  remedy: {self.remedy}"


def warnings_of(found: Measurement) -> list[HealthWarning]:
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
    if not {"non-finite", "dead", "vanishing"} & {warning.kind for warning in warnings}:
        warnings += _of_gradients(found)
    return warnings


def _of_model(found: Measurement) -> Iterator[HealthWarning]:
    """Check for hooks, and for weights that are NaN or infinite."""
    if found.hooked:
        seen = "forward hooks, which the measured copy does not run"
        why = "if they change inputs or outputs, the numbers here are not those of the model"
        remedy = "Remove them first: handle.remove()."
        yield HealthWarning("hooks", tuple(found.hooked), seen, why, remedy)
    if found.tensors:
        paths = tuple(dict.fromkeys(name.rpartition(".")[0] for name in found.tensors))
        more = " and more" * (len(found.tensors) > LISTED)
        seen = f"NaN or infinity in {', '.join(found.tensors[:LISTED])}{more}"
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
    elif norm.mean > _MEAN:
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


def _of_gradients(found: Measurement) -> Iterator[HealthWarning]:
    """Check that every weight in a ConformalLayers has a finite gradient that is not 0."""
    none, wild = "no gradient reaches its weight", "NaN or infinity in the gradient of its weight"
    bad: dict[str, list[str]] = {none: [], wild: []}
    for name, gradient in found.gradients.items():
        path, _, kind = name.rpartition(".")
        if path not in found.modules or kind != "weight":
            continue  # a bias before a batch norm has none, and need not
        if gradient is None or not bool(gradient.any()):
            bad[none].append(path)
        elif not bool(gradient.isfinite().all()):
            bad[wild].append(path)
    why = "an optimiser does not train it"
    remedy = "Look at the lengths of the points behind it, and at what its outputs are used for."
    for seen, paths in bad.items():
        if paths:
            yield HealthWarning("gradient", tuple(paths), seen, why, remedy)
