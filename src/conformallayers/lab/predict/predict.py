"""Predict from paths to rows, one batch at a time, in the order of the paths; in torch, numpy or ONNX Runtime.

Importing this file does not import torch, and a fold in numpy does without.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any, TextIO

import numpy as np

from ...errors import ClosedPipe, first_line, missing_extra, refusal, shape_text
from ...utils.files import staged_files
from ...utils.progress import progress
from ...utils.text import csv_text, printable
from ...zoo.catalogue import network_files
from ..checks import require_choice, require_positive
from ..data.images import Array, Unreadable, need_pillow
from ..options import PredictOptions
from ..training.saved_models import chosen_labels, load_model, locate, white_of
from .samples import Broken, Sample, find_samples

FORMATS = ("table", "csv", "jsonl")
_FIELDS = ("label", "class", "probability", "score")  # of a Choice, in files
_WIDEST = 60  # most characters of the column of names
ENGINES = ("auto", "torch", "numpy", "onnxruntime")
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
Batch = Sequence[Sample | Broken]


@dataclass(frozen=True)
class Choice:
    """A class: its label and index, its softmax probability, and its score."""

    label: str
    index: int
    probability: float
    score: float


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of one sample, best first."""

    name: str
    choices: tuple[Choice, ...]


Scored = list[Prediction | Broken]


def run_predict(
    model: str | os.PathLike[str],
    paths: Sequence[str],
    options: PredictOptions | None = None,
    *,
    stdout: TextIO | None = None,
) -> int:
    """Write a row for every sample; report broken samples on standard error and skip them.

    Args:
        model: a file of :func:`conformallayers.save`, a run folder, a checkpoint, or a name of the zoo.
        paths: files and folders.
        options: how to read, run and write.
        stdout: None takes that of the process.

    Returns:
        The number of broken samples.
    """
    options = options or PredictOptions()
    _check(options)
    need_pillow()
    network = open_network(model, options)
    samples = list(find_samples(paths, network.input_shape))
    batches = [samples[i : i + options.batch] for i in range(0, len(samples), options.batch)]
    with contextlib.ExitStack() as stack:
        scored: Iterable[Scored] = (score(batch, network, options) for batch in batches)
        if options.ray and batches:
            scored = stack.enter_context(_ray_batches(batches, model, options))
        if options.out is None:
            stream = sys.stdout if stdout is None else stdout
        else:
            (staged,) = stack.enter_context(staged_files(options.out))
            text = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
            stream = stack.enter_context(open(staged, "w", **text))  # type: ignore[call-overload]
        if not stream.isatty():
            scored = progress(scored, len(batches), "images")
        writer = Writer(stream, options.format, min(options.top, network.classes))
        return _write(scored, writer)


def _check(options: PredictOptions) -> None:
    if options.address is not None and not options.ray:
        raise refusal("predict --address", "--ray beside it", "none", "Add --ray.")
    require_positive("predict", options, "top", "batch", "workers")
    require_choice("predict --format", options.format, FORMATS, "Leave it out for a table.")
    require_choice("predict --engine", options.engine, ENGINES, "Leave it out.")
    if options.out is not None and options.out.is_dir():
        got = f"the folder {options.out}"
        raise refusal("predict --out", "a file", got, "Name a file in it.")


def _write(batches: Iterable[Scored], writer: Writer) -> int:
    """Write every batch as soon as it is predicted; return the number of broken samples."""
    good = broken = 0
    for batch in batches:
        rows = [entry for entry in batch if isinstance(entry, Prediction)]
        for entry in batch:
            if isinstance(entry, Broken):
                line = f"conformallayers: {printable(entry.name)}: {printable(entry.reason)}"
                print(line, file=sys.stderr)
        good, broken = good + len(rows), broken + len(batch) - len(rows)
        if rows:
            writer.write(rows)
    if not good:
        got = f"none that could be read ({broken} broken)" if broken else "none"
        remedy = "Name images, .npy files, or folders with them."
        raise refusal("predict PATHS", "something to predict", got, remedy)
    print(f"{good} predicted, {broken} broken", file=sys.stderr)
    return broken


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
    pictures: bool
    scales: bool

    def label(self, index: int) -> str:
        """Return the name of a class."""
        return str(index) if self.labels is None else self.labels[index]


def open_network(model: str | os.PathLike[str], options: PredictOptions) -> ReadyNetwork:
    """Load a fold, or fold a run."""
    engine, path = options.engine, os.fspath(model)
    if engine == "auto":  # the engines that start at once
        engine = "numpy" if importlib.util.find_spec("torch") is None else "torch"
    if engine == "numpy":
        from ...numpy import load

        net: Any = load(locate(model, "predict"))
        run = net
    else:
        net = load_model(model, "predict").fold("predict")
        run = _torch_runner(net, engine, options.threads)
    about, where = net.about or {}, f"predict {path}"
    if len(net.output_shape) != 1 or not net.input_shape:
        got = f"(B, {shape_text(net.output_shape)[1:]}"
        expected = "a network that gives scores (B, classes)"
        raise refusal(where, expected, got, "Add a Flatten and a head.")
    classes, pictures = net.output_shape[0], "pictures" in about
    labels = chosen_labels(options.labels, net.labels, classes, "predict", where)
    scales = options.resize or pictures or (path in network_files() and not os.path.exists(path))
    white = white_of(about, path)
    return ReadyNetwork(run, net.input_shape, classes, labels, white, pictures, scales)


def _torch_runner(folded: Any, engine: str, threads: int | None) -> Callable[[Array], Array]:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    network: Callable[[torch.Tensor], torch.Tensor] = folded
    if engine != "torch":
        from ...session import Session

        network = Session(folded, engine=engine, threads=threads)

    def run(batch: Array) -> Array:
        with torch.inference_mode():
            values: Array = network(torch.from_numpy(batch).to(folded.dtype)).double().numpy()
        return values

    return run


def score(batch: Batch, network: ReadyNetwork, options: PredictOptions) -> Scored:
    """Read and run one batch; broken samples keep their places."""
    how = network.input_shape, network.white, network.scales, network.pictures
    found: Scored = []
    values: list[Array] = []
    places: list[tuple[int, str]] = []  # of the samples that were read, in the batch
    for sample in batch:
        if isinstance(sample, Sample):
            try:
                values.append(sample.read(*how))
                places.append((len(found), sample.name))
                sample = Broken(sample.name, "scores that are not finite")
            except Unreadable as fault:
                sample = Broken(sample.name, str(fault))
        found.append(sample)
    if values:
        for (place, name), scores in zip(places, network.run(np.stack(values)), strict=True):
            if np.isfinite(scores).all():
                found[place] = likeliest(name, scores, options.top, network.label)
    return found


# -- writing --------------------------------------------------------------------------------------


def likeliest(name: str, scores: Array, top: int, label: Callable[[int], str]) -> Prediction:
    """Return the classes with the largest scores; ties keep the order of the classes.

    Examples:
        >>> likeliest("a.png", np.array([0.0, np.log(3.0)]), 1, str).choices
        (Choice(label='1', index=1, probability=0.75, score=1.09861),)
    """
    wide = scores.astype(np.float64)
    powers = np.exp(wide - wide.max())
    shares = powers / powers.sum()
    order = np.argsort(-wide, kind="stable")[:top]
    return Prediction(
        name,
        tuple(Choice(label(int(i)), int(i), _digits(shares[i]), _digits(wide[i])) for i in order),
    )


def _digits(value: Any) -> float:
    """Round to six significant digits, the precision of float32."""
    return float(f"{float(value):.6g}")


class Writer:
    """Write predictions in one of the formats."""

    def __init__(self, stream: TextIO, format: str, top: int) -> None:
        self._stream, self._top = stream, top
        self._rows = {"table": self._table, "csv": self._csv, "jsonl": self._jsonl}[format]
        self._begun = False
        self._widths = [0] * (top + 1)

    def write(self, predictions: Sequence[Prediction]) -> None:
        """Write rows and flush them; raise ClosedPipe if nobody reads them any more."""
        try:
            self._rows(predictions)
            self._stream.flush()
        except BrokenPipeError as error:
            raise ClosedPipe from error
        self._begun = True

    def _csv(self, predictions: Sequence[Prediction]) -> None:
        rows = csv.writer(self._stream, lineterminator="\n")
        if not self._begun:
            ranks = ["", *(f"_{rank}" for rank in range(2, self._top + 1))]
            rows.writerow(["path", *(f"{name}{rank}" for rank in ranks for name in _FIELDS)])
        for found in predictions:
            values = (value for choice in found.choices for value in astuple(choice))
            rows.writerow(map(csv_text, (found.name, *values)))

    def _jsonl(self, predictions: Sequence[Prediction]) -> None:
        for found in predictions:
            top = [dict(zip(_FIELDS, astuple(choice), strict=True)) for choice in found.choices]
            self._stream.write(json.dumps({"path": found.name, "top": top}) + "\n")

    def _table(self, predictions: Sequence[Prediction]) -> None:
        rows = [[printable(p.name), *map(_cell, p.choices)] for p in predictions]
        if not self._begun:
            rows.insert(0, ["image", *(f"{rank}." for rank in range(1, self._top + 1))])
        for row in rows:  # a column never gets narrower
            self._widths = [max(w, len(cell)) for w, cell in zip(self._widths, row, strict=True)]
        self._widths[0] = min(self._widths[0], _WIDEST)
        for row in rows:
            cells = (cell.ljust(w) for w, cell in zip(self._widths, row, strict=True))
            self._stream.write("  ".join(cells).rstrip() + "\n")


def _cell(choice: Choice) -> str:
    return f"{printable(choice.label)} {100 * choice.probability:.1f} % ({choice.score:.2f})"


# -- Ray --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ray_batches(
    batches: Sequence[Batch], model: str | os.PathLike[str], options: PredictOptions
) -> Iterator[Iterator[Scored]]:
    """Share batches among processes with Ray Data; yield their predictions in order, then leave the cluster."""
    for name, value in _QUIET.items():  # before the import, which reads them
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise missing_extra("ray[data]", "ray", "predict --ray") from error
    place: dict[str, Any] = {"address": options.address}
    if options.address is None:  # only with "local" does Ray ignore clusters that already run
        place = {"address": "local", "num_cpus": options.workers, "include_dashboard": False}
    try:
        ray.init(**place, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        remedy = "Check it and RAY_AUTH_TOKEN; without --address a local cluster is started."
        expected = "a Ray cluster that answers"
        raise refusal("predict --address", expected, first_line(error), remedy) from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        ray.data.DataContext.get_current().execution_options.preserve_order = True
        # A row of the data is a batch: samples go out, predictions come back.
        data = ray.data.from_items([{"batch": pickle.dumps(batch)} for batch in batches])
        work = {"model": os.fspath(model), "options": options}
        done = data.map(_predicted, fn_kwargs=work, concurrency=options.workers)
        yield (pickle.loads(row["batch"]) for row in done.iter_rows())
    finally:
        ray.shutdown()


def _predicted(row: dict[str, Any], model: str, options: PredictOptions) -> dict[str, Any]:
    """Predict one batch in a Ray process."""
    batch = pickle.loads(row["batch"])
    return {"batch": pickle.dumps(score(batch, _opened(model, options), options))}


_opened = lru_cache(maxsize=1)(open_network)  # once per process
