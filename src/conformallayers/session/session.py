"""Run a fold in one of several engines, the fastest by default."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import check_count, refusal, refuse_bytes, shape_text
from ..folding.files import load
from ..folding.folded import Folded
from ..functional import full_precision
from ..recipe.numpy.network import Network
from ..recipe.onnx.export import check_engine, open_session
from ..recipe.places import Array
from ..utils.html import Block, Printed, Table
from ..utils.timing import call_seconds, interleave
from .compiled import compile_fold

Engine = Callable[[Array], Array]
T = TypeVar("T", Array, Tensor)
_EXECUTIONS, _BUDGET = 15, 2.0  # of a race, and seconds after which it goes no further
_FAR = 10.0  # times as slow as the fastest in one call: too far behind to race
_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}


def _torch(folded: Folded, threads: int | None) -> Engine:
    def run(x: Array) -> Array:
        batch = torch.from_numpy(x)
        with torch.inference_mode(), full_precision(batch):
            return folded(batch).numpy()  # type: ignore[no-any-return]

    return run


def _numpy(folded: Folded, threads: int | None) -> Engine:
    recipe = folded.recipe.with_constants(lambda _, array: array.numpy())
    dtype = _DTYPES[folded.dtype]
    return Network(recipe, dtype, strategy=folded.strategy, origin=None, labels=None, about=None)


def _c(folded: Folded, threads: int | None) -> Engine:
    if folded.dtype != torch.float32:
        remedy = "Fold with dtype=torch.float32."
        raise refusal('Session(engine="c")', "a fold in float32", str(folded.dtype), remedy)
    return compile_fold(folded)


ENGINES: Mapping[str, Callable[[Folded, int | None], Engine]] = {
    "onnxruntime": open_session,
    "torch": _torch,
    "numpy": _numpy,
    "c": _c,
}


@dataclass(frozen=True, repr=False)
class Race(Printed):
    """Milliseconds of each engine for a batch, or why it did not run; prints as a table."""

    engine: str
    batch: int | None = None
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def _blocks(self) -> Iterator[Block]:
        if self.batch is None:
            yield f"engine {self.engine}, as asked for"
            return
        rows = [
            (f"{'→' if name == self.engine else ' '} {name}", f"{time:.3f}", "")
            for name, time in self.milliseconds.items()
        ]
        rows += [(f"  {name}", "", reason) for name, reason in self.reasons.items()]
        yield Table(("engine", f"ms for a batch of {self.batch}", "why not"), rows)


class Session:
    """Run a fold in the engine that is fastest for it.

    ``"onnxruntime"`` needs the extra ``onnx``; its graph is built in memory. ``"c"`` compiles the C export for this machine
    and keeps the result in the user's cache; it needs a compiler and float32. ``"torch"`` and ``"numpy"`` are always there.
    ``"auto"`` times the available engines on the first batch and keeps the fastest; for another batch size another may be fastest.
    Every engine but torch is compared with torch before it is used. Several threads may call a session at once.

    Args:
        folded: a :class:`Folded` on the CPU in float32 or float64, or the path of a file of :func:`conformallayers.save`.
        engine: ``"auto"``, ``"onnxruntime"``, ``"torch"``, ``"numpy"`` or ``"c"``.
        threads: of ONNX Runtime; None takes as many as torch has. C uses one; those of torch and numpy belong to the process.

    Shape:
        (B, *input_shape) → (B, *output_shape), arrays or tensors; real numbers of any dtype are converted to that of the fold

    Examples:
        >>> import conformallayers as cl
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro(), cl.Flatten())
        >>> session = cl.Session(cl.fold(model, (1, 8, 8)), engine="numpy")
        >>> session(np.ones((2, 1, 8, 8))).shape
        (2, 144)
        >>> print(session.explain())
        engine numpy, as asked for
    """

    def __init__(
        self,
        folded: Folded | str | os.PathLike[str],
        *,
        engine: str = "auto",
        threads: int | None = None,
    ) -> None:
        if engine != "auto" and engine not in ENGINES:
            expected, remedy = f"one of auto, {', '.join(ENGINES)}", '"auto" takes the fastest.'
            raise refusal("Session(engine=...)", expected, repr(engine), remedy)
        if threads is not None:
            check_count("Session(threads=...)", threads, "None takes as many as torch has.")
        self.folded = copy.deepcopy(_fold(folded))  # no later change may reach some engines only
        self.threads = threads
        self.input_shape, self.output_shape = self.folded.input_shape, self.folded.output_shape
        self._dtype, self._array_dtype = self.folded.dtype, _DTYPES[self.folded.dtype]
        self._lock = threading.Lock()
        self._race: Race | None = None
        self._run: Engine | None = None
        if engine != "auto":
            self._run, self._race = self._built(engine), Race(engine)

    @property
    def engine(self) -> str | None:
        """The engine that runs; None before the first call of an ``"auto"`` session."""
        return None if self._race is None else self._race.engine

    def explain(self) -> Race:
        """Return the times of all engines and the choice; prints as a table."""
        if self._race is None:
            remedy = "Call the session once: it chooses by the first batch."
            raise refusal("Session.explain()", "a session that has run", "a new one", remedy)
        return self._race

    def __call__(self, x: T) -> T:
        """Run a batch; a tensor gives a tensor, an array an array."""
        if isinstance(x, Tensor):
            return torch.from_numpy(self._call(self._numbers(x)))
        return self._call(x if type(x) is np.ndarray else np.asanyarray(x))

    def _call(self, x: Array) -> Array:
        fits = x.dtype == self._array_dtype and x.shape[1:] == self.input_shape
        if fits and self._run and type(x) is np.ndarray and x.flags.carray and len(x):
            return self._run(x)  # a single image may take less time than all checks below
        if x.dtype.kind not in "fiub" or isinstance(x, np.ma.MaskedArray):
            got = "a masked array" if x.dtype.kind in "fiub" else f"an array of {x.dtype}"
            raise refusal("Session", "real numbers", got, "Convert them first.")
        refuse_bytes("Session", x.dtype.name, self.folded.about)
        if x.ndim == 0 or x.shape[1:] != self.input_shape:
            unbatched = x.shape == self.input_shape
            remedy = "Add the batch axis with x[None]." if unbatched else "Fold for this shape."
            expected = f"a batch of samples of shape {shape_text(self.input_shape)}"
            raise refusal("Session", expected, f"an array of shape {x.shape}", remedy)
        # A copy where torch would refuse: of negative strides, other byte orders or read-only memory.
        x = np.require(x, self._array_dtype, ["C", "W"])
        if not len(x):
            return np.empty((0, *self.output_shape), x.dtype)
        return (self._run or self._fastest(x))(x)

    def _numbers(self, x: Tensor) -> Array:
        if x.dtype == self._dtype:
            with suppress(RuntimeError, TypeError):  # such tensors are refused or converted below
                return x.numpy()
        if x.device.type != "cpu":
            remedy = "Move it with x.cpu(); on another device call the fold itself."
            raise refusal("Session", "a tensor on the CPU", f"one on {x.device}", remedy)
        if x.layout != torch.strided or x.is_quantized:
            got = f"a tensor of {x.dtype}, {x.layout}"
            raise refusal("Session", "a dense tensor", got, "Convert it with x.to_dense().")
        x = x.detach().resolve_conj().resolve_neg()
        array: Array = (x.to(self._dtype) if x.is_floating_point() else x).numpy()
        return array

    def _built(self, name: str) -> Engine:
        """Return an engine that gives the numbers of torch."""
        run = ENGINES[name](self.folded, self.threads)
        if name != "torch":
            where, remedy = f"Session(engine={name!r})", 'Use engine="torch".'
            check_engine(where, name, run, self.folded, remedy)
        return run

    def _fastest(self, x: Array) -> Engine:
        """Race the engines on a batch, once, and return the winner."""
        with self._lock:
            if self._run is not None:
                return self._run
            runs: dict[str, Engine] = {}
            reasons: dict[str, str] = {}
            for name in ENGINES:
                try:
                    runs[name] = self._built(name)
                    runs[name](x)
                except Exception as error:  # other packages raise any type
                    if name == "torch":
                        raise
                    runs.pop(name, None)
                    reasons[name] = str(error) or type(error).__name__
            calls = {name: partial(run, x) for name, run in runs.items()}
            first = {name: call_seconds(call) for name, call in calls.items()}
            for name, seconds in first.items():
                if seconds > _FAR * min(first.values()):
                    del calls[name]
                    ratio = seconds / min(first.values())
                    reasons[name] = f"{ratio:.0f} times as slow as the fastest in one call"
            times = interleave(calls, _EXECUTIONS, budget=_BUDGET)
            medians = {name: 1e3 * timing.median for name, timing in times.items()}
            best = min(medians, key=lambda name: medians[name])
            self._race, self._run = Race(best, len(x), medians, reasons), runs[best]
            return self._run


def _fold(folded: Any) -> Folded:
    """Return a fold that every engine can read, or refuse it."""
    if isinstance(folded, (str, os.PathLike)):
        path, folded = os.fspath(folded), load(folded)
        if not isinstance(folded, Folded):
            remedy = "Fold it: cl.Session(cl.fold(cl.load(path), input_shape))."
            raise refusal("Session", f"a fold in {path}", "a model", remedy)
    if not isinstance(folded, Folded):
        remedy = "Fold it first: cl.Session(cl.fold(model, input_shape))."
        raise refusal("Session", "a Folded or a path", type(folded).__name__, remedy)
    if folded.anchor.device.type != "cpu":
        got, remedy = f"one on {folded.anchor.device}", "Move it with folded.cpu()."
        raise refusal("Session", "a fold on the CPU", got, remedy)
    if folded.dtype not in _DTYPES:
        got, remedy = str(folded.dtype), "Fold with dtype=torch.float32."
        raise refusal("Session", "a fold in float32 or float64", got, remedy)
    return folded
