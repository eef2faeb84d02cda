"""What a strategy is: a module that turns x̂ into M x̂ and the values of the quadratic forms."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...functional import autocasts, wide_dtype
from ...registry.bounds import Shape
from ..certificate import Certificate, ErrorBudget
from ..forms import Forms
from ..machine import Machine
from ..operators import Operator, impulses, window
from ..stages import Program, forms_of, matrix_of

_LARGEST = 2**27  # entries of M that are written out: 512 MiB in float32
_STAGES = 3  # whose terms always count in float32
SQUARED = 1e15  # numbers whose square fits into float32 with room
LARGEST_SQUARED = 1e140  # the same for float64, summed over layers
BATCH = 64  # the batch size that costs are compared at


@dataclass(frozen=True)
class Cost:
    """What one sample takes, by kind of work, and the bytes of all constants."""

    gemm: float = 0  # multiply-adds in large products
    blocks: float = 0  # multiply-adds in many small products
    conv: float = 0  # multiply-adds in convolutions and poolings
    idle: float = 0  # those of lanes that a convolution has no channels for
    sparse: float = 0  # multiply-adds in sparse products
    stream: float = 0  # elements that a pass over memory touches
    fft: float = 0  # elements · log2(elements)
    calls: int = 0  # per batch
    bytes: int = 0

    @property
    def multiply_adds(self) -> float:
        """All multiply-adds of one sample."""
        return self.gemm + self.blocks + self.conv + self.sparse

    def seconds(self, machine: Machine) -> float:
        """Return the expected time of one batch of 64."""
        work = (
            self.gemm / machine.gemm
            + self.blocks / machine.blocks
            + (self.conv + self.idle) / machine.conv
            + self.sparse / machine.sparse
            + self.stream / machine.stream
            + self.fft / machine.fft
        )
        return BATCH * work + self.calls * machine.call

    def __add__(self, other: Cost) -> Cost:
        values = {name: getattr(self, name) + getattr(other, name) for name in vars(self)}
        return replace(self, **values)


class Request:
    """A program to be folded, with what is allowed, and the arrays that strategies share.

    Args:
        program: what to compute.
        slack: how far a form may be from the exact one.
        dtype, device: of the result.
    """

    def __init__(
        self, program: Program, slack: ErrorBudget, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.program = program
        self.max_norm = math.inf if program.scale_free else slack.radius
        # ‖x‖ + xᵀQx/‖x‖ and √(‖x‖² + xᵀQx) are bounded as for R = 1, at any norm.
        slack = replace(slack, radius=1.0) if program.scale_free else slack
        self.slack = slack if program.provable else replace(slack, epsilon=0.0)
        self.dtype = dtype
        self.device = device
        self._shared: list[Forms] = []
        self.memo: dict[Any, Any] = {}  # what strategies found out about the forms

    @property
    def room(self) -> float:
        """1/R of the proof."""
        return 1 / self.slack.radius

    def certificate(self, margin: float | None = None) -> Certificate | None:
        """State what is proven of the forms, or of something proven closer to them by ``margin``.

        None where nothing was left out and no tolerance was asked for.
        """
        slack = self.slack
        lost = self._shared[0].missing if self._shared else 0.0
        if margin is None:
            room = slack.epsilon * (self.forms.smallest + self.room) if lost else 1.0
            margin = 1 - lost / room
            if lost == 0 and not slack.requested:
                return None
        return Certificate(slack.epsilon, self.max_norm, margin)

    def sibling(self, program: Program) -> Request:
        """Ask for the same chain with other layers behind its last activation: Q is the same."""
        slack = replace(self.slack, radius=self.max_norm)
        other = Request(program, slack, self.dtype, self.device)
        other._shared, other.memo = self._shared, self.memo
        return other

    def widened(self) -> Request:
        """Ask for the same in the widest dtype of the device."""
        other = self.sibling(self.program)
        other.dtype = wide_dtype(self.device)
        return other

    def effort(self) -> float:
        """Count the multiply-adds that building M and the forms takes at most."""
        return self._once() * 2 * math.prod(self.program.input_shape) + self.effort_of_matrix()

    def effort_of_matrix(self) -> float:
        """Count the multiply-adds that building M takes at most."""
        sizes = math.prod(self.program.input_shape), math.prod(self.program.output_shape)
        return 2 * self._once() * min(sizes)  # there and back

    def _once(self) -> float:
        return float(sum(operator.multiply_adds() for operator in self.program.operators))

    @cached_property
    def matrix(self) -> Tensor:
        """M in float64, (d_out, d_in); built when it is first asked for."""
        return matrix_of(self.program)

    @property
    def forms(self) -> Forms:
        """Every Q in float64; built when it is first asked for."""
        if not self._shared:
            self._shared.append(forms_of(self.program, self.slack))
        return self._shared[0]


class Core(nn.Module):
    """The base of all strategies: x̂ (B, *input_shape) → M x̂ / gain, and the value of each form."""

    name: ClassVar[str]
    foreseen: ClassVar[bool] = False  # whether the cost is known before anything is built
    settings: ClassVar[tuple[str, ...]] = ("output_shape", "gain", "certificate")  # kept in files
    gain: float = 1.0  # what v still has to be multiplied with
    certificate: Certificate | None = None

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.output_shape = request.program.output_shape

    @classmethod
    def refuses(cls, program: Program) -> str | None:
        """Return why the strategy does not apply to a program, or None if it does."""
        return None

    @classmethod
    def cost(cls, request: Request, *, built: bool) -> Cost:
        """Predict the cost. ``built`` allows to look at the arrays; without it, be optimistic."""
        raise TypeError(f"{cls.__name__} does not say what it costs")

    @classmethod
    def caution(cls, request: Request) -> str:
        """Return why "auto" should not take the strategy though it applies; empty if it may."""
        return ""

    @classmethod
    def effort(cls, request: Request) -> float:
        """Count the multiply-adds that building takes at most."""
        return request.effort()

    @classmethod
    def make(cls, request: Request) -> Core:
        """Build the strategy for a request."""
        return cls(request)

    def scalars(self) -> list[float]:
        """Return the float64 factors that are no buffers; they belong to the state all the same."""
        return [self.gain, *getattr(self, "weights", ()), *getattr(self, "factors", ())]

    def set_scalars(self, values: list[float]) -> None:
        """Take factors that :meth:`scalars` gave."""
        self.gain, rest = values[0], values[1:]
        for name in ("weights", "factors"):
            count = len(getattr(self, name, ()))
            if count:
                setattr(self, name, tuple(rest[:count]))
                rest = rest[count:]

    def check(self) -> None:
        """Refuse arrays from a file whose values, not only their shapes, make no sense."""

    def dense_forms(self, input_shape: Shape) -> Tensor:
        """Return the forms as they are computed, written out: (groups, d_in, d_in) in float64."""
        exact = copy.deepcopy(self).double()
        tensors = [*exact.buffers(), torch.empty(0, dtype=torch.float64)]
        parts = []
        for batch in impulses(input_shape, 256, tensors[0].double()):
            x = batch.requires_grad_()
            with torch.enable_grad():
                halves = [n.sum() / 2 for n in exact(x)[1]]
            rows = [torch.autograd.grad(half, x, retain_graph=True)[0] for half in halves]
            parts.append(torch.stack(rows).flatten(2))
        forms = torch.cat(parts, 1)
        return (forms + forms.transpose(1, 2)) / 2

    def dense_matrix(self, input_shape: Shape) -> Tensor:
        """Return M / gain as it is computed, written out: (d_out, d_in) in float64."""
        exact = copy.deepcopy(self).double()
        tensors = [*exact.buffers(), torch.empty(0, dtype=torch.float64)]
        batches = impulses(input_shape, 256, tensors[0].double())
        return torch.cat([exact(x)[0].flatten(1) for x in batches]).T

    def scratch(self) -> int:
        """Return the number of elements that one sample needs beside input and output."""
        raise TypeError(f"{type(self).__name__} does not say what it needs")

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return M x̂ / gain, and the value of each form."""
        raise TypeError(f"{type(self).__name__} does not say how it runs")


def reach(program: Program, axis: int) -> int:
    """Return how far along an axis the first stages couple coefficients, in steps of the input."""
    total, step = 0, 1
    for segment in program.segments[:_STAGES]:
        for operator in segment.operators:
            kernel, stride, dilation = window(operator, axis)
            total += (kernel - 1) * dilation * step
            step *= stride
    return total


def refused_layer(program: Program, accepts: Callable[[Operator], bool], fault: str) -> str | None:
    """Name the first layer that a strategy cannot express, or a matrix that is too large."""
    for segment in program.segments:
        for operator in segment.operators:
            if not accepts(operator):
                return f"{type(operator.module).__name__} before {segment.path} {fault}"
    return too_many_entries(program)


def no_image(program: Program) -> str | None:
    """Return that a program has no activation or no spatial axes, or None if it has both."""
    if not program.segments:
        return "there is no activation"
    spatial = 2 <= len(program.input_shape) <= 4
    return None if spatial else "a sample has no spatial axes"


def too_many_entries(program: Program) -> str | None:
    """Return that a matrix is too large to be written out, or None if it is not or not needed."""
    size = math.prod(program.input_shape) * math.prod(program.output_shape)
    return f"M would have {size} entries" if program.trailing and size > _LARGEST else None


def keeps_range(request: Request) -> bool:
    """Tell whether feature maps, and squares of them, stay in range without a look at values."""
    limit = {torch.float16: 1e3, torch.float64: LARGEST_SQUARED}.get(request.dtype, SQUARED)
    return request.program.growth <= limit


def out_of_range(core: type[Core], request: Request) -> str | None:
    """Return why a core could not hold its numbers; the layers can always be rescaled on the way."""
    if core.name == "conv" and not keeps_range(request):
        return "values between its layers could leave the range of the dtype"
    if core.name != "layers" and request.program.growth > LARGEST_SQUARED:
        return "its forms could leave the range of float64"
    return None


def exact_certificate(request: Request) -> Certificate | None:
    """Nothing is left out here, whatever other strategies have built."""
    slack = request.slack
    return Certificate(slack.epsilon, request.max_norm, 1.0) if slack.requested else None


def as_autocast(v: Tensor, x: Tensor) -> Tensor:
    """Return v in the dtype that a product under autocast would have, else in that of x."""
    if autocasts(x):
        return v.to(torch.get_autocast_dtype(x.device.type))
    return v.to(x.dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """Return x, widened if it is narrower than float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def wide(n: Tensor) -> Tensor:
    """Return per-sample values in the widest dtype of their device."""
    return n.to(wide_dtype(n.device))


def normalised(array: Tensor) -> tuple[Tensor, float]:
    """Split an array into one with largest entry 1, and that entry as a float64 number."""
    peak = float(array.abs().max()) if array.numel() else 0.0
    return (array / peak, peak) if peak else (array, 1.0)
