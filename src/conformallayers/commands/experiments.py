"""conformallayers experiment 1, 2, 3 and 4: those of the paper."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from .extras import extra_for

_SEVERAL = Parameter(consume_multiple=True, negative="")
_NO_CHECK = Parameter(name="--check", negative="--no-check")


@Parameter(name="*")
@dataclass(frozen=True)
class AccuracyOptions:
    """The options that experiments 1 and 2 share.

    Args:
        cells: Of the table, such as LeNetCL-mnist; all if none is given.
        network: Only cells of these networks.
        dataset: Only cells of these sets.
        variant: Another setting than the paper's, by its name, such as better.
        seed: Of the weights and the order of the images.
        threads: Of torch; as it is set up if not given.
        device: Where to train.
        again: Throw the finished cells and their runs away and train anew.
        out: The folder for one JSON file a cell.
        runs: The folder for one run folder a cell.
        data_root: The folder of the data; else CONFORMALLAYERS_DATA, else data.
        verify: Compare the checksums of the data; without, any data in the same format.
    """

    cells: Annotated[tuple[str, ...], _SEVERAL] = ()
    network: Annotated[tuple[str, ...], _SEVERAL] = ()
    dataset: Annotated[tuple[str, ...], _SEVERAL] = ()
    variant: str | None = None
    seed: int = 0
    threads: int | None = None
    device: str = "cpu"
    again: Annotated[bool, Parameter(negative="")] = False
    out: Path = Path("results/accuracy")
    runs: Path = Path("runs")
    data_root: Path | None = None
    verify: Annotated[bool, _NO_CHECK] = True


experiments = App(name="experiment", help="The experiments of the paper, resumable.")


@experiments.command(name="1")
def linear_baseline(*, options: AccuracyOptions | None = None) -> None:
    """Train the nine cells of Table I: one convolution without activation, with ReLU, with ReSPro."""
    _accuracies(1, options or AccuracyOptions())


@experiments.command(name="2")
def lenet(*, options: AccuracyOptions | None = None) -> None:
    """Train the six cells of Table II: LeNet and LeNetCL."""
    _accuracies(2, options or AccuracyOptions())


def _accuracies(number: int, options: AccuracyOptions) -> None:
    with extra_for("an experiment"):
        from ..experiments.accuracy import run_accuracy
        from ..experiments.memory import keep_freed_memory
    keep_freed_memory()
    run_accuracy(number, **vars(options))
