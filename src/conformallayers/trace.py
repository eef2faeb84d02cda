"""Modules → Steps: one pass that fixes every shape, bound and α of a network for one input shape."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ._text import table
from .activations import ReSPro
from .bounds import Shape
from .errors import refusal, shape_text
from .functional import Scalar
from .kinds import Kind, check_batch_axis, check_input, kind_of
from .operators import freeze


@dataclass(frozen=True)
class Step:
    """One module of the network on samples of a fixed shape.

    ``bound`` is the operator norm's upper bound of a linear module; ``alpha`` is set for an
    activation, whose ``bound`` is that of the layers since the activation before it.
    """

    path: str
    module: nn.Module
    input_shape: Shape
    output_shape: Shape
    bound: float
    alpha: float | None = None

    @property
    def projective(self) -> bool:
        """Whether the activation takes the projective form."""
        return isinstance(self.module, ReSPro) and self.module.projective


@dataclass(frozen=True)
class Trace:
    """The steps of a network; prints as a table of path, op, shapes, alpha and bound."""

    input_shape: Shape
    steps: tuple[Step, ...]

    @property
    def output_shape(self) -> Shape:
        """The shape of one output sample."""
        return self.steps[-1].output_shape if self.steps else self.input_shape

    @property
    def alphas(self) -> tuple[float, ...]:
        """The radii of the activations, in order."""
        return tuple(step.alpha for step in self.steps if step.alpha is not None)

    def __str__(self) -> str:
        rows = [
            (
                step.path,
                _operation(step.module),
                shape_text(step.input_shape),
                shape_text(step.output_shape),
                "" if step.alpha is None else f"{step.alpha:.4g}",
                f"{step.bound:.4g}",
            )
            for step in self.steps
        ]
        return table(("path", "op", "input", "output", "alpha", "bound"), rows)

    __repr__ = __str__


def trace_modules(modules: Iterable[tuple[str, nn.Module]], input_shape: Shape) -> Trace:
    """Follow a sample of ``input_shape`` through (path, module) pairs that were checked before.

    Nothing is computed on data: shapes come from the meta device, bounds from the weights. The
    steps hold frozen copies, so the trace does not change when the model does.
    """
    steps: list[Step] = []
    shape, bound = input_shape, 1.0
    with torch.no_grad():
        for path, module in modules:
            frozen = freeze(module)
            if isinstance(frozen, ReSPro):
                alpha = _number(frozen.resolve(bound), path, module)
                steps.append(Step(path, frozen, shape, shape, bound, alpha))
                bound = 1.0
                continue
            kind = kind_of(path, frozen)
            output = _output_shape(path, frozen, kind, shape)
            own = _number(kind.bound(frozen, shape), path, module)
            steps.append(Step(path, frozen, shape, output, own))
            shape, bound = output, bound * own
    return Trace(input_shape, tuple(steps))


def _output_shape(path: str, module: nn.Module, kind: Kind, shape: Shape) -> Shape:
    """Return the shape of one output sample, or refuse the input by name and position."""
    batch = 2  # more than 1, so that a module that merges the batch axis is seen
    check_input(path, module, kind, (batch, *shape), traced=True)
    tensors = dict(module.named_buffers())
    floats = [t.dtype for t in tensors.values() if t.is_floating_point()]
    device = next((t.device for t in tensors.values()), None)
    x = torch.empty(batch, *shape, dtype=floats[0] if floats else None, device="meta")
    try:
        try:
            meta = {name: torch.empty_like(t, device="meta") for name, t in tensors.items()}
            result = torch.func.functional_call(module, meta, (x,))
        except RuntimeError:  # a module with tensors of its own needs its own device
            result = module(torch.zeros_like(x, device=device or "cpu"))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise refusal(
            f"{type(module).__name__} at position {path}",
            "an input it can process",
            f"samples of shape {shape_text(shape)} ({str(error).splitlines()[0]})",
            "Change the layer's sizes or the input shape.",
        ) from error
    check_batch_axis(path, module, result.shape, batch)
    return tuple(result.shape[1:])


def _number(value: Scalar, path: str, module: nn.Module) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise refusal(
            f"{type(module).__name__} at position {path}",
            "a finite bound >= 0",
            f"{number}",
            "Look for NaN or infinity in its weights.",
        )
    return number


def _operation(module: nn.Module) -> str:
    text = repr(module)
    return text if "\n" not in text and len(text) <= 90 else f"{type(module).__name__}(…)"
