"""Open a network for predictions and run batches of samples: in torch, or a fold in numpy, which imports no torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import refusal, shape_text
from ...zoo.catalogue import network_files
from ..checks import require_choice
from ..data.images import Array, Unreadable
from ..training.saved_models import chosen_labels, load_model, locate, white_of
from .options import PredictOptions
from .output import Prediction, likeliest
from .samples import Broken, Sample

ENGINES = ("auto", "torch", "numpy", "onnxruntime")


@dataclass(frozen=True)
class ReadyNetwork:
    """A network that is ready to run.

    Args:
        run: (B, *input_shape), float32 → (B, classes).
        input_shape: of one sample.
        classes: the number of scores.
        labels: names of the classes, or None.
        white: value of a white pixel.
        pictures: whether it was trained on a folder of pictures: transparent pixels are then put over white, as in
            training.
        scales: whether images of another size are scaled: for folders of pictures and the zoo.
    """

    run: Callable[[Array], Array]
    input_shape: tuple[int, ...]
    classes: int
    labels: tuple[str, ...] | None
    white: float
    pictures: bool = False
    scales: bool = False

    def label(self, index: int) -> str:
        """Return the name of a class."""
        return str(index) if self.labels is None else self.labels[index]


def open_network(model: str | os.PathLike[str], options: PredictOptions) -> ReadyNetwork:
    """Load a model as :func:`run_predict` takes it, and fold it unless it is folded."""
    require_choice("predict --engine", options.engine, ENGINES, "Leave it out.")
    engine = options.engine
    if engine == "auto":  # the engines that start at once
        engine = "numpy" if importlib.util.find_spec("torch") is None else "torch"
    opened = _open_numpy(model) if engine == "numpy" else _open_torch(model, options, engine)
    run, shape, output, labels, white, pictures = opened
    path = os.fspath(model)
    where = f"predict {path}"
    if len(output) != 1 or not shape:
        expected, got = "a network that gives scores (B, classes)", f"(B, {shape_text(output)[1:]}"
        raise refusal(where, expected, got, "Add a Flatten and a head.")
    labels = chosen_labels(options.labels, labels, output[0], "predict", where)
    scales = pictures or (path in network_files() and not os.path.exists(path))
    return ReadyNetwork(run, shape, output[0], labels, white, pictures, scales)


def score(
    batch: Sequence[Sample | Broken], network: ReadyNetwork, options: PredictOptions
) -> list[Prediction | Broken]:
    """Read and run one batch; broken samples keep their places."""
    found: list[str | Broken] = []  # the name of a sample that was read
    values: list[Array] = []
    resize, opaque = options.resize or network.scales, network.pictures
    for sample in batch:
        if isinstance(sample, Broken):
            found.append(sample)
            continue
        try:
            values.append(sample.read(network.input_shape, network.white, resize, opaque))
            found.append(sample.name)
        except Unreadable as fault:
            found.append(Broken(sample.name, str(fault)))
    results: Iterator[Array] = iter(network.run(np.stack(values)) if values else ())
    predictions: list[Prediction | Broken] = []
    for entry in found:
        if isinstance(entry, Broken):
            predictions.append(entry)
        elif np.isfinite(scores := next(results)).all():
            predictions.append(likeliest(entry, scores, options.top, network.label))
        else:
            predictions.append(Broken(entry, "scores that are not finite"))
    return predictions


_Opened = tuple[
    Callable[[Array], Array], tuple[int, ...], tuple[int, ...], tuple[str, ...] | None, float, bool
]


def _open_numpy(model: str | os.PathLike[str]) -> _Opened:
    from ...numpy import load

    path = locate(model, "predict")
    net = load(path)
    white, pictures = white_of(net.about, path), "pictures" in (net.about or {})
    return net, net.input_shape, net.output_shape, net.labels, white, pictures


def _open_torch(model: str | os.PathLike[str], options: PredictOptions, engine: str) -> _Opened:
    import torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loaded = load_model(model, "predict")
    folded = loaded.fold("predict")
    network: Callable[[torch.Tensor], torch.Tensor] = folded
    if engine != "torch":
        from ...session import Session

        network = Session(folded, engine=engine, threads=options.threads)

    def run(batch: Array) -> Array:
        with torch.inference_mode():
            scores = network(torch.from_numpy(batch).to(folded.dtype))
        values: Array = scores.double().numpy()
        return values

    shapes = folded.input_shape, folded.output_shape
    return run, *shapes, loaded.labels, loaded.white, "pictures" in loaded.about
