"""Predict from paths to rows, one batch at a time, in the order of the paths."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from ...errors import refusal
from ...utils.files import staged_files
from ...utils.progress import progress
from ...utils.text import printable
from ..checks import require_choice, require_positive
from ..data.images import need_pillow
from .network import ReadyNetwork, open_network, score
from .options import PredictOptions
from .output import FORMATS, Prediction, Writer
from .samples import Broken, find_samples


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
        scored: Iterable[list[Prediction | Broken]]
        if options.ray and batches:
            from .ray import ray_batches

            scored = stack.enter_context(ray_batches(batches, model, options))
        else:
            scored = (score(batch, network, options) for batch in batches)
        if options.out is None:
            stream = sys.stdout if stdout is None else stdout
        else:
            (staged,) = stack.enter_context(staged_files(options.out))
            text = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
            stream = stack.enter_context(open(staged, "w", **text))  # type: ignore[call-overload]
        if not stream.isatty():
            scored = progress(scored, len(batches), "images")
        return _write(scored, stream, network, options)


def _write(
    batches: Iterable[list[Prediction | Broken]],
    stream: TextIO,
    network: ReadyNetwork,
    options: PredictOptions,
) -> int:
    """Write every batch as soon as it is predicted; return the number of broken samples."""
    writer = Writer(stream, options.format, min(options.top, network.classes))
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


def _check(options: PredictOptions) -> None:
    for name in ("workers", "address"):
        if getattr(options, name) is not None and not options.ray:
            raise refusal(f"predict --{name}", "--ray beside it", "none", "Add --ray.")
    require_positive("predict", options, "top", "batch", "workers")
    require_choice("predict --format", options.format, FORMATS, "Leave it out for a table.")
    if options.out is not None and options.out.is_dir():
        got = f"the folder {options.out}"
        raise refusal("predict --out", "a file", got, "Name a file in it.")
