"""Predictions shared among processes by Ray Data, on a cluster of this call's own by default.

A row of the data is a batch of samples: names go out, predictions come back, in order. Paths are handed over
a window at a time, so that neither they nor the results are ever all in memory.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ...errors import missing_extra, refusal
from .engines import Network, Setup
from .items import Broken, Item
from .rows import Prediction

if TYPE_CHECKING:
    from .run import Options, Sharding

_WINDOW = 1024  # batches that are handed over at a time
_BLOCKS = 8  # of a window, for every process
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@contextmanager
def shards(
    found: Iterable[Item | Broken], setup: Setup, options: Options, sharding: Sharding
) -> Iterator[Iterator[list[Prediction | Broken]]]:
    """Give the predictions of all samples, batch by batch, in order; the cluster ends with the block.

    Args:
        found: the samples.
        setup: how each process makes the network ready.
        options: as without Ray.
        sharding: how many processes, and where.
    """
    ray = _ray()
    with _cluster(ray, sharding):
        yield _results(ray, found, setup, options, sharding.workers)


def _ray() -> Any:
    for name, value in _QUIET.items():  # before the import, which looks at them
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise missing_extra("ray[data]", "ray", "predict --ray") from error
    return ray


@contextmanager
def _cluster(ray: Any, sharding: Sharding) -> Iterator[None]:
    """Join a cluster, or start one in this call's processes; leave it in any case."""
    place: dict[str, Any] = {"address": sharding.address}
    if sharding.address is None:  # by that word alone Ray does not look for one that runs already
        place = {"address": "local", "num_cpus": sharding.workers, "include_dashboard": False}
    joined = not ray.is_initialized()
    if joined:
        quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
        try:
            ray.init(**place, **quiet, ignore_reinit_error=True)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
            where = "predict --ray" if sharding.address is None else "predict --address"
            remedy = (
                "Check the address and RAY_AUTH_TOKEN; without --address a cluster is started here."
            )
            raise refusal(where, "a Ray cluster that answers", reason, remedy) from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield
    finally:
        if joined:
            ray.shutdown()


def _results(
    ray: Any, found: Iterable[Item | Broken], setup: Setup, options: Options, workers: int
) -> Iterator[list[Prediction | Broken]]:
    from .run import in_batches

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    for window in in_batches(in_batches(found, options.batch), _WINDOW):
        rows = [{"batch": pickle.dumps(batch)} for batch in window]
        blocks = min(len(rows), _BLOCKS * workers)
        data = ray.data.from_items(rows, override_num_blocks=blocks)
        work = {"setup": setup, "options": options}
        done = data.map(_predicted, fn_kwargs=work, concurrency=min(blocks, workers))
        for row in done.iter_rows():
            yield pickle.loads(row["batch"])


def _predicted(row: dict[str, Any], setup: Setup, options: Options) -> dict[str, Any]:
    """Predict one batch in a process of Ray."""
    from .run import score

    batch = pickle.loads(row["batch"])
    return {"batch": pickle.dumps(score(batch, _network(setup), options))}


@lru_cache(maxsize=1)
def _network(setup: Setup) -> Network:
    """Make the network ready, once in every process."""
    return setup.open()
