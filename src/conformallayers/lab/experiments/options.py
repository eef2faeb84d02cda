"""Options of the experiments, shared by the Python functions and the command line.

This module imports no torch, so that the command line can print its help at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import paper


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The location of the data sets.

    Args:
        data_root: Folder of the data sets; CONFORMALLAYERS_DATA, or else data, if not given.
        verify: Compare the checksums of the data files; if not, accept any data in the same format.
    """

    data_root: Path | None = None
    verify: bool = True


@dataclass(frozen=True, kw_only=True)
class AccuracyOptions(DataOptions):
    """Options of experiments 1 and 2.

    Args:
        network: Only cells of these networks.
        dataset: Only cells of these data sets.
        variant: Settings other than the paper's, by name, such as modern.
        seed: Seeds of the weights and the order of the images; several are trained one by one.
        threads: Threads of torch; its own default if not given.
        device: Device to train on.
        again: Delete finished cells and their runs, and train them again.
        out: Folder for one JSON file per cell.
        runs: Folder for one run folder per cell.
    """

    network: tuple[str, ...] = ()
    dataset: tuple[str, ...] = ()
    variant: tuple[str, ...] = ()
    seed: tuple[int, ...] = (0,)
    threads: int | None = None
    device: str = "cpu"
    again: bool = False
    out: Path = Path("results/accuracy")
    runs: Path = Path("runs")


@dataclass(frozen=True, kw_only=True)
class TimeOptions:
    """Options of the experiments that measure time.

    Args:
        executions: Timed calls of each path in each row.
        seed: Seed of the weights and images.
        threads: Threads of torch; its own default if not given.
        resume: Keep the rows that are already measured.
    """

    executions: int = 100
    seed: int = 0
    threads: int | None = None
    resume: bool = False


@dataclass(frozen=True, kw_only=True)
class DepthOptions(TimeOptions):
    """Options of experiment 3.

    Args:
        depths: Numbers of convolutions; 1 to 30 if none is given.
        batch: Images per batch.
        strategy: Strategy of the fold.
        out: Folder for times.json and the figure.
    """

    depths: tuple[int, ...] = ()
    batch: int = 64
    strategy: str = "auto"
    out: Path = Path("results/experiment3")


@dataclass(frozen=True, kw_only=True)
class BatchOptions(TimeOptions):
    """Options of experiment 4.

    Args:
        batches: Batch sizes.
        memory: Memory budget such as 4GiB: find the largest batch of each path within it.
        seconds: Time limit per row; slow paths are called less often.
        out: Folder for batches.json and the figure.
    """

    batches: tuple[int, ...] = tuple(4**power for power in range(7))
    memory: str | None = None
    seconds: float = 20.0
    out: Path = Path("results/experiment4")


@dataclass(frozen=True, kw_only=True)
class TrainedOptions(DataOptions):
    """Options of the experiments that compare trained networks.

    Args:
        dataset: Name of the data set.
        only: Names of networks, such as LeNet, StageNet-micro or StageReLUNet-micro-max; those of the experiment if none is given.
        epochs: Passes over the training images; those of StageNet's preset if not given.
        threads: Threads of torch; its own default if not given.
        resume: Keep the rows that are there.
        runs: Folder of training runs, NAME-DATASET-seedN; finished ones are taken over.
    """

    dataset: str = "cifar10"
    only: tuple[str, ...] = ()
    epochs: int | None = None
    threads: int | None = None
    resume: bool = True
    runs: Path = Path("runs")


@dataclass(frozen=True, kw_only=True)
class CostOptions(TrainedOptions):
    """Options of experiment 5.

    Args:
        seeds: Seeds of the runs; 0, 1 and 2 if none is given, 0 alone where a run takes half an hour.
        ablation: Take the ablation of StageNet micro instead: depth, ReSPro and rectifier.
        measure: Train nothing; time the trained networks, in ONNX Runtime with one thread.
        executions: Timed calls of each network.
        device: Device to train on.
        out: Folder for rows, table and figure.
    """

    seeds: tuple[int, ...] = ()
    ablation: bool = False
    measure: bool = False
    executions: int = 60
    device: str = "cpu"
    out: Path = Path("results/experiment5")


@dataclass(frozen=True, kw_only=True)
class RobustnessOptions(TrainedOptions):
    """Options of experiment 6.

    Args:
        corruptions: Names of corruptions, and scaled; all if none is given.
        strengths: Strengths from 1 to 5.
        images: Use the first test images only; all if not given.
        seeds: Seeds of the runs.
        seed: Seed of the corruptions.
        out: Folder for rows, table and figure.
    """

    corruptions: tuple[str, ...] = ()
    strengths: tuple[int, ...] = (1, 2, 3, 4, 5)
    images: int | None = None
    seeds: tuple[int, ...] = (0,)
    seed: int = 0
    out: Path = Path("results/experiment6")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of the benchmark against other engines.

    Args:
        batch: Batch sizes.
        depths: Depths of DkNet.
        executions: Timed calls of each engine, three per turn.
        sessions: Engines of cl.Session that run the fold: onnxruntime, torch, numpy.
        threads: Threads of every engine; all cores if not given.
        out: Folder for bench.json and bench.md.
        resume: Keep the rows of an earlier run that this run does not measure again.
    """

    batch: tuple[int, ...] = (64,)
    depths: tuple[int, ...] = (1, 3, 9, 13, 30)
    executions: int = 45
    sessions: tuple[str, ...] = ("onnxruntime",)
    threads: int | None = None
    out: Path = Path("results/benchmarks")
    resume: bool = True


@dataclass(frozen=True, kw_only=True)
class SweepOptions(DataOptions):
    """Options of the hyperparameter search.

    Args:
        trials: Trials of the study in total, pruned ones included.
        max_epochs: Most epochs of a trial.
        space: Options to search, as NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=VALUE,VALUE for options of train, such as
            learning_rate=1e-4:0.1:log; the rest is searched as usual.
        size: Height and width to which pictures of a folder are scaled, N or HxW; 32 if not given.
        preset: Size of StageNet and StageReLUNet.
        subset: Train on this many images, always the same; all if not given.
        validation: Training images to hold out, as a fraction below 1 or a count.
        alpha: young (the paper's), spectral, learned or a number; for conformal networks.
        projective: Use the projective form of ReSPro.
        seed: Seed of the search, the weights and the order of the images.
        threads: Threads of torch; its own default if not given.
        storage: Optuna storage URL, such as sqlite:///study.db; a journal in the folder if not given.
        out: Folder for tables and figure; results/sweep/NETWORK-DATASET if not given.
    """

    trials: int = 50
    max_epochs: int = paper.EPOCHS[1]
    space: tuple[str, ...] = ()
    size: str | None = None
    preset: str | None = None
    subset: int | None = None
    validation: float = 0.1
    alpha: str | None = None
    projective: bool = False
    seed: int = 0
    threads: int | None = None
    storage: str | None = None
    out: Path | None = None


@dataclass(frozen=True, kw_only=True)
class InspectOptions(DataOptions):
    """Options of the inspection of a trained network.

    Args:
        samples: Number of test images, the first ones.
        out: Folder for inspect.txt and figures; results/inspect/RUN if not given.
        threads: Threads of torch; its own default if not given.
    """

    samples: int = 1000
    out: Path | None = None
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(DataOptions):
    """Options of runs on an emulated microcontroller.

    Args:
        dataset: Data set of the test images; the one a network was trained on if not given.
        images: Test images to run, the first ones.
        dtype: float32, or int8: weights and features of 8 bits, with scales from training images.
        out: Folder for one JSON file per network, and a table of all.
    """

    dataset: str | None = None
    images: int = 200
    dtype: str = "float32"
    out: Path = Path("results/devices")
