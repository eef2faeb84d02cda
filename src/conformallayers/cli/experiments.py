"""conformallayers demo, bench, device, experiment, sweep, inspect and report."""

from pathlib import Path

from cyclopts import App
from cyclopts.types import NonNegativeInt, PositiveInt

from ..lab.options import (
    AccuracyOptions,
    BatchOptions,
    BenchOptions,
    CostOptions,
    DepthOptions,
    DeviceOptions,
    InspectOptions,
    RobustnessOptions,
    SweepOptions,
)
from .models import Flat

experiment = App(name="experiment", help="Run the experiments of the paper, resumable.")


def demo(*, out: Path = Path("demo"), epochs: PositiveInt = 20, seed: NonNegativeInt = 0) -> None:
    """Train a small conformal network on digits, fold it, and compare the two paths.

    Args:
        out: Folder for figures and metrics.json.
        epochs: Passes over the training images.
        seed: Seed of the weights and the order of the images.
    """
    from ..lab.experiments.demo import run_demo

    run_demo(out, epochs=epochs, seed=seed)


def bench(networks: tuple[str, ...] = (), *, options: Flat[BenchOptions] = None) -> None:
    """Time folded networks against their layers, in sessions, and against ReLU networks in other engines.

    Args:
        networks: Names to run, such as Base, LeNet, D3ModNet, "DkNet 9", StageNet-micro, ResNet8, files written by
            cl.save, run folders, and names of the zoo; all networks if none is given.
    """
    from ..lab.experiments.bench import run_bench

    run_bench(networks, options or BenchOptions())


def device(networks: tuple[str, ...] = (), *, options: Flat[DeviceOptions] = None) -> None:
    """Run networks in C on an emulated Cortex-M4: accuracy, flash, RAM and instructions per image.

    Args:
        networks: Names of the zoo, files written by cl.save, run folders; some of the zoo if none is given.
    """
    from ..lab.devices.emulator import run_devices

    run_devices(networks, options or DeviceOptions())


@experiment.command(name="1")
def linear_baseline(*, options: Flat[AccuracyOptions] = None) -> None:
    """Train the nine cells of Table I: one convolution without activation, with ReLU, with ReSPro."""
    _train_cells(1, options)


@experiment.command(name="2")
def lenet(*, options: Flat[AccuracyOptions] = None) -> None:
    """Train the six cells of Table II: LeNet and LeNetCL."""
    _train_cells(2, options)


def _train_cells(number: int, options: AccuracyOptions | None) -> None:
    from ..lab.experiments.accuracy import run_accuracy
    from ..lab.measure import keep_freed_memory

    keep_freed_memory()
    run_accuracy(number, options or AccuracyOptions())


@experiment.command(name="3")
def depth(*, options: Flat[DepthOptions] = None) -> None:
    """Time inference against depth: DkNet, and DkNetCL layer by layer and folded."""
    from ..lab.experiments.depth import run_depth

    run_depth(options or DepthOptions())


@experiment.command(name="4")
def batch_size(*, options: Flat[BatchOptions] = None) -> None:
    """Measure time and memory against batch size: D3ModNet, and all paths of D3ModNetCL."""
    from ..lab.experiments.batchsize import run_batches

    run_batches(options or BatchOptions())


@experiment.command(name="5")
def cost(*, options: Flat[CostOptions] = None) -> None:
    """Train networks with stages, their ReLU twins and others, and compare accuracy with cost."""
    from ..lab.experiments.cost import run_cost
    from ..lab.measure import keep_freed_memory

    keep_freed_memory()
    run_cost(options or CostOptions())


@experiment.command(name="6")
def robustness(*, options: Flat[RobustnessOptions] = None) -> None:
    """Measure the networks of experiment 5 on corrupted images."""
    from ..lab.experiments.robustness import run_robustness

    run_robustness(options or RobustnessOptions())


def sweep(network: str, dataset: str, *, options: Flat[SweepOptions] = None) -> None:
    """Search for batch size, epochs, learning rate and optimizer: TPE with Hyperband.

    Args:
        network: Class of conformallayers.networks, such as LeNetCL, or one of your own: FILE.py:NAME.
        dataset: mnist, fashion-mnist, cifar10, digits, shapes, or a folder with a sub-folder a class.
    """
    from ..lab.experiments.sweep import run_sweep
    from ..lab.measure import keep_freed_memory

    keep_freed_memory()
    best = run_sweep(network, dataset, options or SweepOptions())["best"]
    if best is None:
        print("No trial is complete: ask for more with --trials.")
    else:
        print(f"best: trial {best['trial']}, {100 * best['validation_accuracy']:.2f} %")


def inspect(run: Path, *, options: Flat[InspectOptions] = None) -> None:
    """Inspect a trained network: spectrum and eigenimages of Q, terms of the denominator, rows of M.

    Args:
        run: Run folder or checkpoint.
    """
    from ..lab.experiments.inspect_run import run_inspect

    print(run_inspect(run, options or InspectOptions()))


def report(
    run: Path | None = None, *, results: Path = Path("results"), out: Path | None = None
) -> None:
    """Write one HTML page: about a training run, or with all results beside the paper's numbers.

    Args:
        run: Run folder; the results of the experiments if not given.
        results: Folder of the results of the experiments.
        out: File to write; report.html in that folder if not given.
    """
    from ..lab.report.page import write_report, write_run_report

    written = write_report(results, out) if run is None else write_run_report(run, out)
    print(f"Wrote {written}")
