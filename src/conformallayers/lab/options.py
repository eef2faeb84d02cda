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
        data_root: Folder of the data sets; by default the variable CONFORMALLAYERS_DATA, else ./data.
        verify: Compare the checksums of the data files; --no-check accepts any data in the same format.
    """

    data_root: Path | None = None
    verify: Annotated[bool, Parameter(name="check")] = True


@dataclass(frozen=True)
class FoldOptions:
    """How to fold a network; a fold is taken as it is.

    Args:
        shape: Shape of one sample, such as 3,224,224; by default that of the stored training images.
        weights: File with the state_dict of PACKAGE:FACTORY, from safetensors or torch.save.
        strategy: auto (the default), layers, conv, dense or banded.
        dtype: Data type of the fold; by default that of the network.
        labels: Text file with one class name per line; by default the names of the data set.
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
        top: Number of classes per image.
        format: Format of the output.
        out: Output file; by default standard output.
        batch: Images per batch.
        engine: Engine that runs the fold.
        threads: Threads of torch and ONNX Runtime in each process; by default as many as torch takes.
        ray: Share the work among processes with Ray Data.
        workers: Number of Ray processes.
        address: Address of a running Ray cluster; by default a local one is started.
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
        threads: Threads of torch; by default as many as torch takes.
    """

    threads: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class AccuracyOptions(DataOptions, ThreadOptions):
    """Options of experiments 1 and 2.

    Args:
        dataset: Data sets to train on; by default all three.
        variant: Named settings that replace the paper's, such as modern.
        seed: Seeds of the weights and the order of the images, trained one after the other.
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
        executions: Timed calls per path and depth.
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
        only: Names of networks, such as LeNet or LeNet-expanded; by default all of the experiment.
            Their runs are in runs/NAME-DATASET-seedN.
        epochs: Passes over the training images; by default those of StageNet's preset.
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
        only: Trained networks of experiment 5; by default six of them.
        images: Number of test images, the first ones; by default all.
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
        only: Networks of experiment 5; by default four of them.
        variants: Names of variants; by default all.
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
        dataset: Data set of the test images; by default the one a network was trained on.
        images: Number of test images, the first ones.
        dtype: Arithmetic on the device; int8 is calibrated on training images.
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
        trials: Total number of trials, pruned ones included.
        max_epochs: Largest number of epochs of a trial.
        size: Height and width to which pictures of a folder are scaled, N or HxW; by default 32.
        validation: Training images to hold out, as a fraction below 1 or a count.
        seed: Seed of the weights and the order of the images.
        out: Folder for tables and figure; by default results/sweep/NETWORK-DATASET.
    """

    trials: PositiveInt = 50
    max_epochs: PositiveInt = 50
    size: str | None = None
    validation: PositiveFloat = 0.1
    seed: int = 0
    out: Path | None = None
