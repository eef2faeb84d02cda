"""conformallayers experiment 1, 2, 3 and 4: those of the paper, and an ablation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from .extras import extra_for

_SEVERAL = Parameter(consume_multiple=True, negative="")
_FLAG = Parameter(negative="")
_NO_CHECK = Parameter(name="--check", negative="--no-check")


@Parameter(name="*")
@dataclass(frozen=True)
class RunOptions:
    """The options of all that train cells.

    Args:
        seed: Of the weights and the order of the images; of several, one after the other.
        threads: Of torch; as it is set up if not given.
        device: Where to train.
        again: Throw the finished cells and their runs away and train anew.
        out: The folder for one JSON file a cell.
        runs: The folder for one run folder a cell.
        data_root: The folder of the data; else CONFORMALLAYERS_DATA, else data.
        verify: Compare the checksums of the data; without, any data in the same format.
    """

    seed: Annotated[tuple[int, ...], _SEVERAL] = (0,)
    threads: int | None = None
    device: str = "cpu"
    again: Annotated[bool, _FLAG] = False
    out: Path = Path("results/accuracy")
    runs: Path = Path("runs")
    data_root: Path | None = None
    verify: Annotated[bool, _NO_CHECK] = True


@Parameter(name="*")
@dataclass(frozen=True)
class AccuracyOptions(RunOptions):
    """The options that experiments 1 and 2 share.

    Args:
        cells: Of the table, such as LeNetCL-mnist; all if none is given.
        network: Only cells of these networks.
        dataset: Only cells of these sets.
        variant: Other settings than the paper's, by their names, such as modern.
    """

    cells: Annotated[tuple[str, ...], _SEVERAL] = ()
    network: Annotated[tuple[str, ...], _SEVERAL] = ()
    dataset: Annotated[tuple[str, ...], _SEVERAL] = ()
    variant: Annotated[tuple[str, ...], _SEVERAL] = ()


experiments = App(name="experiment", help="The experiments of the paper, resumable.")


@experiments.command(name="1")
def linear_baseline(*, options: AccuracyOptions | None = None) -> None:
    """Train the nine cells of Table I: one convolution without activation, with ReLU, with ReSPro."""
    _accuracies(1, options or AccuracyOptions())


@experiments.command(name="2")
def lenet(*, options: AccuracyOptions | None = None) -> None:
    """Train the six cells of Table II: LeNet and LeNetCL."""
    _accuracies(2, options or AccuracyOptions())


@experiments.command
def ablation(*, options: RunOptions | None = None) -> None:
    """Train LeNetCL on Fashion-MNIST with either form, each α, and with or without a gain."""
    with extra_for("an experiment"):
        from ..lab.experiments.paper import ABLATION, ABLATION_CELL
    chosen = vars(options or RunOptions())
    _accuracies(
        2, AccuracyOptions(cells=(ABLATION_CELL,), variant=tuple(ABLATION.values()), **chosen)
    )


def _accuracies(number: int, options: AccuracyOptions) -> None:
    with extra_for("an experiment"):
        from ..lab.experiments.accuracy import run_accuracy
        from ..utils.memory import keep_freed_memory
    keep_freed_memory()
    run_accuracy(number, **vars(options))


@experiments.command(name="3")
def depth(
    *,
    depths: Annotated[tuple[int, ...], _SEVERAL] = (),
    batch: int = 64,
    executions: int = 100,
    seed: int = 0,
    threads: int | None = None,
    strategy: str = "auto",
    resume: Annotated[bool, _FLAG] = False,
    out: Path = Path("results/experiment3"),
) -> None:
    """Time inference against depth: DkNet, and DkNetCL layer by layer and folded.

    Args:
        depths: Numbers of convolutions; 1 to 30 if none is given.
        batch: Images of a batch.
        executions: Timed calls of each path at each depth.
        seed: Of weights and images.
        threads: Of torch; as it is set up if not given.
        strategy: Of the fold.
        resume: Keep the depths that are measured already.
        out: The folder for times.json, times.csv and the figure.
    """
    options = locals().copy()
    with extra_for("an experiment"):
        from ..lab.experiments.depth import run_depth
    run_depth(**options)


@experiments.command(name="4")
def batch_size(
    *,
    batches: Annotated[tuple[int, ...], _SEVERAL] = (),
    memory: str | None = None,
    strategies: Annotated[tuple[str, ...], _SEVERAL] = ("auto", "banded"),
    executions: int = 100,
    seconds: float = 20.0,
    seed: int = 0,
    threads: int | None = None,
    resume: Annotated[bool, _FLAG] = False,
    out: Path = Path("results/experiment4"),
) -> None:
    """Measure time and memory against batch size: D3ModNet, and D3ModNetCL in all its paths.

    Args:
        batches: Their sizes; the powers of two up to what memory holds if none is given.
        memory: A budget such as 4GiB: find the largest batch of each path within it.
        strategies: Of the folds of D3ModNetCL.
        executions: Timed calls of each path at each size.
        seconds: Fewer calls when they take longer than this.
        seed: Of weights and images.
        threads: Of torch; as it is set up if not given.
        resume: Keep the rows that are measured already.
        out: The folder for batches.json, batches.csv and the figure.
    """
    options = locals().copy()
    with extra_for("an experiment"):
        from ..lab.experiments.batchsize import run_batches
    run_batches(**options)
