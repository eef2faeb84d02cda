"""The layers of this package: those of torch.nn, with bias=False by default, and others."""

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
from support import assert_says

SPATIAL = [f"{kind}{n}d" for kind in ("Conv", "ConvTranspose") for n in (1, 2, 3)]
BIASED: dict[str, tuple[int, ...]] = {**dict.fromkeys(SPATIAL, (2, 2, 1)), "Linear": (2, 2)}


@pytest.mark.parametrize("name", BIASED)
def test_signatures_are_those_of_torch_but_for_the_bias(name: str) -> None:
    ours = inspect.signature(getattr(cl, name))
    theirs = inspect.signature(getattr(nn, name))
    assert list(ours.parameters) == list(theirs.parameters)
    for key, parameter in ours.parameters.items():
        expected: Any = theirs.parameters[key]
        assert parameter == (expected.replace(default=False) if key == "bias" else expected)


@pytest.mark.parametrize("name", BIASED)
def test_own_layers_are_classes_like_those_of_torch(name: str) -> None:
    layer, parent = getattr(cl, name)(*BIASED[name]), getattr(nn, name)
    kind = type(layer)
    assert kind.__bases__ == (parent,)
    assert (kind.__module__, kind.__qualname__) == ("conformallayers.nn.layers", name)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is kind
        assert repr(other) == repr(layer)
        for key, tensor in layer.state_dict().items():
            assert torch.equal(other.state_dict()[key], tensor)


@pytest.mark.parametrize(
    "name", ["AvgPool2d", "AdaptiveAvgPool3d", "Dropout", "Flatten", "Identity"]
)
def test_layers_without_weights_are_those_of_torch(name: str) -> None:
    assert getattr(cl, name) is getattr(nn, name)


def test_own_layers_can_be_derived_from() -> None:
    class Padded(cl.Conv2d):
        def __init__(self, channels: int, bias: bool = False) -> None:
            super().__init__(channels, channels, 3, padding=1, bias=bias)

    assert Padded(2).bias is None
    assert Padded(2, bias=True).bias is not None
    cl.testing.assert_folds(cl.ConformalLayers(Padded(2), cl.ReSPro()), (2, 5, 5))


def arguments(layer: nn.Module) -> tuple[object, ...]:
    """Return the positional arguments that build the same layer again."""
    if isinstance(layer, (cl.Scale, cl.ReSPro)):
        return (getattr(layer, "initial", None) or layer.alpha,)
    return (2, 3) if isinstance(layer, nn.Linear) else (2, 3, 1)


@pytest.mark.parametrize(
    "build",
    [
        lambda **f: cl.Conv1d(2, 3, 1, **f),
        lambda **f: cl.Conv2d(2, 3, 1, **f),
        lambda **f: cl.Conv3d(2, 3, 1, **f),
        lambda **f: cl.ConvTranspose1d(2, 3, 1, **f),
        lambda **f: cl.ConvTranspose2d(2, 3, 1, **f),
        lambda **f: cl.ConvTranspose3d(2, 3, 1, **f),
        lambda **f: cl.Linear(2, 3, **f),
        lambda **f: cl.Scale(2.0, **f),
        lambda **f: cl.ReSPro("learned", **f),
        lambda **f: cl.ReSPro("spectral", **f),
    ],
)
def test_factory_keywords_and_skip_init(build: Callable[..., nn.Module]) -> None:
    state = build(device="meta", dtype=torch.float64).state_dict()
    assert len(state) == 1
    assert all(t.is_meta and t.dtype == torch.float64 for t in state.values())
    kept = nn.utils.skip_init(type(build()), *arguments(build())).state_dict()
    assert {k: v.shape for k, v in kept.items()} == {k: v.shape for k, v in state.items()}


def test_scale_refuses_bad_arguments() -> None:
    for gain in ("1", float("nan"), float("inf"), True, None):
        assert_says(
            lambda gain=gain: cl.Scale(gain), "Scale(gain=...)", "a finite number", repr(gain)
        )


@pytest.mark.parametrize("times", [0, -1, 1.5, True])
def test_repeat_channels_wants_a_number(times: object) -> None:
    with pytest.raises(cl.ConformalError, match="RepeatChannels"):
        cl.RepeatChannels(times)
