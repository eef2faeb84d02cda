"""Time a model layer by layer and folded, in turns, beside the errors against the layers in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import check_count, refusal
from ..folding.folded import Folded
from ..nn.container import layer_by_layer
from ..testing.checks import reference, relative_error
from ..utils.html import Block, Printed, Table
from ..utils.timing import Timing, interleave
from .session import ENGINES, Session

LAYERS, FOLDED = "layers", "folded"
_BUDGET = 20.0  # seconds after which no further turn begins
_WHERE = "compare(model, folded, x)"


@dataclass(frozen=True, repr=False)
class Comparison(Printed):
    """The times of engines on one batch, and their errors; prints as a table.

    Attributes:
        batch: the number of samples.
        timings: seconds of a batch by engine: ``median``, ``low`` and ``high`` (the quartiles).
        errors: the largest ``‖y − ŷ‖ / ‖ŷ‖`` of a sample by engine; ŷ comes from the layers in float64.
    """

    batch: int
    timings: Mapping[str, Timing]
    errors: Mapping[str, float]

    @property
    def milliseconds(self) -> dict[str, float]:
        """The median time of a batch, by engine."""
        return {name: 1e3 * timing.median for name, timing in self.timings.items()}

    @property
    def ratios(self) -> dict[str, float]:
        """The median times over that of the layers; below 1 is faster."""
        layers = self.timings[LAYERS].median
        return {name: timing.median / layers for name, timing in self.timings.items()}

    def _blocks(self) -> Iterator[Block]:
        rows = [
            (name, f"{time:.3f}", f"{self.ratios[name]:.2f}", f"{self.errors[name]:.1e}")
            for name, time in self.milliseconds.items()
        ]
        yield Table(("engine", f"ms for a batch of {self.batch}", "time / layers", "error"), rows)


def compare(
    model: nn.Module,
    folded: Folded,
    x: Tensor,
    *,
    engines: Sequence[str] = (),
    executions: int = 45,
    threads: int | None = None,
) -> Comparison:
    """Time a model layer by layer, its fold in torch, and sessions in other engines, on one batch.

    All take turns in this process, with a pause between them, so that a busy machine slows all alike. A copy of the
    model runs layer by layer in evaluation mode. Slow models are called less often.

    Args:
        model: the model that was folded, on the CPU.
        folded: the result of :func:`conformallayers.fold`.
        x: a batch (B, *input_shape) in the dtype of the fold.
        engines: of :class:`conformallayers.Session`: ``"onnxruntime"``, ``"torch"``, ``"numpy"``, ``"c"``.
        executions: timed calls of each, three per turn.
        threads: of ONNX Runtime; None takes as many as torch has.

    Returns:
        A :class:`~conformallayers.session.compare.Comparison` with the engines ``"layers"`` and ``"folded"`` and those that were named; prints as a table.

    Examples:
        >>> import conformallayers as cl
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro(), cl.Conv2d(4, 4, 3), cl.ReSPro())
        >>> folded, x = cl.fold(model, (1, 8, 8)), torch.rand(3, 1, 8, 8)
        >>> result = cl.compare(model, folded, x, engines=["numpy"], executions=3)
        >>> list(result.milliseconds), result.ratios["layers"], max(result.errors.values()) < 5e-6
        (['layers', 'folded', 'numpy'], 1.0, True)
    """
    _check(model, folded, x, engines, executions, threads)
    layers = copy.deepcopy(model).eval()
    parameters = (p.dtype for p in layers.parameters() if p.is_floating_point())
    runs: dict[str, Callable[[], Tensor]] = {
        LAYERS: partial(run_module, layers, x.to(next(parameters, x.dtype))),
        FOLDED: partial(run_module, folded, x),
    }
    for name in engines:
        runs[name] = partial(Session(folded, engine=name, threads=threads), x)
    expected = reference(model, x)
    if expected.shape[1:] != folded.output_shape:
        got = f"{tuple(expected.shape[1:])} from the model, {folded.output_shape} from the fold"
        raise refusal(_WHERE, "outputs of one shape", got, "Pass the fold of this model.")
    errors = {name: relative_error(run(), expected) for name, run in runs.items()}
    return Comparison(len(x), interleave(runs, executions, budget=_BUDGET), errors)


def run_module(model: nn.Module, x: Tensor) -> Tensor:
    """Run a model for a timing; a ConformalLayers that is not folded runs layer by layer."""
    with torch.inference_mode(), layer_by_layer():
        y: Tensor = model(x)
    return y


def _check(
    model: object, folded: object, x: object, engines: object, executions: object, threads: object
) -> None:
    """Refuse arguments that cannot be timed or compared."""
    order = "The order is compare(model, folded, x)."
    if not isinstance(model, nn.Module) or isinstance(model, Folded):
        raise refusal(_WHERE, "the model first", f"a {type(model).__name__}", order)
    if not isinstance(folded, Folded):
        remedy = f"Fold it: cl.fold(model, input_shape). {order}"
        raise refusal(_WHERE, "a Folded second", type(folded).__name__, remedy)
    if not isinstance(x, Tensor):
        raise refusal(_WHERE, "a tensor third", type(x).__name__, "Use torch.as_tensor(x).")
    if x.dim() == 0 or not len(x):
        remedy = "Give one sample at least, (1, *input_shape)."
        raise refusal(_WHERE, "a batch of samples", f"a tensor {tuple(x.shape)}", remedy)
    places = {str(t.device) for t in (x, folded.anchor, *model.parameters(), *model.buffers())}
    if places != {"cpu"}:
        got, remedy = f"tensors on {', '.join(sorted(places))}", "Move them with .cpu()."
        raise refusal(_WHERE, "everything on the CPU, whose time is measured", got, remedy)
    if not isinstance(engines, (list, tuple)) or any(name not in ENGINES for name in engines):
        expected, remedy = f"a list of {', '.join(ENGINES)}", 'For one: engines=["c"].'
        raise refusal("compare(engines=...)", expected, repr(engines), remedy)
    counts = {"executions": executions, "threads": 1 if threads is None else threads}
    for name, count in counts.items():
        check_count(f"compare({name}=...)", count, "Leave it out.")
    run_module(folded, x)  # refuses other shapes and dtypes
