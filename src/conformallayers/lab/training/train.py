"""Train the paper's networks: seeded, resumable after every epoch, on one or several processes."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from ...errors import refusal
from ...nn.container import layer_by_layer
from ...nn.extra_layers import Centre
from ...utils.files import write_json
from ..data.batches import Batches, derive_seed, mean_image
from ..data.catalogue import CLASSES
from ..data.datasets import Dataset, load
from ..settings import torch_settings
from . import checkpoint, runs
from .checkpoint import TrainState
from .config import TrainConfig, make_config
from .distributed import Ranks, lost_process, process_group
from .evaluate import CHECKPOINT, accuracy, accuracy_by_path
from .recipes import resolved


class Stopped(KeyboardInterrupt):
    """Raised when a run is interrupted; its message has the command that resumes it."""


@dataclass(frozen=True)
class TrainResult:
    """A finished run.

    Args:
        row: the contents of ``result.json``: accuracies, options, time, versions.
        history: loss and accuracies of each epoch, as in ``metrics.csv``.
        folder: of the run.
        model: the trained network.
    """

    row: dict[str, Any]
    history: list[dict[str, Any]]
    folder: Path
    model: nn.Module

    @property
    def accuracy(self) -> float:
        """The test accuracy, folded if the network folds."""
        value: float = self.row["accuracy"]
        return value


@dataclass
class _Run:
    """The state of a run."""

    config: TrainConfig
    folder: Path
    command: str
    ranks: Ranks
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    batches: Batches
    held_out: Dataset | None
    data: str  # md5 of the training images and labels
    history: list[dict[str, Any]] = field(default_factory=list)


def train(
    network: str,
    dataset: str | Dataset,
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    data_root: str | os.PathLike[str] | None = None,
    verify: bool = True,
    console: Console | None = None,
    **options: Any,
) -> TrainResult:
    """Train a network and measure it on the test images, layer by layer and folded.

    The test images are used once, at the end. Every epoch ends with a checkpoint; a run that was
    killed and resumed ends in the same weights, bit by bit, on the same machine and threads.
    Under ``torchrun`` the processes share every batch. The network has as many outputs as the data
    set has classes.

    Args:
        network: a class of :mod:`conformallayers.networks`, by its name.
        dataset: a name for :func:`conformallayers.lab.data.datasets.load`, or a data set.
        out: the folder of the run; None takes one below ``runs`` named after it.
        resume: continue the run in that folder, or start it if there is none.
        data_root, verify: as in :func:`conformallayers.lab.data.datasets.load`.
        console: where to show progress; None takes the terminal.
        **options: the fields of :class:`conformallayers.lab.training.config.TrainConfig`; a
            ``recipe`` sets those that are not given.
    """
    name = dataset if isinstance(dataset, str) else dataset.name
    classes = CLASSES if isinstance(dataset, str) else dataset.classes
    if options.get("classes", classes) != classes:
        got, remedy = repr(options["classes"]), "Leave it out: it follows from the data set."
        raise refusal("train, classes", f"{classes} for {name}", got, remedy)
    options = {"network": network, "dataset": name, **options, "classes": classes}
    config = make_config(**resolved(options))
    folder = config.folder if out is None else Path(out)
    extra = {"out": out, "data_root": data_root, "no_check": not verify}
    console = console or Console()
    with torch_settings(config.threads), process_group(config.device) as ranks:
        source = load(dataset, data_root, verify=verify) if isinstance(dataset, str) else dataset
        train_set, held_out = source, None
        if config.validation:
            train_set, held_out = source.split(config.validation)
        run = _prepare(config, folder, config.command(extra), train_set, held_out, ranks)
        if ranks.is_first:
            runs.prepare_folder(folder, config, resume)
        ranks.barrier()
        try:
            if resume:
                _restore(run)
            _epochs(run, console if ranks.is_first else Console(quiet=True))
            return _finish(run, source)
        except KeyboardInterrupt as stop:
            done = f"Interrupted after epoch {len(run.history)} of {config.epochs}."
            raise Stopped(f"{done} To go on: {run.command} --resume") from stop
        except RuntimeError as error:
            if not lost_process(error):
                raise
            got, remedy = str(error).splitlines()[0], f"To go on: {run.command} --resume"
            raise refusal("train", "all processes of the run", got, remedy) from error


def epoch_rows(
    config: TrainConfig, train_set: Dataset, held_out: Dataset
) -> Iterator[dict[str, Any]]:
    """Train without writing anything; yield loss and accuracies of each epoch, on held-out test images."""
    config = config.model_copy(update={"classes": train_set.classes})
    with torch_settings(config.threads):
        run = _prepare(config, config.folder, "", train_set, held_out, Ranks())
        for epoch in range(config.epochs):
            row: dict[str, Any] = {"epoch": epoch + 1}
            for _ in _steps(run, run.model, epoch, row):
                pass
            yield row


def make_scheduler(
    config: TrainConfig, optimizer: torch.optim.Optimizer, steps: int, done: int = 0
) -> LRScheduler:
    """Return the learning rate schedule of a run.

    Args:
        config, optimizer: of the run.
        steps: the optimizer steps of the whole run.
        done: the steps that an earlier process has taken, with a schedule of the same optimizer.

    Examples:
        >>> config = make_config(
        ...     network="LeNet", dataset="digits", schedule="one-cycle", learning_rate=0.25
        ... )
        >>> schedule = make_scheduler(config, _make_optimizer(config, nn.Linear(1, 1)), 11)
        >>> [round(rate, 4) for rate in schedule.get_last_lr()]
        [0.01]
    """
    last = done - 1
    if config.schedule == "constant":
        return LambdaLR(optimizer, lambda _: 1.0, last_epoch=last)
    return OneCycleLR(optimizer, config.learning_rate, steps, cycle_momentum=False, last_epoch=last)


def _prepare(
    config: TrainConfig,
    folder: Path,
    command: str,
    train_set: Dataset,
    held_out: Dataset | None,
    ranks: Ranks,
) -> _Run:
    torch.manual_seed(config.seed)
    model = config.build().to(config.device)
    for module in model.modules():
        if isinstance(module, Centre):
            module.fit(mean_image(train_set.train_images))
    batches = Batches(
        train_set.train_images,
        train_set.train_labels,
        config.batch_size,
        shuffle=True,
        seed=config.seed,
        flips=config.flips,
        shift=config.shift,
        device=config.device,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    data = hashlib.md5(usedforsecurity=False)
    for tensor in (train_set.train_images, train_set.train_labels):
        data.update(tensor.numpy(force=True).tobytes())
    optimizer = _make_optimizer(config, model)
    scheduler = make_scheduler(config, optimizer, config.epochs * len(batches))
    parts = ranks, model, optimizer, scheduler, batches, held_out
    return _Run(config, folder, command, *parts, data.hexdigest())


def _make_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    rate, decay, momentum = config.learning_rate, config.weight_decay, config.momentum
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, rate, weight_decay=decay)
    if config.optimizer == "adamw":
        # Matrices and kernels decay, biases, gains and radii do not. One group for each parameter
        # keeps their order, by which a checkpoint finds the optimizer's state.
        decays = ((p, decay if p.dim() > 1 else 0.0) for p in parameters)
        return torch.optim.AdamW([{"params": [p], "weight_decay": d} for p, d in decays], rate)
    if config.optimizer == "rmsprop":
        return torch.optim.RMSprop(parameters, rate, weight_decay=decay, momentum=momentum)
    return torch.optim.SGD(parameters, rate, weight_decay=decay, momentum=momentum)


def _restore(run: _Run) -> None:
    found = runs.last_checkpoint(run.folder, run.data)
    if found is not None:
        checkpoint.restore(found, run.model, run.optimizer)
        run.history = found.state.history
        steps = len(run.batches)
        run.scheduler = make_scheduler(
            run.config, run.optimizer, run.config.epochs * steps, len(run.history) * steps
        )


def _epochs(run: _Run, console: Console) -> None:
    """Train the remaining epochs and write a checkpoint after each."""
    model = run.ranks.wrap(run.model)
    total = run.config.epochs
    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
    )
    steps = total * len(run.batches)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        done = len(run.history)
        task = progress.add_task(
            "", total=steps, completed=done * len(run.batches), epoch=f"{done}/{total}", shown=""
        )
        for epoch in range(done, total):
            row = {"epoch": epoch + 1}
            for loss in _steps(run, model, epoch, row):
                progress.update(task, advance=1, shown=f"loss {loss:.3f}")
            _save_epoch(run, [*run.history, row])
            line = _summary(row)
            progress.update(task, epoch=f"{epoch + 1}/{total}", shown=line)
            if not console.is_terminal:
                console.print(f"epoch {epoch + 1}/{total}   {line}", highlight=False)


def _steps(run: _Run, model: nn.Module, epoch: int, row: dict[str, Any]) -> Iterator[float]:
    """Train for one epoch, yield the loss of every batch, and fill in ``row`` at the end."""
    started = time.perf_counter()
    config, batches, ranks = run.config, run.batches.at(epoch), run.ranks
    # For dropout: a resumed run draws the same numbers in an epoch as one that was not stopped.
    torch.manual_seed(derive_seed(config.seed, epoch, f"rank {ranks.rank}"))
    model.train()
    total, correct = 0.0, 0.0
    for index, (images, labels) in enumerate(batches):
        (rate, *_) = run.scheduler.get_last_lr()
        scores = model(images)
        loss = F.cross_entropy(scores, labels, reduction="sum")
        value = float(loss.detach())
        if not math.isfinite(value):
            where = f"train, epoch {epoch + 1}, batch {index + 1}"
            remedy = f"Lower --learning-rate; {run.folder} holds the run up to epoch {epoch}."
            raise refusal(where, "a finite loss", str(value), remedy)
        run.optimizer.zero_grad()
        # Gradients are averaged over the ranks, whose shares of a batch may differ in size.
        (loss * (ranks.world_size / batches.size(index))).backward()
        run.optimizer.step()
        run.scheduler.step()
        total += value
        correct += int((scores.detach().argmax(1) == labels).sum())
        yield value / max(1, len(labels))
    total, correct = ranks.sum(total, correct, device=config.device)
    count = len(batches.labels)
    row |= {"loss": total / count, "train_accuracy": correct / count}
    if run.held_out is not None:
        run.model.eval()
        with layer_by_layer():
            held_out = run.held_out.test_images, run.held_out.test_labels
            row["validation_accuracy"] = accuracy(run.model, *held_out, config.device, ranks)
    row |= {"learning_rate": rate, "seconds": time.perf_counter() - started}


def _save_epoch(run: _Run, history: list[dict[str, Any]]) -> None:
    state = TrainState(config=run.config.model_dump(), history=history, data=run.data)
    if run.ranks.is_first:
        checkpoint.save(run.folder / CHECKPOINT, run.model, run.optimizer, state)
    run.history = history
    if run.ranks.is_first:
        runs.write_metrics(run.folder, history)


def _summary(row: dict[str, Any]) -> str:
    parts = [f"loss {row['loss']:.3f}", f"accuracy {100 * row['train_accuracy']:.2f} %"]
    if "validation_accuracy" in row:
        parts.append(f"validation {100 * row['validation_accuracy']:.2f} %")
    return "   ".join(parts)


def _finish(run: _Run, source: Dataset) -> TrainResult:
    """Measure the trained network on the test images and write the result."""
    config, last = run.config, run.history[-1]
    test = source.test_images, source.test_labels
    found = accuracy_by_path(run.model, *test, config.device, run.ranks)
    row: dict[str, Any] = {
        "network": config.network,
        "dataset": config.dataset,
        "accuracy": found["layers"] if found["folded"] is None else found["folded"],
        "accuracy_folded": found["folded"],
        "accuracy_layers": found["layers"],
        "accuracy_validation": last.get("validation_accuracy"),
        "accuracy_train": last["train_accuracy"],
        "loss": last["loss"],
        "strategy": found["strategy"],
        **config.model_dump(exclude={"network", "dataset", "threads"}),
        "seconds": sum(epoch["seconds"] for epoch in run.history),
        "command": run.command,
        "commit": runs.commit(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "processes": run.ranks.world_size,
        "samples": {"train": len(run.batches.labels), "test": len(source.test_labels)},
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
    }
    if run.ranks.is_first:
        runs.write_metrics(run.folder, run.history)
        write_json(run.folder / runs.RESULT, row)
    return TrainResult(row, run.history, run.folder, run.model)
