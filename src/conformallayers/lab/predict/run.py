"""conformallayers predict: from paths to rows, a batch at a time, in the order of the paths."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TextIO, TypeVar

import numpy as np

from ...errors import ClosedPipe, ConformalError, refusal
from ...utils.files import staged_files
from .arrays import Array, Unreadable, as_sample, read_row
from .engines import Network, Setup
from .images import need_pillow, read_image
from .items import Broken, Item, items
from .progress import Bar
from .rows import FORMATS, Prediction, Writer, likeliest, printable

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """How samples are read and predictions are made.

    Args:
        top: classes a sample.
        batch: samples that are read and run at a time.
        resize: scale images of another size.
    """

    top: int = 3
    batch: int = 64
    resize: bool = False


@dataclass(frozen=True)
class Sharding:
    """Predictions by Ray: so many processes, on the cluster at an address or one of their own."""

    workers: int
    address: str | None = None


def run_predict(
    setup: Setup,
    paths: Sequence[str],
    options: Options | None = None,
    *,
    format: str = "table",
    out: Path | None = None,
    sharding: Sharding | None = None,
    stdin: BinaryIO | None = None,
    stdout: TextIO | None = None,
) -> int:
    """Write a row for every sample; report and skip what is broken, on standard error.

    Args:
        setup: the model and what runs it.
        paths: files, folders, or ``-`` for standard input.
        options: how samples are read and predictions are made.
        format: ``"table"``, ``"csv"`` or ``"jsonl"``.
        out: a file for the rows, which is there when it is whole; None: standard output.
        sharding: over several processes.
        stdin, stdout: those of the process if None.

    Returns:
        How many were broken.
    """
    options = options or Options()
    _check(options, format, out)
    need_pillow()
    network = setup.open()
    stdin = sys.stdin.buffer if stdin is None else stdin
    found = items(paths, network.shape, stdin)
    with contextlib.ExitStack() as stack:
        batches: Iterator[list[Prediction | Broken]]
        if sharding is None:
            batches = (score(batch, network, options) for batch in in_batches(found, options.batch))
        else:
            from .sharding import shards

            batches = stack.enter_context(shards(found, setup, options, sharding))
        if out is None:
            stream = sys.stdout if stdout is None else stdout
            return _write(batches, stream, network, options, format, Bar(paths, network, stream))
        (staged,) = stack.enter_context(staged_files(out))
        with open(staged, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            return _write(batches, file, network, options, format, Bar(paths, network, file))


def score(
    batch: Sequence[Item | Broken], network: Network, options: Options
) -> list[Prediction | Broken]:
    """Read and run one batch; what is broken keeps its place."""
    found: list[Prediction | Broken | str] = []
    samples: list[Array] = []
    for item in batch:
        if isinstance(item, Broken):
            found.append(item)
            continue
        try:
            samples.append(_read(item, network, options.resize))
            found.append(item.name)
        except Unreadable as fault:
            found.append(Broken(item.name, str(fault)))
    scores = iter(network.run(np.stack(samples)) if samples else ())
    return [
        _prediction(entry, next(scores), network, options.top) if isinstance(entry, str) else entry
        for entry in found
    ]


def in_batches(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of so many values; only one of them is in memory."""
    left = iter(values)
    while batch := list(islice(left, size)):
        yield batch


def _read(item: Item, network: Network, resize: bool) -> Array:
    if item.row is not None:
        return read_row(item.path, item.row, network.shape, network.white)
    if isinstance(item.data, np.ndarray):
        return as_sample(item.data, network.shape, network.white)
    source = item.path if item.data is None else item.data
    return read_image(source, network.shape, network.white, resize)


def _prediction(name: str, scores: Array, network: Network, top: int) -> Prediction | Broken:
    if not np.isfinite(scores).all():
        return Broken(name, "scores that are not finite")
    return likeliest(name, scores, top, network.name)


def _write(
    batches: Iterable[list[Prediction | Broken]],
    stream: TextIO,
    network: Network,
    options: Options,
    format: str,
    bar: Bar,
) -> int:
    """Write what comes, as it comes; return how many were broken."""
    writer = Writer(stream, format, min(options.top, network.classes))
    good = broken = 0
    with bar:
        for batch in batches:
            rows = [entry for entry in batch if isinstance(entry, Prediction)]
            for entry in batch:
                if isinstance(entry, Broken):
                    bar.say(f"{printable(entry.name)}: {printable(entry.reason)}")
            good, broken = good + len(rows), broken + len(batch) - len(rows)
            if rows:
                _send(writer, rows, stream)
            bar.advance(len(batch))
    if not good:
        raise _nothing(broken)
    bar.end(f"{good} predicted, {broken} broken")
    return broken


def _send(writer: Writer, rows: list[Prediction], stream: TextIO) -> None:
    try:
        writer.write(rows)
    except BrokenPipeError as error:
        raise ClosedPipe from error


def _nothing(broken: int) -> ConformalError:
    got = f"none that could be read ({broken} broken)" if broken else "none"
    remedy = "Name images, .npy files, folders with them, or - for standard input."
    return refusal("predict PATHS", "something to predict", got, remedy)


def _check(options: Options, format: str, out: Path | None) -> None:
    if format not in FORMATS:
        expected = f"one of {', '.join(FORMATS)}"
        raise refusal("predict --format", expected, repr(format), "Leave it out for a table.")
    for name in ("top", "batch"):
        value = getattr(options, name)
        if value < 1:
            remedy = "Leave it out."
            raise refusal(f"predict --{name}", "a whole number > 0", str(value), remedy)
    if out is not None and out.is_dir():
        raise refusal("predict --out", "a file", f"the folder {out}", "Name a file in it.")
