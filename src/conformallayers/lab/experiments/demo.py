"""The demo: train networks on digits, plain, expanded and conformal, fold them and time every runtime."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import conformallayers as cl

from ...errors import ConformalError, first_line
from ...nn.expanded import Expanded
from ...session import ENGINES
from ...utils.files import write_json
from ...utils.progress import progress
from ...utils.text import count, size, table
from ..checks import torch_settings
from ..data.batches import as_input
from ..data.catalogue import CLASSES, DIGITS, SHAPES
from ..data.datasets import Dataset, load
from ..measure import interleave
from ..report import figures
from ..training.evaluate import accuracy
from .records import Row

SHAPE = SHAPES[DIGITS]
_DEPTH, _CHANNELS, _HIDDEN, _GAIN = 6, 16, 128, 10.0  # of the conformal network
_BATCH, _RATE, _SMOOTHING = 64, 3e-3, 0.2  # of the training
_TIMED, _EXECUTIONS = 64, 60  # images in a batch, and timed calls of it
NEXT = """Next:
  conformallayers train StageNet FOLDER --training-preset modern   # your pictures, one sub-folder per class
  conformallayers predict mnist-micro IMAGE.png                    # a trained network; conformallayers zoo lists all
  conformallayers export mnist-micro --format c --report           # does it fit a microcontroller?
  conformallayers playground                                       # a web page to draw on"""


def networks() -> dict[str, Any]:
    """Return networks with random weights, (B, 1, 8, 8) → (B, 10).

    "expanded" deploys the layers of "plain"; "conformal" is six convolutions with ReSPro, a learned gain and an MLP.
    """
    plain = nn.Sequential(
        *(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(32, CLASSES)),
    )
    expanded = cl.expand(plain)
    for module in expanded.modules():
        if isinstance(module, Expanded):
            module.reset_parameters()
    layers: list[nn.Module] = []
    for index in range(_DEPTH):
        layers.append(cl.Conv2d(_CHANNELS if index else 1, _CHANNELS, 3, padding=1))
        layers.append(cl.ReSPro("spectral"))
    width = _CHANNELS * SHAPE[1] * SHAPE[2]
    head = nn.Linear(width, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, CLASSES)
    conformal = nn.Sequential(cl.ConformalLayers(*layers, cl.Scale(_GAIN)), nn.Flatten(), *head)
    return {"plain": plain, "expanded": expanded, "conformal": conformal}


def train(model: nn.Module, data: Dataset, epochs: int) -> Iterator[Row]:
    """Train with Adam and a one-cycle learning rate; yield loss, rate and test accuracy of every epoch."""
    images = as_input(data.train_images, shape=SHAPE)
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    steps = epochs * -(-len(images) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    loss_of = nn.CrossEntropyLoss(label_smoothing=_SMOOTHING)
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for rows in torch.randperm(len(images)).split(_BATCH):
            (rate,) = schedule.get_last_lr()
            loss = loss_of(model(images[rows]), data.train_labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(rows)
        row = {"epoch": epoch + 1, "loss": total / len(images), "learning_rate": rate}
        yield {**row, "test_accuracy": accuracy(model.eval(), data, SHAPE)}


def compare(model: nn.Module, folded: cl.Folded, data: Dataset) -> Row:
    """Run a network as it was trained and folded on the test images; return accuracies, times and difference."""
    x = as_input(data.test_images, shape=SHAPE)
    paths = {"trained": model, "folded": folded}
    with torch.inference_mode(), cl.layer_by_layer():
        calls = {name: partial(path, x[:_TIMED]) for name, path in paths.items()}
        times = interleave(calls, _EXECUTIONS, pause=0.0)
        return {
            "accuracy": {name: accuracy(path, data, SHAPE) for name, path in paths.items()},
            "microseconds": {name: 1e3 * t["median"] / _TIMED for name, t in times.items()},
            "difference": cl.testing.relative_error(folded(x), model(x)),
        }


def runtimes(folded: cl.Folded, data: Dataset, out: Path) -> list[list[str]]:
    """Write a fold to files and run it in every runtime; return a line of a table for each."""
    x = as_input(data.test_images[:_TIMED], shape=SHAPE)
    cl.save(folded, out / "digits.safetensors")
    lines = []
    for engine in ENGINES:
        try:
            session = cl.Session(folded, engine=engine)
        except ConformalError as refused:
            lines.append([engine, "", first_line(refused)])
            continue
        took = interleave({engine: partial(session, x)}, _EXECUTIONS, pause=0.0)[engine]["median"]
        difference = cl.testing.relative_error(session(x), folded(x))
        lines.append([engine, f"{1e3 * took / _TIMED:.2f}", f"{difference:.0e} from torch"])
    made = cl.export_c(folded, out / "c", name="digits")
    memory = f"{size(made.constant_bytes)} of constants, {size(made.ram_bytes)} of RAM"
    return [*lines, ["C99", "", memory]]


def run_demo(out: Path, *, epochs: int = 20) -> Row:
    """Run the demo, write figures, files and ``metrics.json`` into a folder, and return its metrics."""
    with torch_settings(1, seed=0):  # more threads do not speed up layers this small
        data, models = load(DIGITS), networks()
        out.mkdir(parents=True, exist_ok=True)
        history = {
            name: list(progress(train(model, data, epochs), epochs, name))
            for name, model in models.items()
        }
        folds = {name: cl.fold(model, SHAPE) for name, model in models.items()}
        metrics = {name: compare(model, folds[name], data) for name, model in models.items()}
        lines = runtimes(folds["expanded"], data, out)
    figures.save(figures.training_figure(history["expanded"], "expanded"), out, "training")
    record = {"epochs": epochs, "networks": metrics, "history": history}
    write_json(out / "metrics.json", record)
    rows = []
    for name, found in metrics.items():
        cells = [name, count(sum(p.numel() for p in models[name].parameters()))]
        cells += [f"{found['microseconds'][path]:.1f}" for path in ("trained", "folded")]
        cells += [folds[name].strategy, f"{100 * found['accuracy']['folded']:.1f}"]
        rows.append([*cells, f"{found['difference']:.0e}"])
    header = ["network", "trained weights", "µs trained", "µs folded", "strategy", "accuracy, %"]
    print(f"\n{table([*header, 'difference'], rows)}")
    print("\nWhere the expanded network runs, folded:")
    print(table(["runtime", "µs per image", "result"], lines))
    print(f"\nWrote figures, files and metrics.json to {out}/\n\n{NEXT}")
    return record
