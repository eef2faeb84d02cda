"""Webs: all paths written out as "dense" arrays, or the "layers" one by one."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...functional import wide_dtype
from ...nn.activations import RadialActivation
from ...nn.layerwise import run_layers
from ..branches import Activation, Arrays, Web, write_out
from ..certificate import Certificate, ErrorBudget
from ..forms import Forms
from ..operators import freeze
from ..trace import Source
from .base import Cost
from .dense import LARGEST
from .routes import layer_cost

MAX_PATHS = 16
_ENTRIES = 2**29  # of all forms while they are built: 4 GiB


class WebRequest:
    """A web to be folded, in the shape that the dense strategy asks for.

    Args:
        web: what to compute.
        slack: what was asked for; nothing is left out, so it is always kept.
        dtype, device: of the result.
        max_paths: refuse to write out more of them.
    """

    def __init__(
        self,
        web: Web,
        slack: ErrorBudget,
        dtype: torch.dtype,
        device: torch.device,
        max_paths: int = MAX_PATHS,
    ) -> None:
        self.web, self.slack, self.dtype, self.device = web, slack, dtype, device
        self.max_paths = max_paths
        self._arrays: list[Arrays] = []

    def sibling(self, web: Web) -> WebRequest:
        """Ask for the same with other layers at the end."""
        return WebRequest(web, self.slack, self.dtype, self.device, self.max_paths)

    def widened(self) -> WebRequest:
        """Ask for the same arrays in the widest dtype of the device."""
        dtype = wide_dtype(self.device)
        other = WebRequest(self.web, self.slack, dtype, self.device, self.max_paths)
        other._arrays = self._arrays
        return other

    @property
    def program(self) -> WebRequest:
        """Shapes as the dense strategy reads them: every path has an output of its own."""
        return self

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return self.web.input_shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Of one sample, one for each path."""
        return (len(self.web.keys[-1]), *self.web.output_shape)

    @property
    def arrays(self) -> Arrays:
        """Everything written out, once."""
        if not self._arrays:
            self._arrays.append(write_out(self.web))
        return self._arrays[0]

    @property
    def matrix(self) -> Tensor:
        """The maps of all paths."""
        return self.arrays.matrix

    @property
    def forms(self) -> Forms:
        """The forms of all pairs of paths."""
        return Forms(self.arrays.forms, 0.0, 0)

    def certificate(self) -> Certificate | None:
        """Nothing is left out."""
        return Certificate(0.0, math.inf, 1.0) if self.slack.requested else None

    def refuses(self) -> str | None:
        """Return why the paths cannot be written out, or None if they can."""
        web, d_in = self.web, math.prod(self.input_shape)
        if web.paths > self.max_paths:
            return f"{web.paths} paths meet, more than max_paths={self.max_paths}"
        if d_in > LARGEST:
            return f"a sample has {d_in} coefficients, a written-out form at most {LARGEST}"
        entries = self._entries()
        return f"{web.forms} forms have {entries} entries" if entries > _ENTRIES else None

    def _entries(self) -> int:
        """Count all maps and forms."""
        d_in = math.prod(self.input_shape)
        return self.web.forms * d_in**2 + math.prod(self.output_shape) * d_in

    def cost(self) -> Cost:
        """Count all paths and forms."""
        entries = self._entries()
        return Cost(
            gemm=entries,
            stream=2 * self.web.forms * math.prod(self.input_shape),
            calls=2 + 12 * self.web.forms,
            bytes=8 * entries,
        )

    def cost_of_layers(self) -> Cost:
        """Count the layers as they are, and a few passes over each map that is activated."""
        web, item = self.web, self.dtype.itemsize
        sites = [node for node in web.nodes if isinstance(node.action, Activation)]
        maps = sum(math.prod(op.output_shape) for op in web.operators)
        energies = Cost(stream=3 * maps, calls=12 * len(sites))
        return sum((layer_cost(operator, item) for operator in web.operators), energies)

    def effort(self) -> float:
        """Count the multiply-adds that building takes at most."""
        once = sum(operator.multiply_adds() for operator in self.web.operators)
        return float(2 * once * self.web.paths * (1 + self.web.forms)) * math.prod(self.input_shape)


class NativeLayers(nn.Module):
    """Frozen copies of layers, run one by one with the radii they had.

    Args:
        source: the layers.
        dtype, device: of the copies.
    """

    settings: ClassVar[tuple[str, ...]] = ("paths", "radii")

    def __init__(self, source: Source, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.paths = tuple(path for path, _ in source.layers)
        self.radii = source.alphas
        self.before, self.layers, self.behind = (
            nn.ModuleList(freeze(module, dtype).to(device) for module in modules)
            for modules in (source.before, [m for _, m in source.layers], source.behind)
        )

    @property
    def signature(self) -> str:
        """What must agree for the weights of another one to fit."""
        rules = [m.rule.signature for m in self.modules() if isinstance(m, RadialActivation)]
        return repr((self.paths, rules, len(self.before), len(self.behind)))

    def forward(self, x: Tensor) -> Tensor:
        """Run them."""
        for module in self.before:
            x = module(x)
        pairs = zip(self.paths, self.layers, strict=True)
        x = run_layers(pairs, x, training=False, alphas=self.radii)
        for module in self.behind:
            x = module(x)
        return x
