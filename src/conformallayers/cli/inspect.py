"""conformallayers inspect: what the matrix and the forms of a trained network encode."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from .extras import extra_for

_FLAG = Parameter(negative="")
_NO_CHECK = Parameter(name="--check", negative="--no-check")


def inspect(
    run: Path,
    *,
    dataset: str | None = None,
    samples: int | None = None,
    out: Path | None = None,
    resume: Annotated[bool, _FLAG] = False,
    threads: int | None = None,
    data_root: Path | None = None,
    verify: Annotated[bool, _NO_CHECK] = True,
) -> None:
    """Look into a trained network: spectrum and eigenimages of Q, terms of the denominator, rows of M.

    Args:
        run: The folder of a run, or a checkpoint.
        dataset: The set whose test images are taken; the one it was trained on if not given.
        samples: How many of them; 1000 if not given, or all if there are fewer.
        out: The folder for inspect.json and figures; results/inspect/RUN if not given.
        resume: Leave a folder alone that is finished, if the checkpoint and the options are the same.
        threads: Of torch; as it is set up if not given.
        data_root: The folder of the data; else CONFORMALLAYERS_DATA, else data.
        verify: Compare the checksums of the data; without, any data in the same format.
    """
    options = locals().copy()
    with extra_for("the inspection"):
        from ..lab.experiments.inspect_runs import run_inspect
    run_inspect(**options)
