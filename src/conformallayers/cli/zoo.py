"""conformallayers zoo: list the trained networks of the package, show their cards, add runs."""

from pathlib import Path

from cyclopts import App

from ..lab.options import DataOptions
from .models import Flat, given

zoo = App(name="zoo", help="List the trained networks of the package; commands take their names.")


@zoo.default
def list_() -> None:
    """List the trained networks of the package."""
    from ..zoo.catalogue import list_records

    print(list_records())


@zoo.command
def card(name: str) -> None:
    """Print the card of a network: accuracy, cost, training, licence and limits.

    Args:
        name: Name of the network, such as digits-micro.
    """
    from ..zoo.catalogue import read_record, require

    print(read_record(require(name, "zoo card", "conformallayers zoo")).card, end="")


@zoo.command
def build(
    runs: tuple[Path, ...], *, out: Path | None = None, options: Flat[DataOptions] = None
) -> None:
    """Add finished runs to the zoo, each measured from its file; same names are replaced.

    Args:
        runs: Folders of finished runs.
        out: Folder of the files; that of the package if not given.
    """
    from ..lab.zoo import build_zoo
    from ..zoo.catalogue import FOLDER

    build_zoo(runs, out or FOLDER, **given(options))
