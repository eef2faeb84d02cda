"""Expanded layers against plain ones: the same outputs, gradients of every part, one weight in evaluation."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from conformallayers.graph.graph import collapsed
from conformallayers.nn.expanded import (
    KINDS,
    Branches,
    Chain,
    Expanded,
    expanded,
    terms_of,
)
from conformallayers.testing import relative_error

_CONVOLUTIONS = (
    (nn.Conv1d, nn.ConvTranspose1d),
    (nn.Conv2d, nn.ConvTranspose2d),
    (nn.Conv3d, nn.ConvTranspose3d),
)


def _expanded(layer: nn.Module, kind: str = "chain+branches", width: float = 2.0) -> Expanded:
    return expanded(layer, terms_of(kind, width, layer.weight))


def _drawn(module: nn.Module) -> nn.Module:
    """Draw every parameter: terms begin at zero."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    axes, transposed = draw(st.integers(1, 3)), draw(st.booleans())
    groups = draw(st.sampled_from([1, 2, 4]))
    kernel = tuple(draw(st.integers(1, 5 if axes < 3 else 3)) for _ in range(axes))
    inputs, outputs = (groups * draw(st.integers(1, 3)) for _ in range(2))
    options = {
        "stride": draw(st.integers(1, 2)),
        "dilation": draw(st.integers(1, 2)),
        "padding": draw(st.integers(0, 2)),
        "bias": draw(st.booleans()),
        "groups": groups,
        "dtype": torch.float64,
    }
    if not transposed:
        options["padding_mode"] = draw(st.sampled_from(["zeros", "circular", "replicate"]))
    layer = _CONVOLUTIONS[axes - 1][transposed](inputs, outputs, kernel, **options)
    return layer, torch.randn(2, inputs, *[10] * axes, dtype=torch.float64)


@given(layers(), st.sampled_from(KINDS), st.sampled_from([1.0, 2.0, 2.5]))
@settings(deadline=None, max_examples=60)
def test_outputs_are_those_of_the_layer_and_back(
    case: tuple[nn.Module, Tensor], kind: str, width: float
) -> None:
    layer, x = case
    bigger = _expanded(layer, kind, width)
    assert torch.equal(bigger(x), layer(x))
    back = collapsed(_drawn(bigger))
    assert type(back) is type(layer)
    assert list(back.state_dict()) == list(layer.state_dict())
    assert str(back) == str(layer)
    torch.testing.assert_close(back(x), bigger(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", [3, 5, 7, (1, 4)])
def test_a_chain_is_its_convolutions_in_a_row(kernel: int | tuple[int, int]) -> None:
    layer = nn.Conv2d(4, 6, kernel, groups=2, dtype=torch.float64)
    chain = _drawn(Chain((2, 3, 2, *layer.kernel_size), 2.0, dtype=torch.float64))
    x = torch.randn(2, 4, 12, 12, dtype=torch.float64)
    expected = x
    for weight in chain.kernels:
        expected = F.conv2d(expected, weight, groups=2)
    torch.testing.assert_close(F.conv2d(x, chain().flatten(0, 1), groups=2), expected)


def test_branches_are_a_pointwise_layer_and_the_identity() -> None:
    branches = _drawn(Branches((2, 3, 3, 3, 3), dtype=torch.float64))
    x = torch.randn(2, 6, 8, 8, dtype=torch.float64)
    pointwise = (branches.scale * branches.pointwise).flatten(0, 1)[:, :, None, None]
    expected = F.conv2d(x, pointwise, groups=2) + branches.identity.view(1, 6, 1, 1) * x
    weight = branches().flatten(0, 1)
    torch.testing.assert_close(F.conv2d(x, weight, padding=1, groups=2), expected)


def test_a_linear_layer_expands() -> None:
    layer, x = nn.Linear(5, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    bigger = _expanded(layer)
    torch.testing.assert_close(bigger(x), layer(x))
    assert isinstance(bigger, nn.Linear)
    torch.testing.assert_close(collapsed(_drawn(bigger))(x), bigger(x))
    assert bigger.counted_weights > layer.weight.numel()


def test_every_part_has_its_gradient() -> None:
    bigger = _drawn(_expanded(nn.Conv1d(2, 2, 3, dtype=torch.float64)))
    x = torch.randn(1, 2, 5, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in bigger.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(bigger, dict(zip(names, values, strict=True)), (x,))

    values = [value.detach().requires_grad_() for value in bigger.parameters()]
    assert torch.autograd.gradcheck(run, (x, *values))


def test_evaluation_composes_once_and_sees_every_write() -> None:
    bigger, x = _drawn(_expanded(nn.Conv2d(2, 3, 3))).eval(), torch.rand(1, 2, 4, 4)
    with torch.no_grad():
        weight = bigger.weight
        assert bigger.weight is weight
        bigger.terms[0].kernels[0].data.mul_(2)  # type: ignore[union-attr, operator, index]
        assert not torch.equal(bigger.weight, weight)
        nn.init.zeros_(bigger.weight)  # of the sum: its parts say what it is
        parametrizations.weight_norm(bigger, "kernel").parametrizations.kernel.original0.mul_(2)
        plain = collapsed(copy.deepcopy(bigger))
        assert list(plain.state_dict()) == ["weight", "bias"]
        torch.testing.assert_close(bigger(x), plain(x))
    assert bigger.weight.requires_grad


def test_parameters_are_drawn_as_those_of_the_layer() -> None:
    layer = nn.Conv2d(64, 32, 3)
    bigger = _drawn(_expanded(nn.Conv2d(64, 32, 3)))
    bigger.reset_parameters()
    for drawn, plain in ((bigger.weight, layer.weight), (bigger.bias, layer.bias)):
        torch.testing.assert_close(drawn.abs().max(), plain.abs().max(), rtol=0.1, atol=0)
    assert not any(term().any() for term in bigger.terms)


def test_copies_and_pickles_are_equal_and_on_their_own() -> None:
    bigger, x = _expanded(nn.Conv2d(2, 3, 3)).eval(), torch.rand(1, 2, 4, 4)
    with torch.no_grad():
        y = bigger(x)
        for other in (copy.deepcopy(bigger), pickle.loads(pickle.dumps(bigger))):
            assert torch.equal(other(x), y)
            other.kernel.zero_()
            assert not torch.equal(other(x), y)
        assert torch.equal(bigger(x), y)


def test_autocast_composes_in_full_precision() -> None:
    bigger, x = _drawn(_expanded(nn.Conv2d(8, 8, 5))), torch.rand(2, 8, 9, 9)
    with torch.autocast("cpu", torch.bfloat16):
        assert bigger.weight.dtype == torch.float32
        half = bigger(x)
    assert half.dtype == torch.bfloat16
    assert relative_error(half.double(), bigger(x).double()) < 2e-2


def test_compiles_in_training() -> None:
    bigger, x = _drawn(_expanded(nn.Conv2d(2, 4, 5))), torch.rand(2, 2, 8, 8)
    compiled = torch.compile(bigger, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), bigger(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    layer, x = nn.Conv2d(2, 4, 3, dtype=dtype), torch.randn(1, 2, 6, 6, dtype=dtype)
    bigger = expanded(layer, terms_of("chain+branches", 2.0, layer.weight))
    assert torch.equal(bigger(x), layer(x))
    assert bigger.plain().weight.dtype == dtype


def test_meta_layers_expand_without_numbers() -> None:
    layer = _expanded(nn.Conv2d(3, 4, 3, device="meta"))
    assert layer(torch.rand(2, 3, 8, 8, device="meta")).shape == (2, 4, 6, 6)
