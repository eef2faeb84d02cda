"""Predict from paths to rows, one batch at a time, in the order of the paths."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import BinaryIO, TextIO, TypeVar

import numpy as np
from rich.progress import Progress

from ...errors import refusal
from ...utils.files import staged_files
from ..checks import require_choice, require_positive
from .arrays import Array, Unreadable
from .images import need_pillow
from .network import ReadyNetwork, open_network
from .options import PredictOptions
from .output import FORMATS, Prediction, Writer, likeliest, printable, progress_bar
from .samples import STANDARD_INPUT, Broken, Sample, find_samples

T = TypeVar("T")


def run_predict(
    model: str | os.PathLike[str],
    paths: Sequence[str],
    options: PredictOptions | None = None,
    *,
    stdin: BinaryIO | None = None,
    stdout: TextIO | None = None,
) -> int:
    """Write a row for every sample; report broken samples on standard error and skip them.

    Args:
        model: a file of :func:`conformallayers.save`, a run folder, a checkpoint, or a name of the zoo.
        paths: files, folders, or ``-`` for standard input.
        options: how to read, run and write.
        stdin, stdout: None takes those of the process.

    Returns:
        The number of broken samples.
    """
    options = options or PredictOptions()
    _check(options)
    need_pillow()
    network = open_network(model, options)
    stdin = sys.stdin.buffer if stdin is None else stdin
    found = find_samples(paths, network.input_shape, stdin)

    def count() -> int | None:
        if STANDARD_INPUT in paths:
            return None
        return sum(1 for _ in find_samples(paths, network.input_shape))

    with contextlib.ExitStack() as stack:
        batches: Iterator[list[Prediction | Broken]]
        if options.ray:
            from .sharding import shards

            batches = stack.enter_context(shards(found, model, options))
        else:
            batches = (score(batch, network, options) for batch in in_batches(found, options.batch))
        if options.out is None:
            stream = sys.stdout if stdout is None else stdout
            return _write(batches, stream, network, options, progress_bar(stream, count))
        (staged,) = stack.enter_context(staged_files(options.out))
        with open(staged, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            return _write(batches, file, network, options, progress_bar(file, count))


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


def in_batches(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of ``size`` values, and the rest; only one of them is in memory."""
    left = iter(values)
    while batch := list(islice(left, size)):
        yield batch


def _write(
    batches: Iterable[list[Prediction | Broken]],
    stream: TextIO,
    network: ReadyNetwork,
    options: PredictOptions,
    bar: Progress,
) -> int:
    """Write every batch as soon as it is predicted; return the number of broken samples."""
    writer = Writer(stream, options.format, min(options.top, network.classes))
    good = broken = 0
    with bar:
        for batch in batches:
            rows = [entry for entry in batch if isinstance(entry, Prediction)]
            for entry in batch:
                if isinstance(entry, Broken):
                    line = f"conformallayers: {printable(entry.name)}: {printable(entry.reason)}"
                    bar.console.print(
                        line, markup=False, emoji=False, highlight=False, soft_wrap=True
                    )
            good, broken = good + len(rows), broken + len(batch) - len(rows)
            if rows:
                writer.write(rows)
            bar.advance(bar.task_ids[0], len(batch))
    if not good:
        got = f"none that could be read ({broken} broken)" if broken else "none"
        remedy = "Name images, .npy files, folders with them, or - for standard input."
        raise refusal("predict PATHS", "something to predict", got, remedy)
    print(f"{good} predicted, {broken} broken", file=sys.stderr)
    return broken


def _check(options: PredictOptions) -> None:
    for name in ("workers", "address"):
        if getattr(options, name) is not None and not options.ray:
            raise refusal(f"predict --{name}", "--ray beside it", "none", "Add --ray.")
    require_positive("predict", options, "top", "batch", "workers")
    require_choice("predict --format", options.format, FORMATS, "Leave it out for a table.")
    if options.out is not None and options.out.is_dir():
        got = f"the folder {options.out}"
        raise refusal("predict --out", "a file", got, "Name a file in it.")
