"""Port ReLU networks: train them on CIFAR-10, convert, fine-tune, fold, and write a table.

    python benchmarks/porting.py [--epochs 20] [--tune 5] [--threads 1] [--out results/porting]

Accuracies are of the test images: of the ReLU network, of its twin right after cl.convert, with the statistics of its
BatchNorms estimated anew, and after fine-tuning. "ReLU, trained on" is the control: the network itself with the same
further epochs. Multiply-adds and times are those of one image and one batch in ONNX Runtime, of the ReLU network, of the
twin layer by layer (the strategy "layers"), and folded. Every epoch is a checkpoint in --runs, every row is kept in
--out: a second call goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import conformallayers as cl
from conformallayers.lab.data.batches import Batches
from conformallayers.lab.data.datasets import Dataset, load
from conformallayers.lab.experiments.deployed import deployed, merged, multiply_adds
from conformallayers.lab.experiments.engines import relu_engines
from conformallayers.lab.settings import torch_settings
from conformallayers.lab.training.evaluate import accuracy
from conformallayers.recipe.onnx.export import open_session
from conformallayers.utils.files import replace_file
from conformallayers.utils.text import count, markdown
from conformallayers.utils.timing import interleave

SHAPE = cl.networks.IMAGE_SHAPE
BATCHES = (1, 64)
CONTROL = "ReLU, trained on"
Row = dict[str, Any]


def conv(before: int, after: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(before, after, 3, stride, 1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(after))


def vgg() -> nn.Sequential:
    """Pairs of convolutions with BatchNorm and ReLU, max pooling, a hidden layer in the head."""
    layers: list[nn.Module] = []
    for before, after in ((3, 12), (12, 24), (24, 48)):
        layers += [*conv(before, after), nn.ReLU(), *conv(after, after), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    head = nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 10)
    return nn.Sequential(*layers, *head)


def lean() -> nn.Sequential:
    """VGG with what lets a stage fold: biases and BatchNorm at its end alone, padding at its start alone."""
    layers: list[nn.Module] = []
    for before, inner, after in ((3, 16, 16), (16, 64, 32), (32, 96, 64)):
        layers += [nn.Conv2d(before, inner, 3, padding=1, bias=False), nn.ReLU()]
        layers += [nn.Conv2d(inner, after, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2)]
        layers.append(nn.BatchNorm2d(after))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


class Block(nn.Module):
    """Two convolutions and a skip."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = after // before
        self.first, self.second = conv(before, after, stride), conv(after, after)
        skip = nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
        self.downsample = nn.Sequential(*skip) if stride > 1 else nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.downsample(x))


class ResNet(nn.Module):
    """Three blocks of 12, 24 and 48 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 12)
        sizes = ((12, 12), (12, 24), (24, 48))
        self.blocks = nn.Sequential(*(Block(*size) for size in sizes))
        self.classify = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem(x)))
        return self.classify(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"vgg": vgg, "resnet": ResNet, "lean": lean}


class Standardised:
    """Images in [0, 1] as the networks take them: every channel has mean 0 and variance 1."""

    def __init__(self, data: Dataset) -> None:
        images = data.train_images[:10_000].float().div(255).transpose(0, 1).flatten(1)
        self.mean, self.scale = images.mean(1).view(3, 1, 1), images.std(1).view(3, 1, 1)

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale

    def accuracy(self, model: nn.Module, data: Dataset) -> float:
        """Return the share of test images that a model names, layer by layer."""
        model.eval()
        with cl.layer_by_layer():
            share = accuracy(lambda x: model(self(x)), data.test_images, data.test_labels)
        return round(share, 4)


standardised = functools.cache(Standardised)


def batches(data: Dataset, options: argparse.Namespace, epoch: int) -> Batches:
    moves: Any = {"flips": True, "shift": 2, "shuffle": True}
    images, labels = data.train_images, data.train_labels
    return Batches(images, labels, options.batch_size, seed=options.seed, epoch=epoch, **moves)


def train(
    model: nn.Module,
    data: Dataset,
    path: Path,
    epochs: int,
    peak: float,
    options: argparse.Namespace,
) -> nn.Module:
    """Train with AdamW, a warm-up of a tenth of the steps and a cosine; every epoch is saved."""
    inputs = standardised(data)
    optimizer = torch.optim.AdamW(model.parameters(), peak, weight_decay=0.02)
    start = 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"]
    for epoch in range(start, epochs):
        found, losses = batches(data, options, epoch), []
        for index, (x, labels) in enumerate(found):
            done = (epoch + index / len(found)) / epochs
            rate = peak * min(1.0, 10 * done + 0.01) * (1 + math.cos(math.pi * done)) / 2
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss = F.cross_entropy(model.train()(inputs(x)), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().item())
        print(f"{path.stem}, epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": epoch + 1}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    return model


def renew_statistics(model: nn.Module, data: Dataset, options: argparse.Namespace) -> None:
    """Average the statistics of all BatchNorms over a part of the training images."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean of all batches
    with torch.no_grad():
        for (x, _), _ in zip(batches(data, options, 0), range(40), strict=False):
            model.train()(standardised(data)(x))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def measure(
    name: str, keep: str, plain: nn.Module, data: Dataset, options: argparse.Namespace
) -> Row:
    """Convert and fine-tune a trained network, or train it on, and return accuracies, costs and times."""
    inputs = standardised(data)
    row: Row = {"network": name, "keep": keep, "relu": inputs.accuracy(plain, data)}
    control = keep == CONTROL
    model = copy.deepcopy(plain) if control else cl.convert(plain, SHAPE, keep=keep)
    if not control:
        row["converted"] = inputs.accuracy(model, data)
        renew_statistics(model, data, options)
        row["renewed"] = inputs.accuracy(model, data)
    path = options.runs / f"{name}-{keep.replace(', ', '-').replace(' ', '-')}.pt"
    train(model, data, path, options.tune, options.tune_rate, options)
    row["tuned"] = inputs.accuracy(model, data)
    forms = {"relu": deployed(plain.eval())}
    if not control:
        forms |= {
            "layers": cl.fold(model, SHAPE, strategy="layers"),
            "folded": cl.fold(model, SHAPE),
        }
        error = cl.fold_error(model, forms["folded"], torch.randn(8, *SHAPE))
        row |= {"strategy": forms["folded"].strategy, "error": error}
    row["multiply_adds"] = {key: multiply_adds(folded) for key, folded in forms.items()}
    row["milliseconds"] = {batch: times(plain, forms, batch, options) for batch in BATCHES}
    return row


def times(
    plain: nn.Module, forms: dict[str, cl.Folded], batch: int, options: argparse.Namespace
) -> dict[str, float]:
    """Return the median milliseconds of a batch in ONNX Runtime; ReLU networks as torch exports them."""
    x = torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(batch))
    engines, notes = relu_engines(merged(plain), x, ["onnx"])
    if not engines:
        raise SystemExit(f"ONNX Runtime does not run the ReLU network: {notes['onnx']}")
    runs: dict[str, Callable[[], object]] = {"relu": engines["onnx"]}
    for key in forms.keys() - {"relu"}:
        runs[key] = functools.partial(open_session(forms[key], options.threads), x.numpy())
    found = interleave(runs, options.executions)
    return {key: round(1e3 * found[key].median, 4) for key in runs}


def table(rows: list[Row]) -> str:
    header = ["network", "kept", "ReLU, %", "converted", "renewed", "tuned"]
    header += ["multiply-adds: ReLU", "layers", "folded"]
    header += [f"ms, batch {batch}: ReLU, layers, folded" for batch in BATCHES]
    lines = []
    for row in rows:
        shares = (row.get(key) for key in ("relu", "converted", "renewed", "tuned"))
        line = [
            row["network"],
            row["keep"],
            *("" if s is None else f"{100 * s:.2f}" for s in shares),
        ]
        cost, kinds = row["multiply_adds"], ("relu", "layers", "folded")
        line += [count(cost[kind]) if kind in cost else "" for kind in kinds]
        for batch in BATCHES:
            found = row["milliseconds"][str(batch)]
            line.append(", ".join(f"{found[kind]:.3f}" for kind in kinds if kind in found))
        lines.append(line)
    return markdown(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="of the ReLU networks")
    parser.add_argument("--tune", type=int, default=5, help="further epochs of their twins")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak of the learning rate")
    parser.add_argument("--tune-rate", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--subset", type=int, help="of the images, to try it out")
    parser.add_argument("--only", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--keep", nargs="+", default=["all", "pooling", "none"])
    parser.add_argument("--executions", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", type=Path, help="default: CONFORMALLAYERS_DATA")
    parser.add_argument("--runs", type=Path, default=Path("runs/porting"))
    parser.add_argument("--out", type=Path, default=Path("results/porting"))
    options = parser.parse_args()
    data = load("cifar10", options.data)
    if options.subset:
        images, labels = data.test_images[: options.subset], data.test_labels[: options.subset]
        data = dataclasses.replace(
            data.subset(options.subset), test_images=images, test_labels=labels
        )
    for folder in (options.runs, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    record = options.out / "porting.json"
    settings = {
        key: value
        for key, value in vars(options).items()
        if key not in ("only", "keep", "data", "runs", "out")
    }
    before = json.loads(record.read_text()) if record.exists() else {"settings": settings}
    if before["settings"] != settings:
        raise SystemExit(f"{record} has rows of other settings: name another --out and --runs")
    rows: list[Row] = before.get("rows", [])
    for name in options.only:
        with torch_settings(options.threads, options.seed):
            plain = NETWORKS[name]()
            train(plain, data, options.runs / f"{name}.pt", options.epochs, options.rate, options)
            for keep in (CONTROL, *options.keep):
                if any((row["network"], row["keep"]) == (name, keep) for row in rows):
                    continue
                row = measure(name, keep, plain, data, options)
                rows.append(json.loads(json.dumps(row)))
                text = json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n"
                replace_file(record, [text.encode()])
                replace_file(options.out / "porting.md", [table(rows).encode()])
                print(table(rows).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
