"""The command line. Heavy imports wait for the command that needs them."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .. import __version__
from ..errors import ClosedPipe, ConformalError, refusal
from .extras import extra_for

if TYPE_CHECKING:
    from cyclopts import App

_INTERRUPTED = 130  # what a shell expects after SIGINT
_CLOSED_PIPE = 141  # and after SIGPIPE


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code; every refusal is one line on stderr.

    Args:
        arguments: None takes those of the process.
    """
    code = 0
    try:
        with _interruptible():
            _app()(arguments, result_action="return_value")
    except KeyboardInterrupt as stop:
        print(str(stop) or "Interrupted.", file=sys.stderr)
        code = _INTERRUPTED
    except ClosedPipe:
        _forget_output()
        code = _CLOSED_PIPE
    except (ConformalError, OSError) as error:
        print(f"conformallayers: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


def _forget_output() -> None:
    """Send what is left for a reader who has gone to nowhere, or Python would complain at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM end a command so that it can say how to go on.

    A script starts its background commands with SIGINT ignored. SIGTERM is left alone under
    torchrun, which ends processes by it that wait for one that has failed.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return
    numbers = [signal.SIGINT] if "RANK" in os.environ else [signal.SIGINT, signal.SIGTERM]
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _app() -> "App":
    with extra_for("the command line"):
        from cyclopts import App, Parameter
        from cyclopts.validators import Number

    app = App(
        name="conformallayers",
        help="Networks whose non-linear layers are associative, and fold into one.",
        version=__version__,
        suppress_keyboard_interrupt=False,
    )

    @app.command
    def demo(
        *,
        out: Path = Path("demo"),
        epochs: Annotated[int, Parameter(validator=Number(gte=1))] = 20,
        seed: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    ) -> None:
        """Train a small conformal network on digits, fold it, and compare the two paths.

        Args:
            out: The folder for pictures and metrics.json.
            epochs: How often to go through the training images.
            seed: Of the weights and the order of the images.
        """
        with extra_for("the demo"):
            from ..lab.experiments.demo import DemoConfig, run_demo
        run_demo(out, DemoConfig(epochs=epochs, seed=seed))

    @app.command
    def bench(
        networks: tuple[str, ...] = (),
        *,
        batch: tuple[int, ...] = (64,),
        depth: tuple[int, ...] = (1, 3, 9, 13, 30),
        rounds: Annotated[int, Parameter(validator=Number(gte=1))] = 15,
        tolerance: float | None = 1e-3,
        threads: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
        out: Path = Path("results/benchmarks"),
        keep: bool = False,
    ) -> None:
        """Time folded networks against their layers and their ReLU counterparts in four engines.

        Args:
            networks: Names to run, such as Base, LeNet, D3ModNet, "DkNet 9"; all if none is given.
            batch: Batch sizes.
            depth: Depths of DkNet, zero-padded and circular.
            rounds: How often each engine has its turn.
            tolerance: Fold also with this error of the denominator for pixels in [0, 1].
            threads: Of every engine; all cores if not given.
            out: The folder for bench.json, bench.md and bench.png.
            keep: Leave the rows of an earlier run that this one does not measure.
        """
        with extra_for("the benchmark"):
            from ..lab.experiments.bench import run_bench
        run_bench(out, networks, batch, depth, rounds, tolerance, threads, keep)

    from .experiments import experiments
    from .folding import export, fold
    from .inspect import inspect
    from .predict import predict
    from .report import report
    from .sweep import sweep

    app.command(_data_app())
    _add_training(app)
    app.command(fold)
    app.command(predict)
    app.command(export)
    app.command(inspect)
    app.command(experiments)
    app.command(sweep)
    app.command(report)
    return app


def _add_training(app: "App") -> None:
    from cyclopts import Parameter
    from cyclopts.validators import Number

    no_check = Parameter(name="--check", negative="--no-check")

    @app.command
    def train(
        network: str,
        dataset: str,
        *,
        recipe: str | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        optimizer: str | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
        schedule: str | None = None,
        flips: bool | None = None,
        shift: int | None = None,
        centre: bool | None = None,
        validation: float = 0.0,
        alpha: str | None = None,
        projective: bool | None = None,
        gain: float | None = None,
        dropout: float | None = None,
        depth: int | None = None,
        hidden: int | None = None,
        pool_stride: int | None = None,
        seed: int = 0,
        threads: int | None = None,
        device: str = "cpu",
        out: Path | None = None,
        resume: bool = False,
        data_root: Path | None = None,
        verify: Annotated[bool, no_check] = True,
    ) -> None:
        """Train a network of the paper, and measure it folded and layer by layer.

        Args:
            network: A class of conformallayers.networks, such as LeNetCL.
            dataset: mnist, fashion-mnist, cifar10 or digits.
            recipe: modern: the options below as docs/training.md has them, except those given.
            epochs: How often to go through the training images; 10 if not given.
            batch_size: Of all processes together; 256 if not given.
            learning_rate: The largest one, if the schedule changes it; 0.001 if not given.
            optimizer: adam (if not given), adamw, rmsprop or sgd.
            momentum: Of rmsprop and sgd.
            weight_decay: Of the optimiser.
            schedule: constant (if not given) or one-cycle.
            flips: Mirror half of the training images, others in every epoch.
            shift: Move the training images by up to so many pixels of 32.
            centre: Subtract the mean training image from every image.
            validation: Training images to set aside, as a share below 1 or a number.
            alpha: young (the paper's), spectral, learned or a number; for conformal networks.
            projective: Take the projective form of ReSPro.
            gain: Where a learned factor at the end of the conformal part starts; 0 has none.
            dropout: The share of hidden units in the head of LeNet and LeNetCL that a step leaves out.
            depth: The number of convolutions of DkNet and DkNetCL.
            hidden: The width of another layer in the head, linear in DkNet and DkNetCL, with ReLU
                in BaseReLUNet and BaseReSProNet; 0 has none. Of the first one in LeNet and LeNetCL,
                where 0 has the paper's 120.
            pool_stride: Of the Base networks; 2 if not given.
            seed: Of the weights and the order of the images.
            threads: Of torch; as it is set up if not given.
            device: Where to train.
            out: The folder of the run; runs/NETWORK-DATASET-seedN if not given.
            resume: Go on with the run in that folder.
            data_root: The folder of the data; else CONFORMALLAYERS_DATA, else data.
            verify: Compare the checksums of the data; without, any data in the same format.
        """
        options = {name: value for name, value in locals().items() if value is not None}
        with extra_for("training"):
            from ..lab.training.train import train as run
            from ..utils.memory import keep_freed_memory
        keep_freed_memory()
        result = run(**options)
        if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
            _print_accuracies(result.row["accuracy_layers"], result.row["accuracy_folded"])
            print(f"Wrote {result.folder}/")

    @app.command
    def evaluate(
        model: Path,
        *,
        dataset: str | None = None,
        threads: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
        device: str = "cpu",
        data_root: Path | None = None,
        verify: Annotated[bool, no_check] = True,
    ) -> None:
        """Measure a network on test images, folded and layer by layer.

        Args:
            model: The folder of a run, a checkpoint, or a fold or model written by cl.save.
            dataset: The set it was trained on if not given.
            threads: Of torch; as it is set up if not given.
            device: Where to run.
            data_root: The folder of the data; else CONFORMALLAYERS_DATA, else data.
            verify: Compare the checksums of the data; without, any data in the same format.
        """
        with extra_for("evaluation"):
            import torch

            from ..lab.training.evaluate import evaluate as measure
        if threads is not None:
            torch.set_num_threads(threads)
        found = measure(model, dataset, data_root=data_root, verify=verify, device=device)
        epoch = "" if found["epoch"] is None else f" after epoch {found['epoch']}"
        print(f"{found['network']}{epoch}, {found['dataset']}")
        _print_accuracies(found["layers"], found["folded"])


def _print_accuracies(layers: float | None, folded: float | None) -> None:
    if layers is not None:
        print(f"accuracy layer by layer {100 * layers:.2f} %")
    if folded is not None:
        print(f"accuracy folded         {100 * folded:.2f} %")


def _data_app() -> "App":
    from cyclopts import App, Parameter

    app = App(name="data", help="The image sets: where they are, whether they are right, get them.")
    no_check = Parameter(name="--check", negative="--no-check")

    @app.command(name="list")
    def show(*, data_root: Path | None = None) -> None:
        """List the known sets and where they were found.

        Args:
            data_root: The folder of the data; else CONFORMALLAYERS_DATA, else data.
        """
        with extra_for("the data"):
            from ..lab.data.files import data_root as root_of
            from ..lab.data.files import found_where
        for name, place in found_where(root_of(data_root)).items():
            print(f"{name:14} {place or 'not found'}")

    @app.command
    def check(
        names: tuple[str, ...] = (),
        *,
        data_root: Path | None = None,
        verify: Annotated[bool, no_check] = True,
    ) -> None:
        """Check every file; leave with 1 if one is bad, or if a set that was named is not there.

        Args:
            names: Of the sets; all that are found if none is given.
            data_root: The folder of the data; else CONFORMALLAYERS_DATA, else data.
            verify: Compare checksums; without them, only the format.
        """
        with extra_for("the data"):
            from ..lab.data.datasets import check as check_set
            from ..lab.data.files import data_root as root_of
            from ..lab.data.files import found_where
        root = root_of(data_root)
        if data_root is not None and not root.is_dir():
            remedy = "conformallayers data get NAME fetches a set into one."
            raise refusal("data check --data-root", "a folder", str(root), remedy)
        found = [name for name, place in found_where(root).items() if place]
        bad = 0
        for name in names or found:
            for path, fault in check_set(name, root, verify=verify):
                print(
                    f"{'ok ' if fault is None else 'BAD'} {path}" + (f": {fault}" if fault else "")
                )
                bad += fault is not None
        if bad:
            sys.exit(1)

    @app.command
    def get(
        names: tuple[str, ...], *, source: str | None = None, data_root: Path | None = None
    ) -> None:
        """Bring sets to the data root, checked; what is already there is left alone.

        Args:
            names: Of the sets.
            source: A folder with the files, or the web address of one.
            data_root: The folder of the data; else CONFORMALLAYERS_DATA, else data.
        """
        with extra_for("the data"):
            from ..lab.data.fetch import get as get_set
            from ..lab.data.files import data_root as root_of
        for name in names:
            written = get_set(name, root_of(data_root), source)
            for path in written:
                print(f"wrote {path}")
            if not written:
                print(f"{name}: already there")

    return app
