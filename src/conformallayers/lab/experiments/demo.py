"""The demo: train a conformal network on digits, fold it, compare both paths, draw figures, run a network of the zoo."""

from __future__ import annotations

import platform
import time
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import conformallayers as cl

from ...utils.files import write_json
from ...utils.text import table
from ...utils.timing import interleave
from ..data.catalogue import CLASSES, DIGITS, SHAPES
from ..data.datasets import Dataset, digits
from ..report import figures
from ..report.run_figures import training_figure
from ..settings import torch_settings
from .records import Row, staged_folder

SHAPE = SHAPES[DIGITS]
BATCHES = (1, 64)
SHIPPED = "digits-micro"  # the network of the zoo
_EXECUTIONS = 123  # timed calls of each path
_SHOWN = 4  # digits that SHIPPED classifies
_SHADES = " .:-=+*#%@"


class DemoConfig(BaseModel):
    """Configuration of the demo; saved with its results."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: PositiveInt = 20
    seed: NonNegativeInt = 0
    batch_size: PositiveInt = 64
    learning_rate: PositiveFloat = 3e-3
    label_smoothing: float = 0.2
    depth: PositiveInt = 6
    channels: PositiveInt = 16
    alpha: str | float | None = "spectral"
    gain: float = 10.0
    hidden: PositiveInt = 128
    threads: PositiveInt = 1  # more threads do not speed up layers this small


def build_model(config: DemoConfig) -> nn.Sequential:
    """Return convolutions with ReSPro and a learned gain, then a head of two linear layers.

    Shape:
        (B, 1, 8, 8) → (B, 10)
    """
    layers: list[nn.Module] = []
    for index in range(config.depth):
        layers.append(cl.Conv2d(config.channels if index else 1, config.channels, 3, padding=1))
        layers.append(cl.ReSPro(config.alpha))
    layers.append(cl.Scale(config.gain))
    width = config.channels * SHAPE[1] * SHAPE[2]
    return nn.Sequential(
        OrderedDict(
            features=cl.ConformalLayers(*layers),
            flatten=nn.Flatten(),
            hidden=nn.Linear(width, config.hidden),
            relu=nn.ReLU(),
            output=nn.Linear(config.hidden, CLASSES),
        )
    )


def train(model: nn.Module, data: Dataset, config: DemoConfig) -> Iterator[Row]:
    """Train with Adam and a one-cycle learning rate; yield loss, rate and test accuracy of every epoch."""
    count = len(data.train_labels)
    optimiser = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, config.learning_rate, total_steps=config.epochs * -(-count // config.batch_size)
    )
    loss_of = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    for epoch in range(config.epochs):
        model.train()
        total = 0.0
        for rows in torch.randperm(count).split(config.batch_size):
            (rate,) = schedule.get_last_lr()
            loss = loss_of(model(data.train_images[rows]), data.train_labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += float(loss.detach()) * len(rows)
        model.eval()
        with torch.no_grad():
            share = accuracy(model(data.test_images), data.test_labels)
        row = {"epoch": epoch + 1, "loss": total / count, "learning_rate": rate}
        yield {**row, "test_accuracy": share}


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Return the share of samples whose largest score is the label's."""
    return float((scores.argmax(1) == labels).double().mean())


def relu_twin(model: nn.Sequential) -> nn.Sequential:
    """Return the same stack with ReLU for ReSPro, to compare its time."""
    features: Any = model.features
    layers = [nn.ReLU() if isinstance(layer, cl.ReSPro) else layer for layer in features]
    return nn.Sequential(*layers, *list(model)[1:]).eval()


def compare(model: nn.Sequential, folded: cl.Folded, data: Dataset) -> dict[str, Any]:
    """Run both paths on the test images; return accuracies, differences and times."""
    paths = {"layers": model.eval(), "folded": folded, "relu": relu_twin(model)}
    times: dict[str, Any] = {}
    with torch.no_grad(), cl.layer_by_layer():
        layered, direct = model(data.test_images), folded(data.test_images)
        for batch in BATCHES:
            x = data.test_images[:batch]
            engines = {name: partial(path, x) for name, path in paths.items()}
            found = interleave(engines, _EXECUTIONS, pause=0.0)
            seconds = {name: timing.median / batch for name, timing in found.items()}
            times[str(batch)] = {**seconds, "ratio": seconds["layers"] / seconds["folded"]}
    return {
        "accuracy": {
            "layers": accuracy(layered, data.test_labels),
            "folded": accuracy(direct, data.test_labels),
        },
        "largest_relative_difference": cl.testing.relative_error(direct, layered),
        "largest_absolute_difference": float((direct - layered).abs().max()),
        "seconds_per_image": times,
        "strategy": folded.strategy,
    }


def run_demo(out: Path, config: DemoConfig) -> dict[str, Any]:
    """Run the demo, write figures and ``metrics.json`` into a folder, and return its metrics."""
    console, started = Console(), time.monotonic()
    settings = torch_settings(config.threads, config.seed)
    with staged_folder(out, "demo --out") as folder, settings:
        data = digits()
        model = build_model(config)
        history = _train_with_bar(model, data, config, console)
        trained = time.monotonic() - started
        folded = cl.fold(model, SHAPE)
        console.print(f"\nFolded {config.depth} convolutions and {config.depth} activations:")
        console.print(str(folded.explain()), markup=False, highlight=False, soft_wrap=True)
        results = compare(model, folded, data)
        _draw(model, history, config, folder)
        metrics: dict[str, Any] = {
            "config": config.model_dump(),
            "versions": {
                "conformallayers": cl.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            "samples": {"train": len(data.train_labels), "test": len(data.test_labels)},
            **results,
            "shipped": classify(data),
            "history": {
                "losses": [row["loss"] for row in history],
                "accuracies": [row["test_accuracy"] for row in history],
            },
            "seconds": {"training": trained, "total": time.monotonic() - started},
        }
        write_json(folder / "metrics.json", metrics)
        names = sorted(path.name for path in folder.iterdir())
    console.print(f"\n{_summary(metrics)}", highlight=False, soft_wrap=True)
    console.print(f"Wrote {', '.join(names)} to {out}/", highlight=False, soft_wrap=True)
    shown = drawn(data.test_images[:_SHOWN], metrics["shipped"]["classes"])
    console.print(
        f"\n{SHIPPED}, which ships with the package and was trained on digits, says:\n{shown}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return metrics


def classify(data: Dataset) -> dict[str, Any]:
    """Classify the first test images with a network of the zoo; return its name, their classes and labels."""
    network = cl.zoo.load(SHIPPED)
    with torch.inference_mode():
        classes = network(data.test_images[:_SHOWN]).argmax(1)
    labels = data.test_labels[:_SHOWN]
    return {"name": SHIPPED, "classes": classes.tolist(), "labels": labels.tolist()}


def drawn(images: Tensor, classes: list[int]) -> str:
    """Draw images (N, 1, 8, 8) side by side with characters, two for each pixel, and their classes below."""
    levels = (images[:, 0] * (len(_SHADES) - 1)).round().int().transpose(0, 1)
    lines = [
        "  ".join("".join(2 * _SHADES[level] for level in row) for row in rows)
        for rows in levels.tolist()
    ]
    width = 2 * SHAPE[2]
    lines.append("  ".join(str(one).center(width) for one in classes))
    return "\n".join(line.rstrip() for line in lines)


def _train_with_bar(
    model: nn.Module, data: Dataset, config: DemoConfig, console: Console
) -> list[Row]:
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs   loss {task.fields[loss]}   accuracy {task.fields[accuracy]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=config.epochs, loss="…", accuracy="…")
        history = []
        for row in train(model, data, config):
            history.append(row)
            shown = f"{100 * row['test_accuracy']:.1f} %"
            progress.update(task, advance=1, loss=f"{row['loss']:.3f}", accuracy=shown)
    return history


def _draw(model: nn.Sequential, history: list[Row], config: DemoConfig, folder: Path) -> None:
    # Up to the first layer of the head, which folds into M.
    folded = cl.fold(model[:3], SHAPE)
    title = f"{config.depth} convolutions, {config.depth} ReSPro and a linear layer"
    drawn = {
        "respro": figures.respro_surface(),
        "respro-curve": figures.respro_curve(),
        "training": training_figure(history, "Training, layer by layer"),
        "folded": figures.folded_arrays(folded.matrix(), folded.forms()[0], title),
    }
    for name, figure in drawn.items():
        figures.save(figure, folder, name)


def _summary(metrics: dict[str, Any]) -> str:
    shares = metrics["accuracy"]
    rows = [["accuracy", *(f"{100 * shares[path]:.2f} %" for path in ("layers", "folded")), "", ""]]
    for batch, times in metrics["seconds_per_image"].items():
        layers, folded, relu = (f"{1e6 * times[p]:.1f} µs" for p in ("layers", "folded", "relu"))
        ratio = f"{times['ratio']:.1f}"
        rows.append([f"time per image, batch {batch}", layers, folded, ratio, relu])
    for kind in ("relative", "absolute"):
        difference = f"{metrics[f'largest_{kind}_difference']:.1e}"
        rows.append([f"largest {kind} difference", "", difference, "", ""])
    header = [f"on {metrics['samples']['test']} test images"]
    header += ["layer by layer", "folded", "ratio", "with ReLU, untrained"]
    return table(header, rows)
