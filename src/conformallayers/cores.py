"""The strategies: modules that turn x̂ into M x̂ and the quadratic forms, each in its own way.

A core has one forward, ``x̂ (B, *input_shape) → v (B, *output_shape), (n_1 … n_G) each (B,)``;
a cost; and a way to be built from a program. A new strategy is one class and one registry row.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .fold import Program
from .functional import energy, wide_dtype
from .kinds import find_kind
from .operators import freeze
from .quadratic import Stage, dense_arrays


@dataclass(frozen=True)
class Cost:
    """What one sample takes: multiply-adds, tensor calls, and the bytes of all constants."""

    multiply_adds: int
    calls: int
    bytes: int

    # A call costs a few microseconds whatever it computes: about this many multiply-adds a
    # sample at batch 64.
    CALL: ClassVar[int] = 2000

    @property
    def work(self) -> int:
        """Multiply-adds of one sample, the calls counted in."""
        return self.multiply_adds + self.CALL * self.calls


class Core(nn.Module):
    """The base of all strategies.

    Args:
        program: what to compute.
        dtype: of the constants.
        device: of the constants.
    """

    name: ClassVar[str]
    gain: float = 1.0  # v stands for gain · v

    def __init__(self, program: Program, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.output_shape = program.output_shape

    @classmethod
    def cost(cls, program: Program, dtype: torch.dtype) -> Cost:  # noqa: ARG003
        """Predict the cost without building anything."""
        raise TypeError(f"{cls.__name__} does not say what it costs")

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return M x̂ / gain, and the value of each form."""
        raise TypeError(f"{type(self).__name__} does not say how it runs")


class DenseCore(Core):
    """M and every Q as dense matrices: one product each."""

    name = "dense"
    matrix: Tensor
    forms: Tensor

    def __init__(self, program: Program, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(program, dtype, device)
        group_of = {i: g for g, members in enumerate(program.groups) for i in members}
        stages = [
            Stage(s.operators, s.factor, s.weight, group_of[i])
            for i, s in enumerate(program.segments)
        ]
        matrix, forms = dense_arrays(program.input_shape, stages, program.trailing, device)
        matrix, self.gain = _normalised(matrix)
        scaled = [_normalised(form) for form in forms]
        self.weights = tuple(weight for _, weight in scaled)
        self.register_buffer("matrix", matrix.to(dtype))
        stacked = torch.stack([form for form, _ in scaled]) if scaled else forms
        self.register_buffer("forms", stacked.to(dtype))

    @classmethod
    def cost(cls, program: Program, dtype: torch.dtype) -> Cost:
        """Count d_out·d_in for M and d_in² for each form."""
        d_in, d_out = math.prod(program.input_shape), math.prod(program.output_shape)
        groups = len(program.groups)
        size = d_out * d_in + groups * d_in**2
        return Cost(size, 1 + 2 * groups, size * dtype.itemsize)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Multiply by M; for each form take the dot product of x̂ and Q x̂."""
        flat = x.flatten(1)
        v = (flat @ self.matrix.T).view(-1, *self.output_shape)
        values = []
        with full_precision(x):
            exact = flat.to(torch.promote_types(flat.dtype, torch.float32))
            for form, weight in zip(self.forms, self.weights, strict=True):
                n = (exact @ form.to(exact.dtype) * exact).sum(1)
                values.append(n.to(wide_dtype(x.device)) * weight)
        return v, tuple(values)


class LayersCore(Core):
    """The layers themselves, with every α resolved and every factor merged into a weight."""

    name = "layers"

    def __init__(self, program: Program, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(program, dtype, device)
        self.groups = program.groups
        self.weights = tuple(segment.weight for segment in program.segments)
        stages = [_stage(s.operators, s.factor) for s in program.segments]
        stages.append(_stage(program.trailing, 1.0))
        self.factors = tuple(factor for _, factor in stages)
        self.stages = nn.ModuleList(stage for stage, _ in stages)
        self.to(dtype=dtype, device=device)

    @classmethod
    def cost(cls, program: Program, dtype: torch.dtype) -> Cost:
        """Count the operators' own multiply-adds and a pass over each activation."""
        operators = program.operators
        maps = sum(
            math.prod(s.operators[-1].output_shape if s.operators else program.input_shape)
            for s in program.segments
        )
        size = sum(t.numel() for op in operators for t in op.module.buffers())
        total = sum(op.multiply_adds() for op in operators) + maps
        return Cost(total, len(operators) + 2 * len(program.segments), size * dtype.itemsize)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the layers and sum the energies that share a form."""
        z = x
        energies: list[Tensor] = []
        for index, (stage, factor) in enumerate(zip(self.stages, self.factors, strict=True)):
            z = stage(z) if factor == 1.0 else stage(z) * factor
            if index < len(self.weights):
                z, n = energy(z)
                energies.append(n.to(wide_dtype(x.device)) * self.weights[index])
        values = (
            sum((energies[i] for i in group[1:]), energies[group[0]]) for group in self.groups
        )
        return z, tuple(values)


STRATEGIES: dict[str, type[Core]] = {core.name: core for core in (DenseCore, LayersCore)}


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Keep autocast away from the denominator."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def _normalised(array: Tensor) -> tuple[Tensor, float]:
    """Split an array into one with largest entry 1, and that entry as a float64 number."""
    peak = float(array.abs().max()) if array.numel() else 0.0
    return (array / peak, peak) if peak else (array, 1.0)


def _stage(operators: Any, factor: float) -> tuple[nn.Sequential, float]:
    """Merge the factor into the last weight of a stage; return what is left of it."""
    modules = [freeze(operator.module) for operator in operators]
    for module in reversed(modules):
        kind = find_kind(module)
        if kind is not None and kind.parameter is not None:
            tensor = getattr(module, kind.parameter)
            setattr(module, kind.parameter, tensor * factor)
            return nn.Sequential(*modules), 1.0
    return nn.Sequential(*modules), factor
