"""conformallayers predict: the likeliest classes of images."""

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..errors import refusal
from .extras import extra_for

_FLAG = Parameter(negative="")


def _no_option(kind: Any, paths: tuple[str, ...]) -> None:
    """Refuse what looks like an option; a lone hyphen is standard input."""
    for path in paths:
        if path.startswith("-") and path != "-":
            raise refusal(
                "predict", "an option of predict", path, f"A file of this name is ./{path}."
            )


_PATHS = Parameter(allow_leading_hyphen=True, negative="", validator=_no_option)


def predict(
    model: Path,
    paths: Annotated[tuple[str, ...], _PATHS],
    *,
    top: int = 3,
    format: str = "table",
    out: Path | None = None,
    batch: int = 64,
    resize: Annotated[bool, _FLAG] = False,
    labels: Path | None = None,
    engine: str = "auto",
    threads: int | None = None,
    ray: Annotated[bool, _FLAG] = False,
    workers: int | None = None,
    address: str | None = None,
) -> None:
    """Write the likeliest classes of every image; leave with 1 if one was broken.

    Args:
        model: A fold or model written by cl.save, the folder of a run, or a checkpoint.
        paths: Images, .npy files with samples, folders with both, or - for standard input: an
            image, an array, or paths, one a line.
        top: Classes an image.
        format: table, csv or jsonl.
        out: A file for the rows; standard output if not given.
        batch: Images that are read and run at a time.
        resize: Scale images of another size; without it they count as broken.
        labels: A text file with the name of each class, one a line; those of the model if not given.
        engine: torch, numpy (folds only; imports no torch), or auto: torch if it is installed.
        threads: Of torch, in each process; as it is set up if not given.
        ray: Share the work among processes by Ray.
        workers: Processes of Ray; 2 if not given.
        address: Of a running Ray cluster; one on this machine, for this call, if not given.
    """
    with extra_for("predictions"):
        from ..lab.predict.engines import Setup
        from ..lab.predict.run import Options, Sharding, run_predict
    for name, value in (("workers", workers), ("address", address)):
        if value is not None and not ray:
            raise refusal(f"predict --{name}", "--ray beside it", "none", "Add --ray.")
    if workers is not None and workers < 1:
        raise refusal(
            "predict --workers", "a whole number > 0", str(workers), "Leave it out for 2."
        )
    if not paths:
        remedy = "Name images, .npy files, folders with them, or - for standard input."
        raise refusal("predict PATHS", "something to predict", "none", remedy)
    broken = run_predict(
        Setup(str(model), engine, threads, labels),
        paths,
        Options(top, batch, resize),
        format=format,
        out=out,
        sharding=Sharding(workers or 2, address) if ray else None,
    )
    if broken:
        sys.exit(1)
