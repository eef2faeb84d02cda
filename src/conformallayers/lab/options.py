"""Options of the commands, shared with the Python functions behind them.

This module imports no torch, so that the command line can print its help at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The location of the data sets.

    Args:
        data_root: Folder of the data sets; CONFORMALLAYERS_DATA, or else data, if not given.
        verify: Compare the checksums of the data files; if not, accept any data in the same format.
    """

    data_root: Path | None = None
    verify: Annotated[bool, Parameter(name="check")] = True


@dataclass(frozen=True)
class FoldOptions:
    """How to fold a network; a fold is taken as it is.

    Args:
        shape: Shape of one sample, such as 3,224,224; that of the stored training images if not given.
        weights: State_dict of PACKAGE:FACTORY, a file of safetensors or torch.save.
        strategy: auto, layers, conv, dense or banded.
        dtype: float64, float32, float16 or bfloat16; that of the network if not given.
        labels: Text file with the name of each class, one per line; those of the data set if not given.
    """

    shape: str | None = None
    weights: Path | None = None
    strategy: str | None = None
    dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = None
    labels: Path | None = None


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """How to read images, run the network and write predictions.

    Args:
        top: Classes per image.
        format: table, csv or jsonl.
        out: File for the rows; standard output if not given.
        batch: Images to read and run at a time.
        engine: torch, numpy or onnxruntime; a run is folded first.
        threads: Threads of torch and ONNX Runtime in each process; torch's own default if not given.
        ray: Share the work among processes with Ray Data.
        workers: Processes of Ray.
        address: Address of a running Ray cluster, for --ray; a local one is started if not given.
    """

    top: PositiveInt = 3
    format: Literal["table", "csv", "jsonl"] = "table"
    out: Path | None = None
    batch: PositiveInt = 64
    engine: Literal["torch", "numpy", "onnxruntime"] = "torch"
    threads: PositiveInt | None = None
    ray: bool = False
    workers: PositiveInt = 2
    address: str | None = None


@dataclass(frozen=True, kw_only=True)
class ThreadOptions:
    """Options of all experiments.

    Args:
        threads: Threads of torch; its own default if not given.
    """

    threads: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class AccuracyOptions(DataOptions, ThreadOptions):
    """Options of experiments 1 and 2.

    Args:
        dataset: Only cells of these data sets.
        variant: Settings other than the paper's, by name, such as modern.
        seed: Seeds of the weights and the order of the images; several are trained one by one.
        out: Folder for the table of all cells.
    """

    dataset: tuple[Literal["mnist", "fashion-mnist", "cifar10"], ...] = ()
    variant: tuple[str, ...] = ()
    seed: tuple[int, ...] = (0,)
    out: Path = Path("results/accuracy")


@dataclass(frozen=True, kw_only=True)
class DepthOptions(ThreadOptions):
    """Options of experiment 3.

    Args:
        depths: Numbers of convolutions.
        batch: Images per batch.
        executions: Timed calls of each path at each depth.
        out: Folder for times.json and the figure.
    """

    depths: tuple[PositiveInt, ...] = tuple(range(1, 31))
    batch: PositiveInt = 64
    executions: PositiveInt = 100
    out: Path = Path("results/experiment3")


@dataclass(frozen=True, kw_only=True)
class BatchOptions(ThreadOptions):
    """Options of experiment 4.

    Args:
        batches: Batch sizes.
        out: Folder for batches.json and the figure.
    """

    batches: tuple[PositiveInt, ...] = tuple(4**power for power in range(7))
    out: Path = Path("results/experiment4")


@dataclass(frozen=True, kw_only=True)
class CostOptions(DataOptions, ThreadOptions):
    """Options of experiment 5.

    Args:
        dataset: Name of the data set.
        only: Names of networks, such as LeNet or LeNet-expanded; those of the experiment if
            none is given. Their runs are in runs/NAME-DATASET-seedN.
        epochs: Passes over the training images; those of StageNet's preset if not given.
        seeds: Seeds of the runs.
        measure: Train nothing; time the networks in ONNX Runtime with one thread, and count the int8
            instructions of an emulated Cortex-M4.
        out: Folder for rows, table and figure.
    """

    dataset: str = "cifar10"
    only: tuple[str, ...] = ()
    epochs: PositiveInt | None = None
    seeds: tuple[int, ...] = (0,)
    measure: bool = False
    out: Path = Path("results/experiment5")


@dataclass(frozen=True, kw_only=True)
class RobustnessOptions(DataOptions, ThreadOptions):
    """Options of experiment 6.

    Args:
        dataset: Name of the data set.
        only: Names of networks of experiment 5 that are trained.
        images: Use the first test images only; all if not given.
        out: Folder for rows, table and figure.
    """

    dataset: str = "cifar10"
    only: tuple[str, ...] = ()
    images: PositiveInt | None = None
    out: Path = Path("results/experiment6")


@dataclass(frozen=True, kw_only=True)
class ExpansionOptions(DataOptions, ThreadOptions):
    """Options of experiment 7.

    Args:
        dataset: Name of the data set.
        only: Names of networks of experiment 5; four of them if none is given.
        variants: Names of variants; all if none is given.
        epochs: Passes over the training images.
        validation: Training images to hold out, as a fraction below 1 or a count.
        seeds: Seeds of the runs.
        out: Folder for rows and table.
    """

    dataset: str = "cifar10"
    only: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    epochs: PositiveInt = 8
    validation: PositiveFloat = 5000
    seeds: tuple[int, ...] = (0,)
    out: Path = Path("results/expansion")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(ThreadOptions):
    """Options of the benchmark against other engines.

    Args:
        batch: Batch sizes.
        executions: Timed calls of each engine, three per turn.
        out: Folder for bench.json and bench.md.
    """

    batch: tuple[PositiveInt, ...] = (64,)
    executions: PositiveInt = 45
    out: Path = Path("results/benchmarks")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(DataOptions):
    """Options of runs on an emulated microcontroller.

    Args:
        dataset: Data set of the test images; the one a network was trained on if not given.
        images: Test images to run, the first ones.
        dtype: float32, or int8: weights and features of 8 bits, with scales from training images.
        out: Folder for devices.json and devices.md.
    """

    dataset: str | None = None
    images: PositiveInt = 200
    dtype: Literal["float32", "int8"] = "float32"
    out: Path = Path("results/devices")


@dataclass(frozen=True, kw_only=True)
class SweepOptions(DataOptions):
    """Options of the hyperparameter search.

    Args:
        trials: Trials of the study in total, pruned ones included.
        max_epochs: Most epochs of a trial.
        size: Height and width to which pictures of a folder are scaled, N or HxW; 32 if not given.
        validation: Training images to hold out, as a fraction below 1 or a count.
        seed: Seed of the weights and the order of the images.
        out: Folder for tables and figure; results/sweep/NETWORK-DATASET if not given.
    """

    trials: PositiveInt = 50
    max_epochs: PositiveInt = 50
    size: str | None = None
    validation: PositiveFloat = 0.1
    seed: int = 0
    out: Path | None = None
