"""cl.verify: what it proves, and what it finds."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import conformallayers as cl
from nets import conv_stack, with_linear_head
from oracle import randomise

pytestmark = pytest.mark.usefixtures("seeded")


def test_verify_finds_a_tampered_fold_and_another_model() -> None:
    shape = (3, 12, 10)
    model = with_linear_head(conv_stack(3, padding=1), shape)
    folded = cl.fold(model, shape, strategy="banded")
    assert cl.verify(folded, model)
    assert "proven" in str(cl.verify(folded, model))
    tampered = copy.deepcopy(folded)
    tampered.constants.band[1] *= 1.01
    assert not cl.verify(tampered, model)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[0][0].weight[0] *= 1.01
    assert not cl.verify(folded, changed)
    assert not cl.verify(folded, with_linear_head(conv_stack(3), shape))
    with pytest.raises(cl.ConformalError, match="Pass the model that was folded"):
        cl.verify(folded, nn.Sequential(conv_stack(3, padding=1), nn.Flatten()))


def test_verify_looks_at_bias_form_and_tail() -> None:
    model = nn.Sequential(
        conv_stack(2, channels=8, padding=1),
        nn.Flatten(),
        nn.Linear(512, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )
    folded = cl.fold(model, (3, 8, 8), strategy="dense")
    assert cl.verify(folded, model)
    for change in (
        lambda m: m[2].bias.data.add_(1.0),
        lambda m: setattr(m[0][1], "projective", True),
        lambda m: m[4].weight.data.mul_(1.1),
    ):
        other = copy.deepcopy(model)
        change(other)
        assert not cl.verify(folded, other)


def test_verify_knows_where_a_prefix_belongs() -> None:
    first = cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro())
    second = cl.ConformalLayers(cl.Linear(32, 8), cl.ReSPro())
    model = randomise(nn.Sequential(first, nn.Flatten(), second))
    for strategy in ("dense", "layers"):
        assert cl.verify(cl.fold(model, (1, 6, 6), strategy=strategy), model)


@pytest.mark.parametrize("strategy", ["dense", "banded", "sparse", "conv", "auto"])
def test_verify_knows_what_was_absorbed(strategy: str) -> None:
    features = cl.ConformalLayers(cl.Conv2d(1, 1, 3, padding=1), cl.ReSPro())
    model = nn.Sequential(features, nn.Flatten(), nn.Linear(100, 100))
    assert cl.verify(cl.fold(model, (1, 10, 10), strategy=strategy), model)


# -- stages -----------------------------------------------------------------------------------------


def staged() -> nn.Sequential:
    """Four stages: with an inner activation, with biases, behind a join of branches, and the head."""
    block = cl.Residual(cl.Conv2d(4, 4, 3, padding=1, bias=True), cl.ReSPro(), nn.ReLU())
    features = cl.ConformalLayers(
        *(cl.Conv2d(2, 3, 3), cl.ReSPro(), cl.Conv2d(3, 4, 2), cl.ReSPro(), nn.LPPool2d(2, 2)),
        block,
        *(cl.Conv2d(4, 3, 2), cl.ReSPro(projective=True), nn.ReLU(), cl.Flatten()),
        offset=1.0,
        unit="rms",
    )
    return randomise(nn.Sequential(features, nn.Linear(27, 3)))  # type: ignore[return-value]


STAGED = (2, 11, 11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strategy", ["auto", "dense", "layers", "conv", "banded"])
def test_verify_goes_by_stage(strategy: str, dtype: torch.dtype) -> None:
    model = staged()
    folded = cl.fold(model, STAGED, strategy=strategy, dtype=dtype)
    found = cl.verify(folded, model)
    assert found
    assert [finding.path for finding in found] == [*folded.plans, "output"]
    assert all("proven" in finding.verdict for finding in found[:-1])
    assert max(finding.matrix_error for finding in found[:-1]) < 64 * torch.finfo(dtype).eps


@pytest.mark.parametrize("strategy", ["dense", "layers", "conv"])
def test_verify_names_the_stage_of_a_changed_weight(strategy: str) -> None:
    model = staged()
    folded = cl.fold(model, STAGED, strategy=strategy)
    checked = 0
    for path, plan in folded.plans.items():
        assert plan.operations is not None
        for operation in folded.recipe.operations[slice(*plan.operations)]:
            for _, name in operation.constants():
                tampered = copy.deepcopy(folded)
                array = tampered.constant(name)
                array[tuple(n // 2 for n in array.shape)] += 0.01 * array.abs().max()
                found = {finding.path: finding for finding in cl.verify(tampered, model)}
                assert not found[path].ok
                before = list(found)[: list(found).index(path)]
                assert all(found[other].ok for other in before)
                checked += 1
    assert checked >= len(folded.plans)


def test_verify_finds_other_numbers_between_stages() -> None:
    model = staged()
    folded = cl.fold(model, STAGED)
    for change in (
        lambda m: m[0][0].weight.data[0, 0, 0, 0].add_(0.1),
        lambda m: setattr(m[0][3], "alpha", 3.0),
        lambda m: m[1].bias.data.add_(1.0),
        lambda m: setattr(m[0][7], "projective", False),
    ):
        other = copy.deepcopy(model)
        change(other)
        assert not cl.verify(folded, other)
    with pytest.raises(cl.ConformalError, match=r"stages in 0.*Pass the model that was folded"):
        cl.verify(folded, nn.Sequential(model[0][:5], nn.Flatten(), nn.Linear(64, 3)))


def test_verify_knows_stages_of_a_file_and_behind_other_layers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Sigmoid(), *staged())
    folded = cl.fold(model, STAGED)
    cl.save(folded, tmp_path / "net.safetensors")
    loaded = cl.load(tmp_path / "net.safetensors")
    assert next(finding.path for finding in cl.verify(loaded, model)) == "2 stage 1"
    assert cl.verify(loaded, model)


def test_verify_says_what_it_does_not_write_out() -> None:
    shape = (3, 64, 64)
    wide = cl.ConformalLayers(
        *(cl.Conv2d(3, 2, 5, 3), cl.ReSPro(), nn.ReLU(), cl.Conv2d(2, 2, 3, bias=True), cl.ReSPro())
    )
    model = randomise(wide)
    folded = cl.fold(model, shape)
    first, second, _ = found = cl.verify(folded, model)
    assert found
    assert "close at 16 points: a sample has 12288 coefficients" in first.verdict
    assert "proven" in second.verdict
    folded.constant("weight")[1, 1, 1, 1] += 0.1
    assert not cl.verify(folded, model)[0].ok
    biased = cl.ConformalLayers(cl.Linear(4, 4, bias=True), cl.ReSPro())
    found = cl.verify(cl.fold(biased, (4,)), biased)
    assert found
    assert found[0].verdict == "by its output: biases inside"
