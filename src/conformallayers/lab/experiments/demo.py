"""The demo: train a conformal network on digits, fold it, compare both paths, draw figures."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import conformallayers as cl

from ...utils.files import write_json
from ...utils.text import table
from ..checks import torch_settings
from ..data.catalogue import CLASSES, DIGITS, SHAPES
from ..data.datasets import Dataset, digits
from ..measure import interleave
from ..report import figures
from .records import Row

SHAPE = SHAPES[DIGITS]
BATCHES = (1, 64)
_CHANNELS, _HIDDEN, _GAIN = 16, 128, 10.0
_BATCH, _RATE, _SMOOTHING = 64, 3e-3, 0.2  # of the training
_EXECUTIONS = 123  # timed calls of each path


def build_model(depth: int = 6) -> nn.Sequential:
    """Return convolutions with ReSPro and a learned gain, then a head of two linear layers.

    Shape:
        (B, 1, 8, 8) → (B, 10)
    """
    layers: list[nn.Module] = []
    for index in range(depth):
        layers.append(cl.Conv2d(_CHANNELS if index else 1, _CHANNELS, 3, padding=1))
        layers.append(cl.ReSPro("spectral"))
    width = _CHANNELS * SHAPE[1] * SHAPE[2]
    return nn.Sequential(
        cl.ConformalLayers(*layers, cl.Scale(_GAIN)),
        nn.Flatten(),
        nn.Linear(width, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, CLASSES),
    )


def train(model: nn.Module, data: Dataset, epochs: int) -> Iterator[Row]:
    """Train with Adam and a one-cycle learning rate; yield loss, rate and test accuracy of every epoch."""
    count = len(data.train_labels)
    optimiser = torch.optim.Adam(model.parameters(), lr=_RATE)
    steps = epochs * -(-count // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _RATE, total_steps=steps)
    loss_of = nn.CrossEntropyLoss(label_smoothing=_SMOOTHING)
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for rows in torch.randperm(count).split(_BATCH):
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


def compare(model: nn.Sequential, folded: cl.Folded, data: Dataset) -> Row:
    """Run both paths on the test images; return accuracies, differences and times."""
    features: Any = model[0]
    layers = [nn.ReLU() if isinstance(layer, cl.ReSPro) else layer for layer in features]
    relu = nn.Sequential(*layers, *list(model)[1:]).eval()
    paths = {"layers": model.eval(), "folded": folded, "relu": relu}
    times: Row = {}
    with torch.no_grad(), cl.layer_by_layer():
        layered, direct = model(data.test_images), folded(data.test_images)
        for batch in BATCHES:
            x = data.test_images[:batch]
            engines = {name: partial(path, x) for name, path in paths.items()}
            found = interleave(engines, _EXECUTIONS, pause=0.0)
            seconds = {name: timing["median"] / 1e3 / batch for name, timing in found.items()}
            times[str(batch)] = {**seconds, "ratio": seconds["layers"] / seconds["folded"]}
    return {
        "accuracy": {
            "layers": accuracy(layered, data.test_labels),
            "folded": accuracy(direct, data.test_labels),
        },
        "largest_relative_difference": cl.testing.relative_error(direct, layered),
        "seconds_per_image": times,
        "strategy": folded.strategy,
    }


def run_demo(out: Path, *, epochs: int = 20, seed: int = 0, depth: int = 6) -> Row:
    """Run the demo, write figures and ``metrics.json`` into a folder, and return its metrics."""
    console = Console()
    with torch_settings(1, seed):  # more threads do not speed up layers this small
        data, model = digits(), build_model(depth)
        out.mkdir(parents=True, exist_ok=True)
        progress = track(train(model, data, epochs), "training", epochs, console=console)
        history = list(progress)
        folded = cl.fold(model, SHAPE)
        console.print(f"\nFolded {depth} convolutions and {depth} activations:")
        console.print(str(folded.explain()), markup=False, highlight=False, soft_wrap=True)
        options = {"epochs": epochs, "seed": seed, "depth": depth}
        metrics = {"options": options, **compare(model, folded, data), "history": history}
        # Up to the first layer of the head, which folds into M.
        front = cl.fold(model[:3], SHAPE)
    title = f"{depth} convolutions, {depth} ReSPro and a linear layer"
    figures.save(figures.respro_curve(), out, "respro")
    figures.save(figures.training_figure(history, "Training, layer by layer"), out, "training")
    drawn = figures.folded_arrays(front.matrix(), front.forms()[0], title)
    figures.save(drawn, out, "folded")
    write_json(out / "metrics.json", metrics)
    console.print(f"\n{_summary(metrics)}", highlight=False, soft_wrap=True)
    console.print(f"Wrote figures and metrics.json to {out}/", highlight=False, soft_wrap=True)
    return metrics


def _summary(metrics: Row) -> str:
    shares = metrics["accuracy"]
    rows = [["accuracy", *(f"{100 * shares[path]:.2f} %" for path in ("layers", "folded")), "", ""]]
    for batch, times in metrics["seconds_per_image"].items():
        layers, folded, relu = (f"{1e6 * times[p]:.1f} µs" for p in ("layers", "folded", "relu"))
        ratio = f"{times['ratio']:.1f}"
        rows.append([f"time per image, batch {batch}", layers, folded, ratio, relu])
    difference = f"{metrics['largest_relative_difference']:.1e}"
    rows.append(["largest relative difference", "", difference, "", ""])
    header = ["on test images", "layer by layer", "folded", "ratio", "with ReLU, untrained"]
    return table(header, rows)
