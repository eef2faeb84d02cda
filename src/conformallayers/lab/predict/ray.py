"""Share predictions among processes with Ray Data, by default on a cluster started for this call."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from ...errors import first_line, missing_extra, refusal
from .network import ReadyNetwork, open_network, score
from .options import PredictOptions
from .output import Prediction
from .samples import Broken, Sample

_WORKERS = 2  # processes if no number is given
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
_Batch = Sequence[Sample | Broken]


@contextmanager
def ray_batches(
    batches: Sequence[_Batch], model: str | os.PathLike[str], options: PredictOptions
) -> Iterator[Iterator[list[Prediction | Broken]]]:
    """Yield an iterator over the predictions, batch by batch, in order; then leave the cluster."""
    for name, value in _QUIET.items():  # before the import, which reads them
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise missing_extra("ray[data]", "ray", "predict --ray") from error
    workers = options.workers or _WORKERS
    place: dict[str, Any] = {"address": options.address}
    if options.address is None:  # only with "local" does Ray ignore clusters that already run
        place = {"address": "local", "num_cpus": workers, "include_dashboard": False}
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
        done = data.map(_predicted, fn_kwargs=work, concurrency=workers)
        yield (pickle.loads(row["batch"]) for row in done.iter_rows())
    finally:
        ray.shutdown()


def _predicted(row: dict[str, Any], model: str, options: PredictOptions) -> dict[str, Any]:
    """Predict one batch in a Ray process."""
    batch = pickle.loads(row["batch"])
    return {"batch": pickle.dumps(score(batch, _network(model, options), options))}


@lru_cache(maxsize=1)
def _network(model: str, options: PredictOptions) -> ReadyNetwork:
    """Open the network once per process."""
    return open_network(model, options)
