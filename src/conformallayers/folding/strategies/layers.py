"""Strategy "layers": the layers themselves, every α resolved, every factor merged into a weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from ...functional import energy
from ...registry.registry import find_spec
from ..operators import Operator, freeze
from .base import Core, Cost, Request, exact_certificate, wide
from .routes import layer_cost


class LayersCore(Core):
    """Run the layers and sum the energies that share a form."""

    name = "layers"
    settings = (*Core.settings, "groups", "weights", "factors", "largest")
    foreseen = True

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        program = request.program
        self.groups = program.groups
        self.weights = tuple(segment.weight for segment in program.segments)
        stages = [stage_of(s.operators, s.factor) for s in program.segments]
        stages.append(stage_of(program.trailing, 1.0))
        self.factors = tuple(factor for _, factor in stages)
        self.stages = nn.ModuleList(stage for stage, _ in stages)
        self.largest = max((math.prod(op.output_shape) for op in program.operators), default=0)
        self.to(dtype=request.dtype, device=request.device)
        self.certificate = exact_certificate(request)

    @classmethod
    def cost(cls, request: Request, *, built: bool) -> Cost:
        """Count the layers as they are, and a pass over each map whose energy is taken."""
        program = request.program
        maps = (s.operators[-1].output_shape if s.operators else () for s in program.segments)
        energies = Cost(stream=sum(map(math.prod, maps)), calls=3 * len(program.segments))
        item = request.dtype.itemsize
        return sum((layer_cost(operator, item) for operator in program.operators), energies)

    @classmethod
    def effort(cls, request: Request) -> float:
        """Nothing is built."""
        return 0.0

    def scratch(self) -> int:
        """Count two feature maps: what a layer reads and what it writes."""
        return 2 * self.largest

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return V z_k, and the value of each form."""
        z = x
        energies: list[Tensor] = []
        for index, (stage, factor) in enumerate(zip(self.stages, self.factors, strict=True)):
            z = stage(z) if factor == 1.0 else stage(z) * factor
            if index < len(self.weights):
                z, n = energy(z)
                energies.append(wide(n) * self.weights[index])
        values = (
            sum((energies[i] for i in group[1:]), energies[group[0]]) for group in self.groups
        )
        return z, tuple(values)


def stage_of(operators: Sequence[Operator], factor: float) -> tuple[nn.Sequential, float]:
    """Merge the factor into the last weight of a stage; return what is left of it."""
    modules = [freeze(operator.module) for operator in operators]
    for module in reversed(modules):
        kind = find_spec(module)
        if kind is not None and kind.parameter is not None:
            setattr(module, kind.parameter, getattr(module, kind.parameter) * factor)
            return nn.Sequential(*modules), 1.0
    return nn.Sequential(*modules), factor
