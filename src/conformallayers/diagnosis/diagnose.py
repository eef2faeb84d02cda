"""Check the health of a model on a batch: before, during or after training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..container import ConformalLayers
from ..errors import ConformalError, ignored_warnings, refusal
from ..folding.folded import Folded
from ..utils.html import Block, Printed
from .checks import HealthWarning, warnings_of
from .measure import Measurement, PartHealth, measure


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
    that has seen few batches uses the statistics of this one. Hooks do not run; forward hooks give a warning.
    Other warnings are about: NaN and infinity, points that vanish or explode, α far from the length of the points
    that arrive, variances below eps and running means that are late, channels that are dead behind a rectifier, an
    offset that does not fit the inputs, networks without any homogeneous map, and weights without a gradient.

    Args:
        model: a :class:`ConformalLayers`, or any module that runs some.
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
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices), ignored_warnings():
        found = _measured(model, x)
    return Diagnosis(len(x), tuple(found.parts), tuple(warnings_of(found)))


def _measured(model: nn.Module, x: Tensor) -> Measurement:
    try:
        found = measure(model, x)
    except ConformalError:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        remedy = "Check that model.double().eval()(x.double()) runs."
        shape = tuple(x.shape)
        raise refusal(
            "diagnose(model, x)", f"a model that takes a batch {shape}", got, remedy
        ) from error
    if not found.parts:
        remedy = "Look at its forward, or pass the ConformalLayers itself."
        raise refusal("diagnose(model)", "a model that runs its ConformalLayers", "none", remedy)
    return found


def _check(model: object, x: object) -> None:
    """Refuse arguments that cannot be measured."""
    order = "The order is diagnose(model, x)."
    if not isinstance(model, nn.Module):
        raise refusal("diagnose(model)", "an nn.Module", type(model).__name__, order)
    if isinstance(model, Folded):
        remedy = "Pass the model that was folded; folded.explain() tells about the fold."
        raise refusal("diagnose(model)", "a model with layers", "a Folded", remedy)
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
