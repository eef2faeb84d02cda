"""Run a fold on arrays or tensors in ONNX Runtime, torch or numpy."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .errors import SEVERAL, ConformalError, check_count, refusal
from .folding.folded import Folded
from .folding.save import load
from .functional import full_precision
from .recipe.numpy.network import Network, check_batch
from .recipe.onnx.export import check_engine, open_session
from .recipe.places import Array
from .recipe.recipe import unsupported
from .zoo.catalogue import network_files

Engine = Callable[[Array], Array]
T = TypeVar("T", Array, Tensor)
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
    return Network(recipe, _DTYPES[folded.dtype], strategy=folded.strategy)


ENGINES: Mapping[str, Callable[[Folded, int | None], Engine]] = {
    "onnxruntime": open_session,
    "torch": _torch,
    "numpy": _numpy,
}


class Session:
    """Run a fold in ONNX Runtime, torch or numpy; several threads may call a session at once.

    ``"onnxruntime"`` needs the extra ``onnx`` and a fold in float32; its graph is built in memory. ``"auto"`` takes ONNX Runtime if it is
    installed and has all operations of the fold, else torch. Every engine but torch is compared with torch before it is used.

    Args:
        folded: a :class:`Folded` on the CPU in float32 or float64, or the path of a file of :func:`conformallayers.save`.
        engine: ``"auto"``, ``"onnxruntime"``, ``"torch"`` or ``"numpy"``; the attribute ``engine`` then names the chosen one.
        threads: of ONNX Runtime; None takes as many as torch has. Those of torch and numpy belong to the process.

    Shape:
        (B, *input_shape) → (B, *output_shape), arrays or tensors; real numbers of any dtype are converted to that of the fold.
        Other spatial sizes that the fold takes run in torch, whatever the engine.

    Examples:
        >>> import conformallayers as cl
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro(), cl.Flatten())
        >>> session = cl.Session(cl.fold(model, (1, 8, 8)), engine="numpy")
        >>> session(np.ones((2, 1, 8, 8))).shape
        (2, 144)
    """

    def __init__(
        self,
        folded: Folded | str | os.PathLike[str],
        *,
        engine: str = "auto",
        threads: int | None = None,
    ) -> None:
        if engine != "auto" and engine not in ENGINES:
            expected, remedy = f"one of auto, {', '.join(ENGINES)}", "Leave it out."
            raise refusal("Session(engine=...)", expected, repr(engine), remedy)
        if threads is not None:
            check_count("Session(threads=...)", threads, "None takes as many as torch has.")
        self.folded = copy.deepcopy(_fold(folded))  # no later change may reach some engines only
        self.threads = threads
        self.input_shape, self.output_shape = self.folded.input_shape, self.folded.output_shape
        self.engine, self._run = self._chosen() if engine == "auto" else self._built(engine)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the fold; the engine is built again."""
        return partial(Session, engine=self.engine, threads=self.threads), (self.folded,)

    def __repr__(self) -> str:
        return f"Session({self.folded.extra_repr()}, engine={self.engine!r})"

    def __call__(self, x: T) -> T:
        """Run a batch; a tensor gives a tensor, an array an array."""
        if not isinstance(x, Tensor):
            return self._call(np.asarray(x))
        if x.device.type != "cpu":
            remedy = "Move it with x.cpu(); on another device call the fold itself."
            raise refusal("Session", "a tensor on the CPU", f"one on {x.device}", remedy)
        numbers = x.detach().resolve_neg()
        numbers = numbers.to(self.folded.dtype) if x.is_floating_point() else numbers
        return torch.from_numpy(self._call(numbers.numpy()))

    def _call(self, x: Array) -> Array:
        dtype = _DTYPES[self.folded.dtype]
        run, shape = self._run, self.input_shape
        if x.shape[1:] != shape and self.folded.resizes(x.shape):
            run, shape = _torch(self.folded, self.threads), x.shape[1:]
        if x.dtype != dtype or x.shape[1:] != shape or not len(x):
            check_batch("Session", x, shape, self.folded.about)
        # A copy where torch would refuse: of negative strides, other byte orders or read-only memory.
        x = np.require(x, dtype, ["C", "W"])
        return run(x) if len(x) else np.empty((0, *self.output_shape), dtype)

    def _chosen(self) -> tuple[str, Engine]:
        """Return ONNX Runtime if it is installed and runs this fold, else torch."""
        if find_spec("onnxruntime") is not None:
            with suppress(ConformalError):
                return self._built("onnxruntime")
        return self._built("torch")

    def _built(self, name: str) -> tuple[str, Engine]:
        """Return an engine after comparing its outputs with those of torch."""
        run = ENGINES[name](self.folded, self.threads)
        if name != "torch":
            where, remedy = f"Session(engine={name!r})", 'Use engine="torch".'
            check_engine(where, name, run, self.folded, remedy)
        return name, run


def _fold(folded: Any) -> Folded:
    """Return a fold that every engine can read, or refuse it."""
    if isinstance(folded, (str, os.PathLike)):
        if str(folded) in network_files() and not os.path.exists(folded):
            remedy = f"Load it with cl.zoo.load({str(folded)!r})."
            raise refusal("Session", "a Folded or a path", "the name of a network", remedy)
        folded = load(folded)
    if not isinstance(folded, Folded):
        remedy = "Fold it first: cl.Session(cl.fold(model, input_shape))."
        raise refusal("Session", "a Folded or a path", type(folded).__name__, remedy)
    if folded.anchor.device.type != "cpu":
        got, remedy = f"one on {folded.anchor.device}", "Move it with folded.cpu()."
        raise refusal("Session", "a fold on the CPU", got, remedy)
    if folded.dtype not in _DTYPES:
        got, remedy = str(folded.dtype), "Fold with dtype=torch.float32."
        raise refusal("Session", "a fold in float32 or float64", got, remedy)
    for operation in folded.recipe.operations:
        if getattr(operation, "what", "").startswith(SEVERAL):
            raise unsupported(operation, "Session", "")
    return folded
