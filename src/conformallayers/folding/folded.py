"""Plan → Folded: the module that runs a folded network. A few tensors and one short forward."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..errors import refusal, shape_text
from ..functional import (
    dehomogenize,
    full_precision,
    moderate_norm,
    normalise,
    scale_samples,
    wide_dtype,
)
from ..registry.bounds import Shape
from .certificate import Certificate
from .plan import Plan
from .recurrence import Recurrence, Recurring
from .stages import Program
from .strategies import STRATEGIES, Core, Request
from .strategies.base import SQUARED, as_autocast, exact_certificate, keeps_range
from .strategies.dense import DenseCore
from .strategies.paths import NativeLayers, WebRequest
from .trace import Source

Self = TypeVar("Self", bound="Folded")
C = TypeVar("C", bound="Conformal")
_MODERATE = 1e-3, 1e5  # norms of samples that need no division, at most
PIECE_BYTES = 16 * 2**20  # intermediate values of one piece of a large batch


def in_chunks(run: Callable[[Tensor], Tensor], x: Tensor, piece: int | None) -> Tensor:
    """Run a large batch a few samples at a time, so that intermediate values stay in the cache."""
    if piece is None or torch.compiler.is_compiling() or x.shape[0] <= 2 * piece:
        return run(x)
    parts = x.split(piece)
    if torch.is_grad_enabled() and x.requires_grad:
        return torch.cat([run(part) for part in parts])
    first = run(parts[0])
    result = first.new_empty(x.shape[0], *first.shape[1:])
    for part, out in zip(parts, result.split(piece), strict=True):
        out.copy_(first if part is parts[0] else run(part))
    return result


def moderate_limits(program: Program, scale: float) -> tuple[float, float] | None:
    """Return the norms of samples that no step of a program takes out of float32's range.

    Args:
        program: what is computed.
        scale: what M x̂ is multiplied with at the end.
    """
    pairs = zip(program.segments, program.growths, strict=True)
    form = sum(segment.weight * grown * grown for segment, grown in pairs)
    low, high = _MODERATE[0], min(_MODERATE[1], SQUARED / program.growth)
    if not low < high:
        return None
    denominator = high + form * high * max(1.0, high)
    fits = SQUARED**-2 * denominator < abs(scale) < low * SQUARED**2
    return (low, high) if fits else None


class Part(nn.Module):
    """What stands in the place of a ConformalLayers.

    Attributes:
        input_shape, output_shape: of one sample.
        piece: samples that run at a time.
        certificate: what is proven of the denominator.
    """

    settings: ClassVar[tuple[str, ...]] = ("input_shape", "output_shape", "piece", "certificate")
    input_shape: Shape
    output_shape: Shape
    piece: int
    certificate: Certificate | None = None

    def extra_repr(self) -> str:
        """Show the shapes."""
        return f"{shape_text(self.input_shape)} → {shape_text(self.output_shape)}"

    def _set_piece(self, scratch: int, dtype: torch.dtype) -> None:
        """Choose the piece by what a sample needs beside its input and output."""
        inputs = 2 * math.prod(self.input_shape) + math.prod(self.output_shape)
        self.piece = max(1, PIECE_BYTES // (max(4, dtype.itemsize) * (inputs + scratch)))
        steady_allocator()


class Native(Part):
    """Layers that branch, have biases or are very many, run one by one on their frozen copies."""

    def __init__(self, request: Request | WebRequest, source: Source) -> None:
        super().__init__()
        whole = request.web if isinstance(request, WebRequest) else request.program
        self.input_shape, self.output_shape = whole.input_shape, whole.output_shape
        self.layers = NativeLayers(source, request.dtype, request.device)
        if isinstance(request, WebRequest):
            self.certificate = request.certificate()
        else:
            self.certificate = exact_certificate(request)
        sizes = (math.prod(operator.output_shape) for operator in whole.operators)
        self._set_piece(4 * max(sizes, default=0), request.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch (B, *input_shape) → (B, *output_shape)."""
        return in_chunks(self.layers, x, self.piece)

    def get_extra_state(self) -> Tensor:
        """Return the radii, which are part of the state beside the weights."""
        scalars = [_number(self.layers.signature), *self.layers.radii]
        return torch.tensor(scalars, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take the radii of a fold of the same kind."""
        signature, *radii = state.tolist()
        _check_state(signature, len(radii), self.layers.signature, len(self.layers.radii))
        self.layers.radii = tuple(radii)


def make_part(request: Request | WebRequest, strategy: str) -> Part:
    """Build what a plan chose."""
    source: Source | None = None
    if isinstance(request, WebRequest):
        source = request.web.source
    elif request.program.births or not keeps_range(request):
        source = request.program.source
    if strategy == "layers" and source is not None:
        return Native(request, source)
    part = Conformal(request, strategy)
    for name, array in part.named_buffers():
        if array.is_floating_point() and not bool(array.isfinite().all()):
            got, remedy = f"NaN or infinity in {name}", 'Use strategy="layers".'
            raise refusal(f'fold(strategy="{strategy}")', "numbers within range", got, remedy)
    return part


class Conformal(Part):
    """One folded chain or web: normalise, apply the core, run the scalar recurrence, divide.

    With biases or branches an energy may be a small difference of its parts, so that everything
    is wide there, whatever the dtype of inputs and outputs.

    Args:
        request: what to compute.
        strategy: how.
    """

    settings = (*Part.settings, "rules", "scale", "branches", "limits")
    bias: Tensor | None

    def __init__(self, request: Request | WebRequest, strategy: str) -> None:
        super().__init__()
        self.core: Core
        bias: Tensor | None
        if isinstance(request, WebRequest):
            self.core = DenseCore(request.widened())  # type: ignore[arg-type]
            self.input_shape, self.output_shape = request.web.input_shape, request.web.output_shape
            recurrence: Recurrence | None = request.arrays.recurrence
            self.rules = tuple(site.rule for site in request.arrays.recurrence.sites)
            scale, bias, self.branches = 1.0, request.web.bias, True
        else:
            program = request.program
            recurrence = program.recurrence
            self.core = STRATEGIES[strategy].make(
                request if recurrence is None else request.widened()
            )
            self.input_shape, self.output_shape = program.input_shape, program.output_shape
            self.rules = program.rules
            scale, bias, self.branches = program.scale, program.bias, False
        self.scale = scale * self.core.gain
        self.certificate = self.core.certificate
        self.limits: tuple[float, float] | None = None
        self.recurring: Recurring | None = None
        if recurrence is not None:
            self.recurring = Recurring(recurrence, scale, request.device)
        elif isinstance(request, Request):
            self.limits = moderate_limits(request.program, self.scale)
        placed = None if bias is None else bias.to(request.device, request.dtype)
        self.register_buffer("bias", placed)
        dtype = request.dtype if recurrence is None else wide_dtype(request.device)
        self._set_piece(self.core.scratch(), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch (B, *input_shape) → (B, *output_shape)."""
        return in_chunks(self._run, x, self.piece)

    def _run(self, x: Tensor) -> Tensor:
        tau = moderate_norm(x, self.limits)
        if tau is not None:
            v, forms = self.core(x)
            for rule, n in zip(self.rules, forms, strict=True):
                tau = rule.advance(tau, n, 1.0)
            y = scale_samples(v, self.scale / tau)
        elif self.recurring is not None:
            unit, m, tau = normalise(x.to(wide_dtype(x.device)))
            with full_precision(x):
                v, forms = self.core(unit)
                parts = v if self.branches else v.unsqueeze(1)
                y = self.recurring(unit, m, tau, parts, forms, self.scale)
            y = as_autocast(y, x)
        else:
            unit, m, tau = normalise(x)
            v, forms = self.core(unit)
            for rule, n in zip(self.rules, forms, strict=True):
                tau = rule.advance(tau, n, m)
            y = dehomogenize(v, self.scale, tau)
        return y if self.bias is None else y + self.bias

    def _apply(self: C, fn: Callable[..., Any], recurse: bool = True) -> C:
        """Move everything, but leave wide what has to be wide."""
        if self.recurring is None:
            return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

        def moved(tensor: Tensor) -> Tensor:
            result: Tensor = fn(tensor)
            return tensor.to(result.device) if tensor.is_floating_point() else result

        for child in (self.core, self.recurring):
            child._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return super()._apply(fn, False)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def signature(self) -> str:
        """What must agree for the arrays of another one to fit."""
        rules = [rule.signature for rule in self.rules]
        return repr((rules, None if self.recurring is None else self.recurring.signature))

    def get_extra_state(self) -> Tensor:
        """Return the float64 factors, which are part of the state beside the buffers."""
        limits = self.limits or (math.inf, 0.0)
        scalars = [_number(self.signature), self.scale, *limits, *self.core.scalars()]
        return torch.tensor(scalars, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take the factors of a fold of the same kind."""
        signature, *values = state.tolist()
        _check_state(signature, len(values), self.signature, self.get_extra_state().numel() - 1)
        self.scale, low, high = values[:3]
        self.limits = (low, high) if low < high else None
        self.core.set_scalars(values[3:])


def _number(signature: str) -> float:
    """Return a signature as a number that float64 holds exactly."""
    return float(int.from_bytes(hashlib.sha256(signature.encode()).digest()[:6], "big"))


def _check_state(signature: float, count: int, expected: str, size: int) -> None:
    if signature != _number(expected) or count != size:
        raise refusal(
            "Folded.load_state_dict",
            "the state of a fold with the same strategy, activations, biases and branches",
            "that of another one",
            "Fold the model again.",
        )


@lru_cache(maxsize=1)
def steady_allocator() -> None:
    """Make the C library keep what a piece needs, instead of fetching fresh pages at each call.

    glibc raises its threshold to the size of a large block when that is freed for the first time.
    """
    torch.empty(PIECE_BYTES, dtype=torch.uint8)


class Explanation(dict[str, Plan]):
    """The plan of each folded part by its path; prints as tables."""

    def __str__(self) -> str:
        parts = [f"{path}\n{plan}" if path else str(plan) for path, plan in self.items()]
        return "\n\n".join(parts)

    __repr__ = __str__


class Folded(nn.Module):
    """A folded network. Made by :func:`conformallayers.fold`, not by hand.

    It is for inference: its arrays are buffers, ``train()`` changes nothing, and it cannot be
    fine-tuned, because one matrix and one form no longer know the layers they came from. Train the
    original and fold again. Gradients with respect to the input do flow.

    Attributes:
        input_shape: of one sample.
        output_shape: of one sample.
        strategy: the name of the strategy of each part, joined with "+".
        certificate: a :class:`Certificate` where terms were left out, None where none were.
        origin: the fingerprint of the weights that were folded.
        labels, about: the names of the outputs and other notes from a file; None without.

    Shape:
        (B, *input_shape) → (B, *output_shape)

    Examples:
        >>> import conformallayers as cl
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro(), cl.AvgPool2d(2))
        >>> folded = cl.fold(model, (1, 8, 8))
        >>> folded(torch.rand(5, 1, 8, 8)).shape
        torch.Size([5, 4, 3, 3])
    """

    anchor: Tensor
    origin: str | None = None
    labels: tuple[str, ...] | None = None
    about: dict[str, Any] | None = None

    def __init__(
        self,
        body: nn.Module,
        plans: dict[str, Plan],
        shapes: tuple[Shape, Shape],
        dtype: torch.dtype,
        device: torch.device,
        piece: int | None = None,
        origin: str | None = None,
    ) -> None:
        super().__init__()
        self.body = body
        self.piece = piece
        self.origin = origin
        self.plans = dict(plans)
        self.input_shape, self.output_shape = shapes
        self.register_buffer("anchor", torch.empty(0, dtype=dtype, device=device), persistent=False)
        self.eval()

    @property
    def strategy(self) -> str:
        """The chosen strategy; several parts are joined with "+"."""
        return "+".join(plan.strategy for plan in self.plans.values())

    @property
    def certificate(self) -> Certificate | None:
        """The weakest proof among the parts, or None where nothing was left out."""
        proofs = [plan.certificate for plan in self.plans.values() if plan.certificate is not None]
        if not proofs:
            return None
        # Parts behind others are proven for any norm, so the smallest is that of the model's input.
        return Certificate(
            max(proof.epsilon for proof in proofs),
            min(proof.max_norm for proof in proofs),
            min(proof.margin for proof in proofs),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of inputs, constants and outputs."""
        return self.anchor.dtype

    def explain(self) -> Explanation:
        """Return the candidates, their costs and the reason of the choice; prints as a table."""
        return Explanation(self.plans)

    def forward(self, x: Tensor) -> Tensor:
        """Run the folded network on a batch."""
        if not isinstance(x, Tensor):
            raise refusal("Folded", "a tensor", type(x).__name__, "Use torch.as_tensor(x).")
        if tuple(x.shape[1:]) != self.input_shape:
            raise self._wrong_shape(x)
        if x.device != self.anchor.device:
            raise refusal(
                "Folded",
                f"an input on {self.anchor.device}",
                f"one on {x.device}",
                "Move one of them with .to(device).",
            )
        if x.dtype != self.anchor.dtype:
            raise refusal(
                "Folded",
                f"an input of dtype {self.anchor.dtype}",
                f"{x.dtype}",
                "Convert the input, or fold with dtype=....",
            )
        return in_chunks(self.body, x, self.piece)

    def train(self: Self, mode: bool = True) -> Self:
        """Stay in evaluation mode: a folded network has nothing to train."""
        return super().train(False)

    def extra_repr(self) -> str:
        """Show the shapes, the dtype and the strategy."""
        shapes = f"{shape_text(self.input_shape)} → {shape_text(self.output_shape)}"
        return f"{shapes}, dtype={self.anchor.dtype}, strategy={self.strategy!r}"

    def _wrong_shape(self, x: Tensor) -> Exception:
        unbatched = tuple(x.shape) == self.input_shape
        return refusal(
            "Folded",
            f"a batch of shape (B, {shape_text(self.input_shape)[1:].replace(',)', ')')}",
            f"{'an unbatched input' if unbatched else 'an input'} of shape {tuple(x.shape)}",
            "Add the batch axis with x.unsqueeze(0)."
            if unbatched
            else "Fold again for this shape: a fold is made for one.",
        )
