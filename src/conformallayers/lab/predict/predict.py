"""Predict from paths to rows, one batch at a time, in the order of the paths; in torch, numpy or ONNX Runtime."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TextIO

import numpy as np
import torch

from ...errors import ClosedPipe, first_line, missing_extra, refusal, shape_text
from ...session import Session
from ...utils.files import staged_files
from ...utils.progress import progress
from ...utils.text import csv_text, printable
from ..data.pictures import Array, Unreadable, find_images, read_image
from ..options import PredictOptions
from ..training.saved_models import load_model

_FIELDS = ("label", "class", "probability", "score")
_WIDTH = 24  # characters of a column of the table, unless an entry needs more
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
# The path, and top: the likeliest classes, each with _FIELDS; or broken: why there are none.
Row = dict[str, Any]


def run_predict(
    model: str | os.PathLike[str], paths: Sequence[str], options: PredictOptions
) -> int:
    """Write a row for every image; report broken ones on standard error, skip them, and return their number."""
    session = open_network(model, options)
    images = list(find_images(paths))
    batches = [images[i : i + options.batch] for i in range(0, len(images), options.batch)]
    with contextlib.ExitStack() as stack:
        scored: Iterable[list[Row]] = (score(batch, session, options) for batch in batches)
        if (options.ray or options.address) and batches:
            scored = stack.enter_context(_ray_batches(batches, model, options))
        stream = sys.stdout
        if options.out is not None:
            (staged,) = stack.enter_context(staged_files(options.out))
            text = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
            stream = stack.enter_context(open(staged, "w", **text))  # type: ignore[call-overload]
        if not stream.isatty():
            scored = progress(scored, len(batches), "images")
        return _write(scored, stream, options.format, min(options.top, *session.output_shape))


def _write(batches: Iterable[list[Row]], stream: TextIO, format: str, top: int) -> int:
    """Write every batch as soon as it is predicted; return the number of broken images."""
    good = broken = 0
    for batch in batches:
        for row in batch:
            if "broken" in row:
                line = f"conformallayers: {printable(row['path'])}: {printable(row['broken'])}"
                print(line, file=sys.stderr)
        rows = [row for row in batch if "top" in row]
        try:
            if rows and not good:
                stream.write(header(format, top))
            stream.writelines(row_text(row, format) for row in rows)
            stream.flush()
        except BrokenPipeError as error:  # nobody reads the rows any more
            raise ClosedPipe from error
        good, broken = good + len(rows), broken + len(batch) - len(rows)
    if not good:
        got = f"{broken} broken" if broken else "none"
        remedy = "Name images, or folders of images."
        raise refusal("predict PATHS", "at least one readable image", got, remedy)
    print(f"{good} predicted, {broken} broken", file=sys.stderr)
    return broken


def open_network(model: str | os.PathLike[str], options: PredictOptions) -> Session:
    """Load a fold, or fold a run; its outputs have labels."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    folded = load_model(model, "predict").fold("predict")
    if len(folded.output_shape) != 1:
        got = f"(B, {shape_text(folded.output_shape)[1:]}"
        expected = "a network that gives scores (B, classes)"
        raise refusal(f"predict {os.fspath(model)}", expected, got, "Add a Flatten and a head.")
    folded.labels = folded.labels or tuple(map(str, range(folded.output_shape[0])))
    return Session(folded, engine=options.engine, threads=options.threads)


def score(paths: Sequence[str], session: Session, options: PredictOptions) -> list[Row]:
    """Read and run one batch; return a row for every image."""
    labels = session.folded.labels or ()
    rows: list[Row] = []
    values: list[Array] = []
    for path in paths:
        rows.append({"path": path})
        try:
            values.append(read_image(path, session.input_shape))
        except Unreadable as fault:
            rows[-1]["broken"] = str(fault)
    outputs = session(np.stack(values)) if values else ()
    whole = (row for row in rows if "broken" not in row)
    for row, scores in zip(whole, outputs, strict=True):
        if np.isfinite(scores).all():
            row["top"] = likeliest(scores, options.top, labels)
        else:
            row["broken"] = "scores that are not finite"
    return rows


# -- writing --------------------------------------------------------------------------------------


def likeliest(scores: Array, top: int, labels: Sequence[str]) -> list[Row]:
    """Return the classes with the largest scores; ties keep the order of the classes."""
    wide = scores.astype(np.float64)
    powers = np.exp(wide - wide.max())
    shares = powers / powers.sum()
    found = []
    for index in np.argsort(-wide, kind="stable")[:top].tolist():
        # Six significant digits, the precision of float32.
        share, score = (float(f"{value[index]:.6g}") for value in (shares, wide))
        found.append(dict(zip(_FIELDS, (labels[index], index, share, score), strict=True)))
    return found


def header(format: str, top: int) -> str:
    """Return the line above the rows; none in jsonl."""
    if format == "table":
        return _line(format, ["image", *(f"{rank}." for rank in range(1, top + 1))])
    ranks = ["", *(f"_{rank}" for rank in range(2, top + 1))]
    names = ["path", *(f"{name}{rank}" for rank in ranks for name in _FIELDS)]
    return _line(format, names) if format == "csv" else ""


def row_text(row: Row, format: str) -> str:
    """Return the line of a row."""
    if format == "jsonl":
        return json.dumps(row) + "\n"
    if format == "csv":
        return _line(format, [row["path"], *(v for one in row["top"] for v in one.values())])
    text = "{label} {percent:.1f} % ({score:.2f})"
    cells = (text.format(percent=100 * one["probability"], **one) for one in row["top"])
    return _line(format, [row["path"], *cells])


def _line(format: str, cells: Sequence[Any]) -> str:
    if format == "table":
        return "  ".join(printable(cell).ljust(_WIDTH) for cell in cells).rstrip() + "\n"
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(map(csv_text, cells))
    return text.getvalue()


# -- Ray --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ray_batches(
    batches: Sequence[Sequence[str]], model: str | os.PathLike[str], options: PredictOptions
) -> Iterator[Iterator[list[Row]]]:
    """Share batches among processes with Ray Data; yield their predictions in order, then leave the cluster."""
    for name, value in _QUIET.items():  # before the import, which reads them
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise missing_extra("ray[data]", "ray", "predict --ray") from error
    # Only with "local" does Ray ignore clusters that already run.
    local = {"address": "local", "num_cpus": options.workers, "include_dashboard": False}
    place: dict[str, Any] = {"address": options.address} if options.address else local
    try:
        ray.init(**place, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        remedy = "Check it and RAY_AUTH_TOKEN; without --address a local cluster is started."
        expected = "a Ray cluster that answers"
        raise refusal("predict --address", expected, first_line(error), remedy) from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        ray.data.DataContext.get_current().execution_options.preserve_order = True
        # A row of the data is a batch: paths go out, predictions come back.
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
