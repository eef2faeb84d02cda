"""Search spaces: the paper's, those that fit a data set, and those of a user."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("optuna")

import conformallayers as cl
from conformallayers.lab.experiments import paper
from conformallayers.lab.experiments.search_space import Range, fitting_space, parse_space
from conformallayers.lab.training.config import make_config

CONFIG = make_config(network="LeNetCL", dataset="digits", epochs=20)


@pytest.mark.parametrize(
    ("dataset", "images", "is_paper"),
    [("mnist", 54000, True), ("mnist", 4095, False), ("digits", 1212, False), ("digits", 3, False)],
)
def test_space_fits_the_training_images(dataset: str, images: int, is_paper: bool) -> None:
    space: Any = fitting_space(dataset, images, 20)
    sizes, rates = space["batch_size"], space["learning_rate"]
    assert sizes.low <= sizes.high <= images
    assert rates.log != is_paper
    assert ((sizes.low, sizes.high) == paper.BATCH_SIZES) == is_paper
    assert space["epochs"] == Range(10, 20)


def test_own_space_has_the_types_of_the_options() -> None:
    texts = ["batch-size=4:16:log", "learning_rate=0.1:1", "alpha=young,2", "centre=true,false"]
    assert parse_space([*texts, "momentum=0:0.9"], CONFIG) == {
        "batch_size": Range(4, 16, log=True),
        "learning_rate": Range(0.1, 1.0),
        "alpha": ("young", 2.0),
        "centre": (True, False),
        "momentum": Range(0.0, 0.9),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate", "sweep --space: expected NAME=LOW:HIGH"),
        ("learning_rate=1:0.1", "sweep --space: expected NAME=LOW:HIGH"),
        ("learning_rate=0.1:1:2", "sweep --space: expected NAME=LOW:HIGH"),
        ("weight_decay=0:1:log", "sweep --space: expected NAME=LOW:HIGH"),
        ("optimizer=adam:sgd", "sweep --space: expected NAME=LOW:HIGH"),
        ("learning_rat=0.1:1", 'Did you mean "learning_rate"'),
        ("classes=2,3", "sweep --space: expected one of"),
        ("learning_rate=-1:1", "train --learning-rate: expected a value greater than 0, got '-1'"),
        ("batch_size=1.5:4", "train --batch-size: expected a valid integer"),
        ("optimizer=adam,nadam", "train --optimizer: expected 'adam'"),
        ("epochs=5:30", "at most 20 epochs, as --max-epochs says, got 30"),
        ("preset=micro", "train --preset: expected no such option for LeNetCL"),
    ],
)
def test_wrong_space_is_refused(text: str, message: str) -> None:
    with pytest.raises(cl.ConformalError) as caught:
        parse_space([text], CONFIG)
    assert message in str(caught.value)
