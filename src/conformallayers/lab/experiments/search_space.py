"""The search space of a sweep: the paper's, one that fits a smaller data set, or the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from optuna.trial import Trial

from ...errors import refusal
from ..checks import require_choice
from ..training.config import DERIVED, TrainConfig, make_config
from . import paper

# Bounds for data sets that are not the paper's, or smaller.
BATCH_SIZES, LEARNING_RATES = (8, 256), (1e-4, 1e-1)
_FIXED = (
    "network",
    "dataset",
    "training_preset",
    "size",
    "validation",
    "seed",
    "threads",
    "device",
)
_NAMES = [name for name in TrainConfig.model_fields if name not in (*_FIXED, *DERIVED)]
_FORM = "NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=VALUE,VALUE"
_REMEDY = "Such as --space learning_rate=1e-4:0.1:log optimizer=adam,sgd."


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds, which are included; whole numbers if both bounds are."""

    low: float
    high: float
    log: bool = False


Space = Mapping[str, Range | tuple[Any, ...]]


def fitting_space(dataset: str, images: int, max_epochs: int) -> Space:
    """Return the space of a search: the paper's for its data sets, else one for this many training images.

    Examples:
        >>> fitting_space("mnist", 54000, 50)["learning_rate"]
        Range(low=0.001, high=1.0, log=False)
        >>> fitting_space("/data/pets", 100, 50)["batch_size"]
        Range(low=8, high=100, log=True)
    """
    sizes, rates = Range(*paper.BATCH_SIZES), Range(*paper.LEARNING_RATES)
    if dataset not in paper.DATASETS or images < paper.BATCH_SIZES[1]:
        smallest, largest = (min(size, images) for size in BATCH_SIZES)
        sizes, rates = Range(smallest, largest, log=True), Range(*LEARNING_RATES, log=True)
    return {
        "batch_size": sizes,
        "epochs": Range(min(paper.EPOCHS[0], max_epochs), max_epochs),
        "learning_rate": rates,
        "optimizer": paper.OPTIMIZERS,
    }


def parse_space(texts: Iterable[str], config: TrainConfig) -> Space:
    """Read ``NAME=LOW:HIGH``, ``NAME=LOW:HIGH:log`` and ``NAME=VALUE,VALUE`` of options of train.

    Every bound and value is checked as an option of the search's configuration, whose epochs are the maximum.
    """
    space: dict[str, Range | tuple[Any, ...]] = {}
    for text in texts:
        name, given, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not given or not values:
            raise refusal("sweep --space", _FORM, repr(text), _REMEDY)
        require_choice("sweep --space", name, _NAMES, _REMEDY)
        ends, log = values.removesuffix(":log"), values.endswith(":log")
        words = ends.split(":" if ":" in ends else ",")
        found = tuple(_value(name, word.strip(), config) for word in words)
        if ":" not in values:
            space[name] = found
            continue
        numbers = all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in found)
        if len(found) != 2 or not numbers or found[0] > found[1] or (log and found[0] <= 0):
            raise refusal("sweep --space", _FORM, repr(text), _REMEDY)
        space[name] = Range(*found, log)
    epochs = space.get("epochs", ())
    most = epochs.high if isinstance(epochs, Range) else max(epochs, default=0)
    if most > config.epochs:
        expected = f"at most {config.epochs} epochs, as --max-epochs says"
        raise refusal("sweep --space", expected, f"{most:g}", "Give both.")
    return space


def draw(trial: Trial, space: Space) -> dict[str, Any]:
    """Draw the options of a trial."""
    found: dict[str, Any] = {}
    for name, values in space.items():
        if not isinstance(values, Range):
            found[name] = trial.suggest_categorical(name, values)
        elif isinstance(values.low, int) and isinstance(values.high, int):
            found[name] = trial.suggest_int(name, values.low, values.high, log=values.log)
        else:
            found[name] = trial.suggest_float(name, values.low, values.high, log=values.log)
    return found


def _value(name: str, word: str, config: TrainConfig) -> Any:
    """Convert a word to a value of an option of train, or refuse it."""
    # Adam refuses a momentum, but a trial may draw another optimizer.
    usual = {"optimizer": "sgd"} if name == "momentum" else {}
    return getattr(make_config(**{**config.model_dump(), **usual, name: word}), name)
