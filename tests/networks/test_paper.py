"""The paper's networks: training, evaluation and folds against the oracle."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import conformallayers as cl
from oracle import exact, oracle, randomise, relative_error
from support import DTYPES, TOLERANCES, both_forms, samples


def network(name: str, *arguments: int, **options: object) -> nn.Module:
    return randomise(getattr(cl.networks, name)(*arguments, **options), 2)


# The name, its arguments, and the smallest convenient image for its features.
NETWORKS = [
    ("BaseReSProNet", (), 8),
    ("BaseReSProNet", (1,), 8),
    ("LeNetCL", (), 16),
    ("DkNetCL", (3,), 6),
    ("DkNetCL", (2, 20), 6),
    ("D3ModNetCL", (), 22),
]
every_network = pytest.mark.parametrize(("name", "arguments", "side"), NETWORKS)


@both_forms
@pytest.mark.parametrize(("name", "arguments", "side"), [n for n in NETWORKS if n[2] < 20])
def test_features_of_the_paper(
    name: str, arguments: tuple[int, ...], side: int, projective: bool
) -> None:
    source = network(name, *arguments, projective=projective).features
    shape = (3, side, side)
    for dtype in DTYPES:
        model, x = copy.deepcopy(source).to(dtype), samples(shape, dtype, batch=2).abs()
        with torch.no_grad():
            expected = oracle(exact(model), x.double())
            for path in (model.train(), copy.deepcopy(model).eval(), cl.fold(model, shape)):
                assert relative_error(path(x), expected) <= TOLERANCES[dtype]


def check_network(model: nn.Module, strategy: str) -> None:
    """Compare a whole network in training, in evaluation and folded."""
    for dtype in DTYPES:
        model, x = model.to(dtype), samples((3, 32, 32), dtype, batch=2).abs()
        twin = exact(model)
        with torch.no_grad():
            expected = twin.head(oracle(twin.features, x.double()).flatten(1))
            assert relative_error(model.train()(x), expected) <= TOLERANCES[dtype]
            folded = cl.fold(model, cl.networks.IMAGE_SHAPE, strategy=strategy)
            assert relative_error(folded(x), expected) <= TOLERANCES[dtype]
            if strategy == "auto":
                assert relative_error(model.eval()(x), expected) <= TOLERANCES[dtype]


@both_forms
@every_network
def test_whole_networks(name: str, arguments: tuple[int, ...], side: int, projective: bool) -> None:
    check_network(network(name, *arguments, projective=projective), "layers")


@pytest.mark.slow
@both_forms
@every_network
def test_whole_networks_as_auto_folds_them(
    name: str, arguments: tuple[int, ...], side: int, projective: bool
) -> None:
    check_network(network(name, *arguments, projective=projective), "auto")


@pytest.mark.parametrize("name", ["LeNet", "LeNetCL"])
def test_dropout_trains_and_vanishes(name: str) -> None:
    kind = getattr(cl.networks, name)
    model, plain = kind(dropout=0.5), kind()
    plain.load_state_dict(model.state_dict())  # the layers have the same names
    x = torch.rand(2, *cl.networks.IMAGE_SHAPE)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), plain.eval()(x))
    if name == "LeNetCL":
        folded = cl.fold(model.train(), cl.networks.IMAGE_SHAPE)
        torch.testing.assert_close(folded(x), plain(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": -0.1}, "dropout: expected a number from 0 to below 1"),
        ({"dropout": "much"}, "dropout: expected a number from 0 to below 1"),
        ({"hidden": 0}, "hidden: expected an integer > 0"),
        ({"hidden": 2.5}, "hidden: expected an integer > 0"),
    ],
)
def test_wrong_arguments_are_refused(options: Any, message: str) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        cl.networks.LeNetCL(**options)
