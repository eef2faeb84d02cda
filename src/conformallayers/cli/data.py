"""conformallayers data: list, check and download the data sets."""

import sys
from pathlib import Path

from cyclopts import App

from ..errors import ConformalError
from ..lab.options import DataOptions
from .models import Flat

data = App(name="data", help="List, check and download the image data sets.")


@data.command(name="list")
def list_(*, data_root: Path | None = None) -> None:
    """List the known data sets and where they are.

    Args:
        data_root: Folder of the data sets; by default the variable CONFORMALLAYERS_DATA, else ./data.
    """
    from ..lab.data import files

    for name, place in files.found_where(files.data_root(data_root)).items():
        print(f"{name:14} {place or 'not found'}")


@data.command
def check(names: tuple[str, ...] = (), *, options: Flat[DataOptions] = DataOptions()) -> None:
    """Read and check data sets; exit with 1 if a file is missing or bad.

    Args:
        names: Names of the data sets; by default all that are found.
        options.verify: Compare checksums; --no-check checks the format alone.
    """
    from ..lab.data import files
    from ..lab.data.datasets import load

    root = files.data_root(options.data_root)
    bad = False
    for name in names or [name for name, place in files.found_where(root).items() if place]:
        try:
            load(name, root, verify=options.verify)
            print(f"ok  {name}")
        except ConformalError as error:
            bad = True
            print(f"BAD {name}: {error}")
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
        data_root: Folder of the data sets; by default the variable CONFORMALLAYERS_DATA, else ./data.
    """
    from ..lab.data import files

    for name in names:
        written = files.fetch(name, files.data_root(data_root), source)
        for line in [f"wrote {path}" for path in written] or [f"{name}: already there"]:
            print(line)
