"""Warnings: a model that makes exactly one mistake gets exactly its warning; healthy models get none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.lab.data.batches import as_input
from conformallayers.lab.data.datasets import load

SHAPE = (2, 12, 12)


def batch(count: int = 16) -> Tensor:
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(0))


def healthy(
    *,
    respro: Callable[[], nn.Module] = lambda: cl.ReSPro(1.0, projective=True),
    pool: Callable[[], nn.Module] = lambda: nn.LPPool2d(2, 2),
    inner: nn.Module | None = None,
    norm: nn.Module | None = None,
    offset: float | str | None = 0.5,
    unit: str = "rms",
) -> cl.ConformalLayers:
    """Return two stages by the rules of docs/stages.md, or with one of them broken."""
    torch.manual_seed(0)
    convolutions = [cl.Conv2d(2, 4, 3), cl.Conv2d(4, 8, 3), cl.Conv2d(8, 8, 1), cl.Conv2d(8, 8, 3)]
    for layer in convolutions:
        nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5)
    first, second, third, fourth = convolutions
    return cl.ConformalLayers(
        *(first, second if inner is None else inner, respro(), pool()),
        *([norm or nn.BatchNorm2d(8)] if inner is None else []),
        *(third, fourth, respro(), nn.Flatten()),
        offset=offset,
        unit=unit,
    )


def warned(model: nn.Module, x: Tensor | None = None) -> tuple[Any, ...]:
    return cl.diagnose(model, batch() if x is None else x).warnings


def only(model: nn.Module, x: Tensor | None = None) -> Any:
    (warning,) = warned(model, x)
    assert warning.line.count("\n") == 0
    assert warning.remedy.endswith(".")
    return warning


# -- healthy models ---------------------------------------------------------------------------------


def test_a_network_by_the_rules_has_no_warning() -> None:
    assert warned(healthy()) == ()
    assert warned(healthy(), batch(1)) == ()


@pytest.mark.parametrize("preset", ["micro", "small", "base"])
def test_stage_nets_with_random_weights_have_no_warning(preset: str) -> None:
    torch.manual_seed(1)
    images = as_input(load("digits").train_images[:16])
    assert warned(cl.networks.StageNet(preset), images) == ()


def test_a_stage_net_has_no_warning_at_any_time_of_its_training() -> None:
    torch.manual_seed(0)
    digits, model = load("digits"), cl.networks.StageNet("micro")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    held = as_input(digits.test_images[:32])
    for step in range(50):
        rows = torch.arange(32 * step, 32 * (step + 1)) % len(digits.train_labels)
        loss = nn.functional.cross_entropy(
            model(as_input(digits.train_images[rows])), digits.train_labels[rows]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, 3, 20, 49):
            assert warned(model, held) == (), step


# -- the mistakes of docs/stages.md -----------------------------------------------------------------


def test_variances_below_eps() -> None:
    model = healthy(unit="norm", offset=None, respro=lambda: cl.ReSPro(30.0))
    warnings = {warning.kind: warning for warning in warned(model)}
    assert warnings["variance below eps"].paths == ("4",)
    assert 'unit="rms"' in warnings["variance below eps"].remedy


def test_variances_below_eps_of_a_trained_norm() -> None:
    norm = nn.BatchNorm2d(8)
    norm.num_batches_tracked.fill_(1000)
    norm.running_var.fill_(1e-8)
    warnings = {warning.kind: warning for warning in warned(healthy(norm=norm))}
    assert "100 % of the variances are below eps=1e-05" in warnings["variance below eps"].seen


def test_no_homogeneous_map() -> None:
    warning = only(healthy(pool=lambda: cl.AvgPool2d(2)))
    assert warning.kind == "no map"
    assert "odd in x" in warning.why
    assert "docs/stages.md" in warning.remedy


def test_a_map_between_two_parts_counts_and_one_in_the_head_does_not() -> None:
    torch.manual_seed(0)
    first, second = (cl.ConformalLayers(cl.Linear(8, 8), cl.ReSPro(1.0)) for _ in range(2))
    x = torch.rand(8, 8)
    assert warned(nn.Sequential(first, nn.ReLU(), second), x) == ()
    warning = only(nn.Sequential(first, second, nn.ReLU()), x)
    assert (warning.kind, warning.paths) == ("no map", ("0", "1"))


def test_no_offset_and_projective_activations() -> None:
    warning = only(healthy(offset=None))
    assert warning.kind == "offset"
    assert "contrast" in warning.why
    small = only(healthy(offset=1e-5))
    assert small.kind == "offset"
    assert "learned" in warning.remedy
    assert small.remedy.startswith("Scale the inputs down")


# -- other problems -------------------------------------------------------------------------------------


def test_an_offset_far_above_the_inputs() -> None:
    warnings = {warning.kind: warning for warning in warned(healthy(offset=300.0))}
    assert "all points are short" in warnings["offset"].why


@pytest.mark.parametrize("projective", [False, True])
def test_alpha_far_above_what_arrives(projective: bool) -> None:
    model = healthy(respro=lambda: cl.ReSPro(1000.0, projective=projective))
    warnings = {warning.kind: warning for warning in warned(model)}
    warning = warnings["alpha too large"]
    assert warning.paths[0] == "2"
    assert "alpha 1e+03" in warning.seen
    assert "root mean square that arrives" in warning.remedy


def test_alpha_far_below_what_arrives() -> None:
    warning = only(healthy(respro=lambda: cl.ReSPro(0.01, projective=True)))
    assert (warning.kind, warning.paths) == ("alpha too small", ("2", "7"))
    assert warning.path == "2, 7"


def test_radii_by_bounds_are_loose_in_deep_networks_and_share_one_warning() -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(8) for m in (cl.Conv2d(2, 2, 3, padding=1), cl.ReSPro())]
    warnings = warned(cl.ConformalLayers(*layers, nn.ReLU(), offset=1.0))
    (loose,) = [warning for warning in warnings if warning.kind == "alpha too large"]
    assert len(loose.paths) > 3
    assert loose.path.endswith("more")
    assert '"spectral"' in loose.remedy


def test_a_spectral_radius_that_was_never_estimated_says_so() -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (cl.Conv2d(2, 2, 3, padding=1), cl.ReSPro("spectral"))]
    warnings = warned(cl.ConformalLayers(*layers))
    (loose,) = [warning for warning in warnings if warning.kind == "alpha too large"]
    assert loose.remedy.startswith("Train a few steps")


def test_points_that_vanish_and_explode() -> None:
    for factor, kind in ((1e-6, "vanishing"), (1e6, "exploding")):
        model = cl.ConformalLayers(*healthy()[:4], cl.Scale(factor), offset=0.5, unit="rms")
        warning = only(model)
        assert (warning.kind, warning.paths) == (kind, ("4",))


def test_small_features() -> None:
    model = cl.ConformalLayers(*healthy()[:4], cl.Scale(3e-4), offset=0.5, unit="rms")
    warning = only(model)
    assert (warning.kind, warning.path) == ("small features", "model")
    assert "cl.Scale" in warning.remedy


def test_numbers_that_are_not_finite() -> None:
    for value in (float("nan"), float("inf")):
        model = healthy()
        with torch.no_grad():
            model[1].weight[0, 0, 0, 0] = value  # type: ignore[union-attr]
        kinds = [warning.kind for warning in warned(model)]
        assert kinds == ["non-finite"]
        assert only(model).paths == ("1",)
        assert only(model).seen == "NaN or infinity in 1.weight"


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_tensor_of_the_head_that_is_not_finite_is_named(name: str) -> None:
    model = nn.Sequential(healthy(), nn.Linear(32, 3))
    with torch.no_grad():
        model.get_parameter(f"1.{name}").view(-1)[0] = torch.nan
    (warning,) = warned(model)
    assert (warning.kind, warning.paths) == ("non-finite", ("1",))
    assert warning.seen == f"NaN or infinity in 1.{name}"


def test_buffers_that_are_not_finite_are_named_and_masks_are_not() -> None:
    norm = nn.BatchNorm1d(32)
    norm.num_batches_tracked.fill_(1000)
    norm.running_var[3] = torch.inf
    model = nn.Sequential(healthy(), norm)
    assert only(model).seen == "NaN or infinity in 1.running_var"
    norm.running_var[3] = 1.0
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    assert warned(model) == ()


def test_points_that_overflow_are_found_at_their_layer() -> None:
    model = cl.ConformalLayers(*(cl.Scale(1e30) for _ in range(12)), nn.ReLU(), offset=0.5)
    (warning,) = warned(model)
    assert (warning.kind, warning.paths) == ("non-finite", ("10",))
    assert warning.seen == "NaN or infinity behind this Scale"


def test_a_dead_stage_and_dead_channels() -> None:
    torch.manual_seed(0)
    conv = cl.Conv2d(2, 8, 3, bias=True)
    model = cl.ConformalLayers(conv, nn.ReLU(), cl.Conv2d(8, 4, 3), offset=0.5, unit="rms")
    assert warned(model) == ()
    with torch.no_grad():
        conv.bias[:3] = -100.0
    warning = only(model)
    assert (warning.kind, warning.paths) == ("dead", ("1",))
    assert "3 of 8 channels" in warning.seen
    with torch.no_grad():
        conv.bias[:] = -100.0
    dead = next(warning for warning in warned(model) if warning.kind == "dead")
    assert "no gradient reaches" in dead.why


def trained_norm(**buffers: float) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(8)
    norm.num_batches_tracked.fill_(1000)
    for name, value in buffers.items():
        getattr(norm, name).fill_(value)
    return norm


def test_a_running_mean_that_is_late() -> None:
    norm = trained_norm(running_mean=50.0)
    warnings = {warning.kind: warning for warning in warned(healthy(norm=norm))}
    assert "evaluation differs from training" in warnings["running mean"].why


def test_a_mean_far_above_the_variance() -> None:
    torch.manual_seed(0)
    conv = cl.Conv2d(2, 8, 3, bias=True)
    with torch.no_grad():
        conv.weight.mul_(0.02)
        conv.bias[:] = 5.0
    model = cl.ConformalLayers(conv, nn.BatchNorm2d(8, eps=1e-9), nn.ReLU(), offset=1.0, unit="rms")
    assert warned(model) == ()  # in training the norm takes the bias away
    for _ in range(100):
        model(batch())
    warning = only(model)
    assert warning.kind == "mean above variance"
