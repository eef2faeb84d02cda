"""Experiment 7: ways to expand a network, compared on training images held out; the test images are not used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

from torch import Tensor, nn

from ...expansion import expand
from ...nn.expanded import Branches, Chain, Expanded
from ..checks import require_choice
from ..data import datasets
from ..data.datasets import Dataset
from ..options import ExpansionOptions
from ..training.config import TrainConfig
from ..training.train import epoch_rows
from .cost import EXPANDED, NETWORKS, config_of
from .records import Cells, Records, Row, grouped

NAMES = ("LeNet", "StageReLUNet-micro", "DepthwiseNet", "ResNet8")
_PAIRED = [name for name in NETWORKS if f"{name}{EXPANDED}" in NETWORKS]
_WHERE = "experiment 7"
_SIDE = 0.5  # the scale of a branch that begins at random


class _Normalized(nn.Module):
    """The terms of an expanded convolution, each run on the batch and normalized, as in a Diverse Branch Block."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        norms = [nn.BatchNorm2d(layer.out_channels) for _ in (layer, *layer.terms)]
        self.norms = nn.ModuleList(norms)

    def forward(self, x: Tensor) -> Any:
        layer, run = self.layer, self.layer._conv_forward
        weights = [layer.kernel, *(layer._from_groups(term()) for term in layer.terms)]
        return sum(norm(run(x, part, None)) for norm, part in zip(self.norms, weights, strict=True))


class Variant(TrainConfig):
    """The options of a run whose network is expanded in another way than ``--expand`` does."""

    kind: str = "chain+branches"
    expansion_width: float = 2.0
    every: bool = False
    random: bool = False
    norm: bool = False
    norm_each: bool = False

    def expanded(self, module: nn.Module) -> nn.Module:
        """Expand a network; with its 1×1 and linear layers, and terms that begin at random or are normalized, if so asked."""
        only = (lambda *_: True) if self.every else None
        options: Any = {"kind": self.kind, "width": self.expansion_width, "norm": self.norm}
        bigger = expand(module, only=only, **options)
        if self.random:
            for term in bigger.modules():
                if isinstance(term, Chain):
                    last = term.kernels[-1]
                    nn.init.normal_(last, std=last[0].numel() ** -0.5)
                elif isinstance(term, Branches):
                    for scale in (term.scale, term.identity):
                        if scale is not None:
                            nn.init.constant_(scale, _SIDE)
        if self.norm_each:
            for name in [n for n, layer in bigger.named_modules() if isinstance(layer, Expanded)]:
                bigger.set_submodule(name, _Normalized(bigger.get_submodule(name)))
        return bigger


# Options of Variant by name; "rate" and "decay" multiply those of the preset, which differ with expansion. The rate
# of LeNet is half as large without a norm: factors of a kernel that move together move it further.
VARIANTS: dict[str, Row] = {
    "plain": {"expand": False},
    "plain, rate × 0.5": {"expand": False, "rate": 0.5},
    "plain, rate × 2": {"expand": False, "rate": 2},
    "plain, weight decay × 3": {"expand": False, "decay": 3},
    "chain+branches": {},
    "chain+branches, rate × 2": {"rate": 2},
    "chain+branches, weight decay × 3": {"decay": 3},
    "chain+branches, rate × 2, weight decay × 3": {"rate": 2, "decay": 3},
    "chain+branches, from random terms": {"random": True},
    "chain+branches, norm": {"norm": True},
    "chain+branches, BatchNorm of each term": {"norm_each": True, "random": True},
    "chain+branches, 1×1 and linear layers too": {"every": True},
    "chain+branches, width 1": {"expansion_width": 1.0},
    "chain+branches, width 4": {"expansion_width": 4.0},
    "chain": {"kind": "chain"},
    "branches": {"kind": "branches"},
}


def run_expansion(options: ExpansionOptions) -> Row:
    """Train each network in each variant; return the record."""
    for name in options.only:
        require_choice(f"{_WHERE} --only", name, _PAIRED, "Name one of them.")
    for name in options.variants:
        require_choice(f"{_WHERE} --variants", name, VARIANTS, "Name one of them.")
    data = datasets.load(options.dataset, options.data_root, verify=options.verify)
    records = Records(
        *(_WHERE, options, f"{options.dataset}-{options.epochs}-epochs"),
        *(("name", "variant", "seed"), cells),
        settings=("dataset", "epochs", "validation"),
    )
    with records:
        for seed, variant, name in product(
            options.seeds, options.variants or VARIANTS, options.only or NAMES
        ):
            measure = partial(_measure, name, variant, seed, options, data)
            records.row(name, variant, seed, measure=measure)
    return records.record


def _measure(name: str, variant: str, seed: int, chosen: ExpansionOptions, data: Dataset) -> Row:
    given = {"expand": True, **VARIANTS[variant]}
    same = f"{name}{EXPANDED}" if given["expand"] else name
    config = config_of(same, chosen.dataset, seed, chosen.epochs, chosen.threads)
    bare = given["expand"] and name == "LeNet" and not given.get("norm")
    given["learning_rate"] = config.learning_rate * given.pop("rate", 1) * (0.5 if bare else 1)
    given["weight_decay"] = config.weight_decay * given.pop("decay", 1)
    config = Variant(**{**config.model_dump(), **given})
    *_, last = epoch_rows(config, *data.split(chosen.validation))
    kept = "validation_accuracy", "train_accuracy", "seconds"
    return {"name": name, "variant": variant, "seed": seed, **{key: last[key] for key in kept}}


def cells(rows: Sequence[Row]) -> Cells:
    """Return a line for each variant: the mean of the seeds of each network, in per cent."""
    names = list(grouped(rows, "name"))
    lines = []
    for variant, found in grouped(rows, "variant").items():
        by_name = grouped(found, "name")
        line: list[Any] = [variant]
        for name in names:
            shares = [row["validation_accuracy"] for row in by_name.get(name, [])]
            line.append(f"{100 * fmean(shares):.1f}" if shares else "–")
        lines.append(line)
    return ["variant", *names], lines
