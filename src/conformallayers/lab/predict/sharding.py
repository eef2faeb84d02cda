"""Share predictions among processes with Ray Data, by default on a cluster started for this call.

A row of the data is a batch: samples go out, predictions come back, in order. A window of batches
is submitted at a time, so that neither all paths nor all results are in memory.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from ...errors import first_line, missing_extra, refusal
from .network import ReadyNetwork, open_network
from .options import PredictOptions
from .output import Prediction
from .samples import Broken, Sample

_WORKERS = 2  # processes if no number is given
_WINDOW = 1024  # batches to submit at a time
_BLOCKS = 8  # blocks of a window per process
_PATIENCE = 10.0  # seconds for a machine to answer
_EXPECTED = "a Ray cluster that answers"
_REMEDY = "Check it and RAY_AUTH_TOKEN; without --address a local cluster is started."
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@contextmanager
def shards(
    samples: Iterable[Sample | Broken], model: str | os.PathLike[str], options: PredictOptions
) -> Iterator[Iterator[list[Prediction | Broken]]]:
    """Yield an iterator over the predictions, batch by batch, in order; then leave the cluster."""
    ray = _import_ray()
    workers = options.workers or _WORKERS
    with _cluster(ray, workers, options.address):
        yield _results(ray, samples, os.fspath(model), options, workers)


def _import_ray() -> Any:
    for name, value in _QUIET.items():  # before the import, which reads them
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise missing_extra("ray[data]", "ray", "predict --ray") from error
    return ray


@contextmanager
def _cluster(ray: Any, workers: int, address: str | None) -> Iterator[None]:
    """Join the cluster at an address, or start a local one; leave it in any case."""
    place: dict[str, Any] = {"address": address}
    if address is None:  # only with "local" does Ray ignore clusters that already run
        place = {"address": "local", "num_cpus": workers, "include_dashboard": False}
    joined = not ray.is_initialized()
    if joined:
        if address is not None:
            check_address(address)
        quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
        try:
            ray.init(**place, **quiet, ignore_reinit_error=True)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            where = "predict --ray" if address is None else "predict --address"
            raise refusal(where, _EXPECTED, first_line(error), _REMEDY) from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield
    finally:
        if joined:
            ray.shutdown()


def check_address(address: str) -> None:
    """Refuse the address of a machine that does not answer; Ray would try again for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # such as "auto"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise refusal("predict --address", _EXPECTED, first_line(error), _REMEDY) from error


def _results(
    ray: Any,
    samples: Iterable[Sample | Broken],
    model: str,
    options: PredictOptions,
    workers: int,
) -> Iterator[list[Prediction | Broken]]:
    from .run import in_batches

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    for window in in_batches(in_batches(samples, options.batch), _WINDOW):
        rows = [{"batch": pickle.dumps(batch)} for batch in window]
        blocks = min(len(rows), _BLOCKS * workers)
        data = ray.data.from_items(rows, override_num_blocks=blocks)
        work = {"model": model, "options": options}
        done = data.map(_predicted, fn_kwargs=work, concurrency=min(blocks, workers))
        for row in done.iter_rows():
            yield pickle.loads(row["batch"])


def _predicted(row: dict[str, Any], model: str, options: PredictOptions) -> dict[str, Any]:
    """Predict one batch in a Ray process."""
    from .run import score

    batch = pickle.loads(row["batch"])
    return {"batch": pickle.dumps(score(batch, _network(model, options), options))}


@lru_cache(maxsize=1)
def _network(model: str, options: PredictOptions) -> ReadyNetwork:
    """Open the network once per process."""
    return open_network(model, options)
