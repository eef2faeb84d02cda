"""Train networks: seeded, resumable after every epoch, on one or several processes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from ...container import layer_by_layer
from ...diagnosis import diagnose
from ...errors import ConformalError, first_line, ignored_warnings, refusal
from ...expansion import collapse
from ...nn.layers import Centre
from ...utils.files import write_csv, write_json
from ...utils.progress import progress
from ...utils.text import csv_text
from ..checks import torch_settings
from ..data import datasets
from ..data.batches import Batches, as_input, derive_seed, mean_image
from ..data.datasets import Dataset
from ..measure import keep_freed_memory
from . import run_folder
from .config import TrainConfig, make_config, resolved
from .distributed import Ranks, process_group
from .evaluate import accuracy, accuracy_by_path, check_outputs, has_conformal_layers
from .own_networks import absolute, is_own, source_hash
from .run_folder import METRICS, RESULT
from .saved_models import CHECKPOINT

TRAINING, CONFUSION = "training", "confusion.csv"  # a figure and a table
_FEW_STEPS = 100  # the running statistics of batch norms need about as many
_DIAGNOSED = 32  # training images that a health check looks at


@dataclass(frozen=True)
class TrainResult:
    """A finished run."""

    row: dict[str, Any]  # the contents of result.json: accuracies, options, time, versions
    history: list[dict[str, Any]]  # loss and accuracies of each epoch, as in metrics.csv
    folder: Path
    model: nn.Module  # trained

    @property
    def accuracy(self) -> float:
        """The test accuracy, folded if the network folds."""
        return float(self.row["accuracy"])


def train(
    network: str,
    dataset: str | Dataset,
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    data_root: str | os.PathLike[str] | None = None,
    verify: bool = True,
    figures: bool = False,
    console: Console | None = None,
    warn: bool = False,
    **options: Any,
) -> TrainResult:
    """Train a network and measure it on the test images, layer by layer and folded.

    The test images are used once, at the end. Every epoch ends with a checkpoint; a run that was
    killed and resumed ends in the same weights, bit by bit, on the same machine and threads.
    Under ``torchrun`` the processes share every batch. The network has as many outputs as the data
    set has classes.

    The other arguments are those of ``conformallayers train``.

    Args:
        dataset: a name for :func:`conformallayers.lab.data.datasets.load`, a folder of pictures, or a data set.
        console: where to show progress; None takes the terminal.
        warn: show the warnings of :func:`conformallayers.diagnose` after the first epoch.
        **options: the fields of :class:`conformallayers.lab.training.config.TrainConfig`; a
            ``training_preset`` sets those that are not given.
    """
    size = options.get("size")
    source = dataset
    if not isinstance(source, Dataset):
        source = datasets.load(source, data_root, size=size, verify=verify)
    network = absolute(network)
    derived = {"source": source_hash(network), **source.options}
    names = {"network": network, "dataset": source.name, "size": size and str(size)}
    config = make_config(**resolved({**options, **names, **derived}))
    folder = config.folder if out is None else Path(out)
    extra = {"out": out, "data_root": data_root, "no_check": not verify}
    with torch_settings(config.threads), process_group(config.device) as ranks:
        share = config.validation
        train_set, held_out = source.split(share) if share else (source, None)
        run = _Run(config, train_set, held_out, folder, config.command(extra), ranks)
        if ranks.is_first:
            run_folder.prepare_folder(folder, config, resume)
        ranks.barrier()
        shown = (console or Console()) if ranks.is_first else Console(quiet=True)
        try:
            if resume:
                run.restore()
            run.train(shown, warn and ranks.is_first)
            return run.finish(source, figures)
        except KeyboardInterrupt as stop:
            done = f"Interrupted after epoch {len(run.history)} of {config.epochs}."
            raise KeyboardInterrupt(f"{done} To go on: {run.command} --resume") from stop


def epoch_rows(
    config: TrainConfig, train_set: Dataset, held_out: Dataset
) -> Iterator[dict[str, Any]]:
    """Train without writing anything; yield loss and accuracies of each epoch, on held-out test images."""
    config = config.model_copy(update={"classes": train_set.classes})
    with torch_settings(config.threads):
        run = _Run(config, train_set, held_out)
        for epoch in range(config.epochs):
            yield run.train_epoch(epoch)


def make_scheduler(
    config: TrainConfig, optimizer: torch.optim.Optimizer, steps: int, done: int = 0
) -> LRScheduler:
    """Return the learning rate schedule of a run of ``steps``, of which ``done`` lie behind a checkpoint."""
    # A schedule that goes on takes its initial rates from the groups of the optimizer, where the
    # schedule of step 0 has left them: both must be made for the same optimizer.
    last = done - 1
    if config.schedule == "constant":
        return LambdaLR(optimizer, lambda _: 1.0, last_epoch=last)
    return OneCycleLR(optimizer, config.learning_rate, steps, cycle_momentum=False, last_epoch=last)


def _make_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    rate, decay = config.learning_rate, config.weight_decay
    if config.optimizer == "adamw":
        # Matrices and kernels decay, biases, gains and radii do not. One group for each parameter
        # keeps their order, by which a checkpoint finds the optimizer's state.
        decays = ((p, decay if p.dim() > 1 else 0.0) for p in parameters)
        groups = [{"params": [p], "weight_decay": d} for p, d in decays]
        return torch.optim.AdamW(groups, rate, fused=True)  # one call for each instead of a dozen
    if config.optimizer == "rmsprop":
        return torch.optim.RMSprop(parameters, rate, weight_decay=decay)
    return torch.optim.Adam(parameters, rate, weight_decay=decay)


class _Run:
    """A run: the network with its optimizer and schedule, the images, and the rows of its epochs."""

    def __init__(
        self,
        config: TrainConfig,
        train_set: Dataset,
        held_out: Dataset | None,
        folder: Path = Path(),
        command: str = "",
        ranks: Ranks | None = None,
    ) -> None:
        ranks = ranks or Ranks()
        keep_freed_memory()
        torch.manual_seed(config.seed)
        self.config, self.folder, self.command = config, folder, command
        self.held_out, self.ranks = held_out, ranks
        images, labels = train_set.train_images, train_set.train_labels
        self.model = config.build().to(config.device)
        if is_own(config.network):
            check_outputs(self.model, config.input_shape, config.classes)
        for module in self.model.modules():
            if isinstance(module, Centre):
                module.fit(mean_image(images, config.input_shape))
        self.batches = Batches(
            images,
            labels,
            config.batch_size,
            shuffle=True,
            seed=config.seed,
            flips=config.flips,
            shift=config.shift,
            shape=config.input_shape,
            device=config.device,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        self.total = config.epochs * len(self.batches)
        self.optimizer = _make_optimizer(config, self.model)
        self.scheduler = make_scheduler(config, self.optimizer, self.total)
        self.history: list[dict[str, Any]] = []

    def restore(self) -> None:
        """Continue behind the last checkpoint, if there is one."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return
        found = run_folder.load_checkpoint(path)
        found.restore(self.model, self.optimizer)
        self.history = found.history
        done = len(self.history) * len(self.batches)
        self.scheduler = make_scheduler(self.config, self.optimizer, self.total, done)

    def train(self, console: Console, warn: bool) -> None:
        """Train the remaining epochs and write a checkpoint after each."""
        for epoch in range(len(self.history), self.config.epochs):
            row = self.train_epoch(epoch)
            self.save([*self.history, row])
            shares = {"training": "train_accuracy", "validation": "validation_accuracy"}
            told = [f"{kind} {100 * row[key]:.2f} %" for kind, key in shares.items() if key in row]
            label = f"epoch {epoch + 1}/{self.config.epochs}"
            line = "   ".join([label, f"loss {row['loss']:.3f}", *told])
            console.print(line, highlight=False)
            for warning in self.health_warnings() if warn and epoch == 0 else ():
                console.print(warning, highlight=False, markup=False, soft_wrap=True)

    def health_warnings(self) -> Iterator[str]:
        """Yield a warning of a short run, and those of diagnose for a network with ConformalLayers."""
        if self.total < _FEW_STEPS:
            remedy = "lower --batch-size or raise --epochs"
            yield f"warning: only {self.total} steps of the optimizer: {remedy}"
        if not has_conformal_layers(self.model):
            return
        images = self.batches.images[:_DIAGNOSED].to(self.config.device)
        try:
            found = diagnose(self.model, as_input(images, shape=self.config.input_shape))
            yield from (f"warning: {warning}" for warning in found.warnings)
        except ConformalError as error:  # a check that fails is no reason to stop
            yield f"warning: not diagnosed: {first_line(error)}"

    def train_epoch(self, epoch: int) -> dict[str, Any]:
        """Train for one epoch and return its row."""
        started = time.perf_counter()
        config, batches, ranks = self.config, replace(self.batches, epoch=epoch), self.ranks
        # For dropout: a resumed run draws the same numbers in an epoch as one that was not stopped.
        torch.manual_seed(derive_seed(config.seed, epoch, f"rank {ranks.rank}"))
        self.model.train()
        total, correct = 0.0, 0.0
        shown = progress(batches, len(batches), f"epoch {epoch + 1}/{config.epochs}")
        for index, (images, labels) in enumerate(shown):
            (rate, *_) = self.scheduler.get_last_lr()
            # Plain convolutions and poolings take a tenth to a third less time on channels-last maps.
            scores = self.model(images.contiguous(memory_format=torch.channels_last))
            loss = F.cross_entropy(scores, labels, reduction="sum")
            value = float(loss.detach())
            if not math.isfinite(value):
                where = f"train, epoch {epoch + 1}, batch {index + 1}"
                remedy = f"Lower --learning-rate; {self.folder} holds the run up to epoch {epoch}."
                raise refusal(where, "a finite loss", str(value), remedy)
            self.optimizer.zero_grad()
            (loss / batches.size(index)).backward()
            ranks.add_gradients(self.model)
            self.optimizer.step()
            self.scheduler.step()
            total += value
            correct += int((scores.detach().argmax(1) == labels).sum())
        total, correct = ranks.sum(total, correct, device=config.device)
        count = len(batches.labels)
        row = {"epoch": epoch + 1, "loss": total / count, "train_accuracy": correct / count}
        if self.held_out is not None:
            self.model.eval()
            with layer_by_layer():
                how = self.held_out, config.input_shape, config.device
                row["validation_accuracy"] = accuracy(self.model, *how)
        return {**row, "learning_rate": rate, "seconds": time.perf_counter() - started}

    def save(self, history: list[dict[str, Any]]) -> None:
        """Write the checkpoint of a finished epoch, then the metrics, which it holds too."""
        # The history grows between both: an interrupt then tells the epoch of the checkpoint.
        if self.ranks.is_first:
            path, config = self.folder / CHECKPOINT, self.config.model_dump()
            run_folder.save_checkpoint(path, self.model, self.optimizer, config, history)
        self.history = history
        if self.ranks.is_first:
            write_csv(self.folder / METRICS, history)

    def finish(self, source: Dataset, figures: bool) -> TrainResult:
        """Measure the network on the test images, write the result, and draw figures."""
        config, last = self.config, self.history[-1]
        found, scores = accuracy_by_path(self.model, source, config.input_shape, config.device)
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
            "seconds": sum(epoch["seconds"] for epoch in self.history),
            "command": self.command,
            "commit": run_folder.commit(),
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "processes": self.ranks.world_size,
            "samples": {"train": len(self.batches.labels), "test": len(source.test_labels)},
            "parameters": sum(p.numel() for p in collapse(self.model).parameters()),
            "parameters_in_training": sum(p.numel() for p in self.model.parameters()),
        }
        if self.ranks.is_first:
            write_csv(self.folder / METRICS, self.history)
            write_json(self.folder / RESULT, row)
            if figures:
                write_outcome(self.folder, config, self.history, source.test_labels, scores)
        return TrainResult(row, self.history, self.folder, self.model)


def write_outcome(
    folder: Path,
    config: TrainConfig,
    history: Sequence[dict[str, Any]],
    labels: Tensor,
    scores: Tensor,
) -> None:
    """Draw the curves, and write how often a class (a row) was taken for which: labels (N,), scores (N, classes)."""
    from ..report import figures

    classes = config.classes
    names = [csv_text(name) for name in config.class_names or map(str, range(classes))]
    pairs = torch.bincount(labels * classes + scores.argmax(1), minlength=classes**2)
    counts = pairs.view(classes, classes).tolist()
    rows = [
        {"true/predicted": name, **dict(zip(names, row, strict=True))}
        for name, row in zip(names, counts, strict=True)
    ]
    write_csv(folder / CONFUSION, rows)
    figure = figures.training_figure(history, f"{config.network_name}, {config.dataset_name}")
    with ignored_warnings():  # of letters that the font does not have
        figures.save(figure, folder, TRAINING)
