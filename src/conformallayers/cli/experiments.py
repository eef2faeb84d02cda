"""conformallayers demo, bench, device, experiment, sweep, inspect and report."""

import signal
from importlib import import_module
from pathlib import Path
from typing import Any

from cyclopts import App
from cyclopts.types import PositiveInt

from ..lab.options import (
    AccuracyOptions,
    BatchOptions,
    BenchOptions,
    CostOptions,
    DepthOptions,
    DeviceOptions,
    ExpansionOptions,
    RobustnessOptions,
    SweepOptions,
)
from .models import Flat

experiment = App(name="experiment", help="Run the experiments; interrupted ones continue.")


def demo(*, out: Path = Path("demo"), epochs: PositiveInt = 20) -> None:
    """Train small networks on digits, plain, expanded and conformal; fold them and time every runtime.

    Args:
        out: Folder for figures and metrics.json.
        epochs: Passes over the training images.
    """
    from ..lab.experiments.demo import run_demo

    run_demo(out, epochs=epochs)


def bench(networks: tuple[str, ...] = (), *, options: Flat[BenchOptions] = BenchOptions()) -> None:
    """Time folded networks against their layers, in sessions, and against ReLU networks in other engines.

    Args:
        networks: Names to run, such as Base, LeNet, D3ModNet, "DkNet 9", StageNet-micro, ResNet8, files written by
            cl.save, run folders, and names of the zoo; by default all networks.
    """
    from ..lab.experiments.bench import run_bench

    run_bench(networks, options)


def device(
    networks: tuple[str, ...] = (), *, options: Flat[DeviceOptions] = DeviceOptions()
) -> None:
    """Run networks in C on an emulated Cortex-M4: accuracy, flash, RAM and instructions per image.

    Args:
        networks: Names of the zoo, files written by cl.save, or run folders; by default three of the zoo.
    """
    from ..lab.devices.emulator import run_devices

    run_devices(networks, options)


_EXPERIMENTS: dict[int, tuple[str, Any, str]] = {
    1: ("accuracy", AccuracyOptions, "Train Table I: a convolution alone, with ReLU, with ReSPro."),
    2: ("accuracy", AccuracyOptions, "Train Table II: LeNet and LeNetCL."),
    3: ("depth", DepthOptions, "Time DkNet and both paths of DkNetCL against depth."),
    4: ("batchsize", BatchOptions, "Measure time and memory of D3ModNet and D3ModNetCL."),
    5: ("cost", CostOptions, "Train networks plain and expanded: accuracy against cost."),
    6: ("robustness", RobustnessOptions, "Measure networks of experiment 5 on corrupted images."),
    7: ("expansion", ExpansionOptions, "Compare ways to expand networks on validation images."),
}


def _add_experiment(number: int, name: str, kind: Any, help: str) -> None:
    """Add the command of an experiment, whose module is imported when it runs."""

    def command(*, options: Flat[kind] = kind()) -> None:
        module = "speed" if number in (3, 4) else name
        run: Any = import_module(f"conformallayers.lab.experiments.{module}")
        getattr(run, f"run_{name}")(*([number] if number < 3 else []), options)

    experiment.command(command, name=str(number), help=help)


for _number, _row in _EXPERIMENTS.items():
    _add_experiment(_number, *_row)


def sweep(network: str, dataset: str, *, options: Flat[SweepOptions] = SweepOptions()) -> None:
    """Search for batch size, epochs, learning rate and optimizer: TPE with Hyperband.

    Args:
        network: Class of conformallayers.networks, such as LeNetCL, or one of your own: FILE.py:NAME.
        dataset: mnist, fashion-mnist, cifar10, digits, or a folder with one sub-folder per class.
    """
    from ..lab.experiments.sweep import run_sweep

    best = run_sweep(network, dataset, options)["best"]
    if best is None:
        print("No trial is complete: raise --trials.")
    else:
        print(f"best: trial {best['trial']}, {100 * best['validation_accuracy']:.2f} %")


def inspect(run: Path, *, out: Path | None = None) -> None:
    """Inspect a trained network: spectrum and eigenimages of Q, rows of M.

    Args:
        run: Run folder or checkpoint.
        out: Folder for inspect.txt and figures; by default results/inspect/RUN.
    """
    from ..lab.experiments.inspect_run import run_inspect

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Python's handlers wait for LAPACK to return
    print(run_inspect(run, out))


def report(
    run: Path | None = None, *, results: Path = Path("results"), out: Path | None = None
) -> None:
    """Write an HTML page about a training run, or about all results beside the paper's numbers.

    Args:
        run: Run folder; by default the page is about the results of the experiments.
        results: Folder of the results of the experiments.
        out: File to write; by default report.html in that folder.
    """
    from ..lab.report.page import write_report, write_run_report

    written = write_report(results, out) if run is None else write_run_report(run, out)
    print(f"Wrote {written}")
