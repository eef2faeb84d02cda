"""Open a network for predictions: in torch, or a fold in numpy, which imports no torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ...errors import refusal, shape_text
from ...zoo.catalogue import network_files
from ..checks import require_choice
from ..training.saved_models import (
    chosen_labels,
    input_dtype,
    load_model,
    locate,
    ready,
    white_of,
)
from .arrays import Array
from .options import PredictOptions

ENGINES = ("auto", "torch", "numpy", "onnxruntime")


@dataclass(frozen=True)
class ReadyNetwork:
    """A network that is ready to run.

    Args:
        run: (B, *input_shape), float32 → (B, classes).
        input_shape: of one sample.
        output_shape: of its scores.
        labels: names of the classes, or None.
        white: value of a white pixel.
        pictures: whether it was trained on a folder of pictures: transparent pixels are then put over white, as in
            training.
        scales: whether images of another size are scaled: for folders of pictures and the zoo.
    """

    run: Callable[[Array], Array]
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    labels: tuple[str, ...] | None
    white: float
    pictures: bool = False
    scales: bool = False

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.output_shape[0]

    def label(self, index: int) -> str:
        """Return the name of a class."""
        return str(index) if self.labels is None else self.labels[index]


def open_network(model: str | os.PathLike[str], options: PredictOptions) -> ReadyNetwork:
    """Load a model as :func:`run_predict` takes it, and fold it unless it is folded."""
    require_choice("predict --engine", options.engine, ENGINES, "Leave it out.")
    engine = options.engine
    if engine == "auto":  # those that start at once
        engine = "numpy" if importlib.util.find_spec("torch") is None else "torch"
    network = _open_numpy(model) if engine == "numpy" else _open_torch(model, options, engine)
    where, output = f"predict {os.fspath(model)}", network.output_shape
    if len(output) != 1 or not network.input_shape:
        expected, got = "a network that gives scores (B, classes)", f"(B, {shape_text(output)[1:]}"
        raise refusal(where, expected, got, "Add a Flatten and a head.")
    labels = chosen_labels(options.labels, network.labels, network.classes, "predict", where)
    path = os.fspath(model)
    shipped = path in network_files() and not os.path.exists(path)
    return replace(network, labels=labels, scales=network.pictures or shipped)


def _open_numpy(model: str | os.PathLike[str]) -> ReadyNetwork:
    from ...numpy import load

    path = locate(model, "predict")
    net = load(path)
    white, pictures = white_of(net.about, path), "pictures" in (net.about or {})
    return ReadyNetwork(net, net.input_shape, net.output_shape, net.labels, white, pictures)


def _open_torch(
    model: str | os.PathLike[str], options: PredictOptions, engine: str
) -> ReadyNetwork:
    import torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loaded = load_model(model, "predict")
    module, shape = ready(loaded, "predict")
    dtype = input_dtype(module)

    def run(batch: Array) -> Array:
        with torch.inference_mode():
            scores = network(torch.from_numpy(batch).to(dtype))
        values: Array = scores.double().numpy()
        return values

    network: Callable[[torch.Tensor], torch.Tensor] = module
    if engine != "torch":
        from ...session import Session

        network = Session(module, engine=engine, threads=options.threads)  # type: ignore[arg-type]

    output = run(np.zeros((1, *shape), np.float32)).shape[1:]
    pictures = loaded.pictures is not None
    return ReadyNetwork(run, shape, output, loaded.labels, loaded.white, pictures)
