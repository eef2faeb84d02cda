"""What computes the scores: a fold or a model in torch, or a fold in numpy, which imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import refusal, shape_text
from ..training.saved_models import checked_labels, load_model, locate, read_labels, ready, white_of
from .arrays import Array

ENGINES = ("auto", "torch", "numpy")


@dataclass(frozen=True)
class Network:
    """A network that is ready to run.

    Args:
        run: (B, *shape), float32 → (B, classes).
        shape: of one sample.
        classes: how many there are.
        labels: their names, or None.
        white: what a white pixel is.
    """

    run: Callable[[Array], Array]
    shape: tuple[int, ...]
    classes: int
    labels: tuple[str, ...] | None
    white: float

    def name(self, index: int) -> str:
        """Return what a class is called."""
        return str(index) if self.labels is None else self.labels[index]


@dataclass(frozen=True)
class Setup:
    """How to make a network ready, here or in another process.

    Args:
        model: a file of :func:`conformallayers.save`, the folder of a run, or a checkpoint.
        engine: ``"torch"``, ``"numpy"``, or ``"auto"``: torch where it is installed.
        threads: of torch; None leaves them alone.
        labels: a text file with one label a line; None takes those of the model.
    """

    model: str
    engine: str = "auto"
    threads: int | None = None
    labels: Path | None = None

    def open(self) -> Network:
        """Load the model, and fold it unless it is folded."""
        if self.engine not in ENGINES:
            expected = f"one of {', '.join(ENGINES)}"
            raise refusal("predict --engine", expected, repr(self.engine), "Leave it out.")
        with_torch = self.engine == "torch"
        if self.engine == "auto":
            with_torch = importlib.util.find_spec("torch") is not None
        run, shape, output, labels, white = self._torch() if with_torch else self._numpy()
        if len(output) != 1 or len(shape) < 1:
            expected, got = (
                "a network that gives scores (B, classes)",
                f"(B, {shape_text(output)[1:]}",
            )
            raise refusal(f"predict {self.model}", expected, got, "Add a Flatten and a head.")
        where = f"predict {self.model}"
        if self.labels is not None:
            labels, where = read_labels(self.labels), f"predict --labels {self.labels}"
        return Network(run, shape, output[0], checked_labels(labels, output[0], where), white)

    def _numpy(self) -> _Parts:
        from ...numpy import load

        path, kind = locate(self.model, "predict")
        if kind == "checkpoint":
            remedy = "Fold it with conformallayers fold, or use --engine torch."
            raise refusal("predict --engine numpy", "a fold", "a training checkpoint", remedy)
        net = load(path)
        white = white_of(net.about, path)
        return net, net.input_shape, net.output_shape, net.labels, white

    def _torch(self) -> _Parts:
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        model = load_model(self.model, "predict")
        module = ready(model, "predict")
        tensors = (*module.parameters(), *module.buffers())
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        dtype = getattr(module, "dtype", dtype)  # a fold has its own

        def run(batch: Array) -> Array:
            with torch.inference_mode():
                scores = module(torch.from_numpy(batch).to(dtype))
            values: Array = scores.double().numpy()
            return values

        shape = getattr(module, "input_shape", None) or model.shape
        assert shape is not None  # or ready would have asked for it
        output = run(np.zeros((1, *shape), np.float32)).shape[1:]
        return run, shape, output, model.labels, white_of(model.about, model.path)


_Parts = tuple[
    Callable[[Array], Array], tuple[int, ...], tuple[int, ...], tuple[str, ...] | None, float
]
