"""conformallayers data: list, check and download the data sets."""

import sys
from pathlib import Path

from cyclopts import App

from ..errors import refusal
from ..lab.options import DataOptions
from .models import Flat

data = App(name="data", help="List, check and download the image data sets.")


@data.command(name="list")
def list_(*, data_root: Path | None = None) -> None:
    """List the known data sets and where they were found.

    Args:
        data_root: Folder of the data sets; CONFORMALLAYERS_DATA, or else data, if not given.
    """
    from ..lab.data import files

    for name, place in files.found_where(files.data_root(data_root)).items():
        print(f"{name:14} {place or 'not found'}")


@data.command
def check(names: tuple[str, ...] = (), *, options: Flat[DataOptions] = None) -> None:
    """Check every file; exit with 1 if a file is bad, or if a named data set is missing.

    Args:
        names: Names of the data sets; all that are found if none is given.
        options.verify: Compare checksums; if not, check the format only.
    """
    from ..lab.data import files
    from ..lab.data.datasets import check as check_set

    options = options or DataOptions()
    root = files.data_root(options.data_root)
    if options.data_root is not None and not root.is_dir():
        remedy = "conformallayers data get NAME fetches a set into one."
        raise refusal("data check --data-root", "a folder", str(root), remedy)
    found = [name for name, place in files.found_where(root).items() if place]
    bad = 0
    for name in names or found:
        for path, fault in check_set(name, root, verify=options.verify):
            print(f"ok  {path}" if fault is None else f"BAD {path}: {fault}")
            bad += fault is not None
    if bad:
        sys.exit(1)


@data.command
def get(
    names: tuple[str, ...], *, source: str | None = None, data_root: Path | None = None
) -> None:
    """Copy or download data sets to the data root, and check them; existing ones are left alone.

    Args:
        names: Names of the data sets.
        source: Folder or URL that has the files.
        data_root: Folder of the data sets; CONFORMALLAYERS_DATA, or else data, if not given.
    """
    from ..lab.data import files

    for name in names:
        written = files.fetch(name, files.data_root(data_root), source)
        for path in written:
            print(f"wrote {path}")
        if not written:
            print(f"{name}: already there")
