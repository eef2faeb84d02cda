"""The layers of this package: torch.nn's own, with bias=False by default."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import conformallayers as cl

SPATIAL = [f"{kind}{n}d" for kind in ("Conv", "ConvTranspose") for n in (1, 2, 3)]
POOLS = [f"{kind}{n}d" for kind in ("AvgPool", "AdaptiveAvgPool") for n in (1, 2, 3)]
BIASED: dict[str, tuple[int, ...]] = {**dict.fromkeys(SPATIAL, (2, 2, 1)), "Linear": (2, 2)}
BUILDERS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: getattr(cl, name)(*BIASED[name]) for name in BIASED},  # type: ignore[misc]
    **{name: lambda name=name: getattr(cl, name)(2) for name in POOLS},  # type: ignore[misc]
    "Dropout": cl.Dropout,
    "Flatten": cl.Flatten,
    "Identity": cl.Identity,
}


@pytest.mark.parametrize("name", BIASED)
def test_own_layers_have_a_bias_only_if_asked(name: str) -> None:
    build, arguments = getattr(cl, name), BIASED[name]
    assert build(*arguments).bias is None
    assert build(*arguments, bias=False).bias is None
    assert build(*arguments, bias=True).bias is not None
    parameters = inspect.signature(build).parameters
    between = [p.default for p in parameters.values()][len(arguments) :]
    position = list(parameters).index("bias") - len(arguments)
    assert build(*arguments, *between[:position], True).bias is not None
    assert build(*arguments, *between[:position], False).bias is None


@pytest.mark.parametrize("name", BIASED)
def test_signatures_are_those_of_torch_but_for_the_bias(name: str) -> None:
    ours = inspect.signature(getattr(cl, name))
    theirs = inspect.signature(getattr(nn, name))
    assert list(ours.parameters) == list(theirs.parameters)
    for key, parameter in ours.parameters.items():
        expected: Any = theirs.parameters[key]
        assert parameter == (expected.replace(default=False) if key == "bias" else expected)


@pytest.mark.parametrize("name", BUILDERS)
def test_own_layers_are_classes_like_those_of_torch(name: str) -> None:
    layer, parent = BUILDERS[name](), getattr(nn, name)
    kind = type(layer)
    assert kind.__bases__ == (parent,)
    assert (kind.__module__, kind.__qualname__) == ("conformallayers.nn.layers", name)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is kind
        assert repr(other) == repr(layer)
        for key, tensor in layer.state_dict().items():
            assert torch.equal(other.state_dict()[key], tensor)
    documentation = kind.__doc__ or ""
    for section in ("Shape:", "Examples:", *(["Args:", "bias:"] if name in BIASED else [])):
        assert section in documentation, section


def test_own_layers_can_be_derived_from() -> None:
    class Padded(cl.Conv2d):
        def __init__(self, channels: int, bias: bool = False) -> None:
            super().__init__(channels, channels, 3, padding=1, bias=bias)

    assert Padded(2).bias is None
    assert Padded(2, bias=True).bias is not None
    cl.testing.assert_folds(cl.ConformalLayers(Padded(2), cl.ReSPro()), (2, 5, 5))
