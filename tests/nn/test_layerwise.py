"""Running layers one by one: biases before a batch norm in training."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from cnns import embedded
from conformallayers.nn import layerwise
from conformallayers.nn.registry import pool_at_once
from support import samples

SHAPE = (2, 7, 6)
LAYERS = {
    "Conv2d": (lambda bias: cl.Conv2d(2, 4, 3, bias=bias), SHAPE, nn.BatchNorm2d),
    "strided Conv2d": (
        lambda bias: cl.Conv2d(2, 4, 3, 2, 1, groups=2, bias=bias),
        SHAPE,
        nn.BatchNorm2d,
    ),
    "ConvTranspose1d": (
        lambda bias: cl.ConvTranspose1d(2, 4, 3, 2, bias=bias),
        (2, 5),
        nn.BatchNorm1d,
    ),
    "Linear": (lambda bias: cl.Linear(5, 4, bias=bias), (5,), nn.BatchNorm1d),
}


def task(batch: int = 256) -> tuple[Tensor, Tensor]:
    """Return noisy copies of four random images, and their numbers."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 1, 12, 12, generator=generator)
    labels = torch.randint(0, 4, (batch,), generator=generator)
    return images[labels] / 2 + torch.randn(batch, 1, 12, 12, generator=generator), labels


def trained(bias: bool, optimizer: type[torch.optim.Optimizer], **options: float) -> nn.Module:
    torch.manual_seed(0)
    body = cl.ConformalLayers(
        cl.Conv2d(1, 4, 3, bias=bias),
        nn.BatchNorm2d(4),
        cl.ReSPro(),
        cl.AvgPool2d(2),
        nn.Sequential(cl.Conv2d(4, 4, 3, bias=bias), nn.BatchNorm2d(4)),
        cl.ReSPro(),
        cl.Flatten(),
        cl.Linear(36, 4),
    )
    model = nn.Sequential(body, nn.BatchNorm1d(4))
    step = optimizer(model.parameters(), lr=1e-2, **options)
    x, labels = task()
    for _ in range(150):
        chosen = torch.randint(0, len(x), (64,))
        loss = nn.functional.cross_entropy(model(x[chosen]), labels[chosen])
        step.zero_grad()
        loss.backward()
        step.step()
    return model


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.Adam, {}), (torch.optim.AdamW, {"weight_decay": 0.1})],
    ids=["Adam", "AdamW"],
)
def test_training_with_a_bias_before_a_norm_reaches_evaluation(
    optimizer: type[torch.optim.Optimizer], options: dict[str, float]
) -> None:
    """Evaluation fell to chance: Adam made full steps of the bias from the rounding of its gradient."""
    model = trained(True, optimizer, **options)
    x, labels = task()

    def accuracy(network: nn.Module) -> float:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # variances below eps, which are tested below
            return float((network(x).argmax(1) == labels).double().mean())

    training = accuracy(copy.deepcopy(model))
    assert training > 0.95
    model.eval()
    assert accuracy(model) > training - 0.05
    with cl.layer_by_layer():
        assert accuracy(model) > training - 0.05


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("name", LAYERS)
def test_a_bias_before_a_norm_changes_only_the_mean(name: str, momentum: float | None) -> None:
    build, shape, norm = LAYERS[name]
    torch.manual_seed(0)
    models = [
        cl.ConformalLayers(build(bias), norm(4, momentum=momentum), cl.ReSPro()).double()
        for bias in (False, True)
    ]
    models[1].load_state_dict(models[0].state_dict(), strict=False)
    bias = models[1][0].bias
    for seed in range(3):
        x = samples(shape, torch.float64, 8, seed)
        outputs = [model(x) for model in models]
        assert torch.allclose(*outputs, rtol=1e-12)
    assert torch.allclose(models[0][1].running_mean + bias, models[1][1].running_mean, rtol=1e-12)
    assert torch.equal(models[0][1].running_var, models[1][1].running_var)
    outputs[1].square().sum().backward()
    assert bias.grad.abs().max() == 0  # exactly, so that Adam makes no step
    assert models[1][0].weight.grad.abs().max() > 0
    for model in models:
        model.eval()
        cl.testing.assert_folds(model, shape)
    assert torch.allclose(models[0](x), models[1](x), rtol=1e-9)


def test_the_running_mean_follows_a_bias_that_changes() -> None:
    torch.manual_seed(0)
    plain, biased = (
        cl.ConformalLayers(cl.Conv2d(2, 4, 3, bias=bias), nn.BatchNorm2d(4), cl.ReSPro()).double()
        for bias in (False, True)
    )
    biased.load_state_dict(plain.state_dict(), strict=False)
    for seed in range(4):
        for model in (plain, biased):
            model(samples(SHAPE, torch.float64, 8, seed))
        assert torch.allclose(plain[1].running_mean + biased[0].bias, biased[1].running_mean)
        with torch.no_grad():
            biased[0].bias.mul_(0.9)  # as weight decay would
        if seed == 1:
            biased = copy.deepcopy(biased)
        if seed == 2:
            for model in (plain, biased):
                model[1].reset_running_stats()


def test_a_bias_that_is_not_redundant_stays() -> None:
    torch.manual_seed(0)
    frozen = cl.ConformalLayers(cl.Conv2d(2, 4, 3, bias=True), nn.BatchNorm2d(4), cl.ReSPro())
    frozen[1].eval()
    apart = cl.ConformalLayers(
        cl.Conv2d(2, 4, 3, bias=True), nn.Dropout(0.5), nn.BatchNorm2d(4), cl.ReSPro()
    )
    for model in (frozen, apart):
        model(samples(SHAPE, torch.float32)).square().sum().backward()
        assert model[0].bias.grad.abs().max() > 0
    # A matrix on the last of three axes has one bias per column, a norm one mean per row.
    rows = cl.ConformalLayers(cl.Linear(5, 4, bias=True), nn.BatchNorm1d(4), cl.ReSPro())
    rows(samples((4, 5), torch.float32)).square().sum().backward()
    assert rows[0].bias.grad.abs().max() > 0


def test_refusals_in_training_name_the_layer() -> None:
    with pytest.raises(cl.ConformalError, match="BatchNorm1d at position 0"):
        cl.ConformalLayers(nn.BatchNorm1d(2), cl.ReSPro(1.0))(torch.rand(3, 2, 4, 4))
    with pytest.raises(cl.ConformalError, match="growth"):
        cl.ConformalLayers(cl.RadialActivation())


@pytest.mark.parametrize("alpha", [None, "spectral", "learned"])
def test_alpha_does_not_follow_running_statistics(alpha: str | None) -> None:
    """It would change the scale of what comes next, whose statistics lag: evaluation fell to chance."""
    torch.manual_seed(0)
    normalisation = nn.BatchNorm2d(4)
    model = cl.ConformalLayers(cl.Conv2d(2, 4, 3), normalisation, cl.Gnomonic(alpha)).double()
    x = samples((2, 8, 7), torch.float64, 16)
    before = model(x)
    with torch.no_grad():
        normalisation.running_var.mul_(100)
    for _ in range(30):  # the power iteration goes on
        after = model(x)
    if alpha != "spectral":
        assert torch.equal(before, after)
    else:
        assert (before - after).norm() < 0.05 * before.norm()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_trained_mean_without_a_number_of_batches_includes_the_bias(
    momentum: float | None,
) -> None:
    """Checkpoints of other frameworks count no batches."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=momentum)).double()
    with torch.no_grad():
        plain[0].bias.fill_(5.0)
        plain[1].running_mean.fill_(4.998)
    twin = cl.convert(plain, SHAPE, keep="all")
    x = samples(SHAPE, torch.float64, 8)
    for _ in range(3):
        plain(embedded(twin, x))
        twin(x)
        found = dict(twin.features.named_children())["1"].running_mean
        assert torch.allclose(found, plain[1].running_mean, rtol=1e-12)


@pytest.mark.parametrize("alpha", [None, "learned", "spectral", 1.0])
@pytest.mark.parametrize("norms", [False, True])
def test_groups_pooled_at_once_are_those_of_branches(
    alpha: str | float | None,
    norms: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = cl.ConformalLayers(
        cl.Conv2d(2, 6, 3),
        cl.ReSPro(alpha, projective=True),
        cl.Split(
            [2, 4], [nn.LPPool2d(2, 3, 2) if norms else cl.AvgPool2d(3, 2), nn.LPPool2d(2, 3, 2)]
        ),
        cl.Conv2d(6, 3, 2),
        cl.ReSPro(alpha),
        nn.BatchNorm2d(3),
        offset="learned",
        unit="rms",
    ).double()
    twin, x = copy.deepcopy(model), samples((2, 11, 9), torch.float64)
    pooled = []

    def noted(*arguments: Any) -> Tensor | None:
        pooled.append(pool_at_once(*arguments))
        return pooled[-1]

    monkeypatch.setattr(layerwise, "pool_at_once", noted)
    y = model(x)
    assert pooled[0] is not None
    monkeypatch.setattr(layerwise, "pool_at_once", lambda *_: None)
    expected = twin(x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(y)
    grads = [
        torch.autograd.grad((out * weights).sum(), list(net.parameters()))
        for out, net in ((y, model), (expected, twin))
    ]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


def test_groups_with_hooks_or_other_windows_run_one_by_one() -> None:
    pools = [cl.AvgPool2d(2), nn.LPPool2d(2, 2)]
    model = cl.ConformalLayers(cl.Conv2d(2, 6, 3), cl.Split([2, 4], pools), cl.ReSPro(1.0))
    calls = []
    hook = pools[1].register_forward_hook(lambda *_: calls.append(1))
    x = samples((2, 10, 10), torch.float32)
    y = model(x)
    assert len(calls) == 1
    hook.remove()
    torch.testing.assert_close(model(x), y, rtol=1e-5, atol=1e-6)
    assert len(calls) == 1
    pools[1].stride = 1  # 7×7 windows beside 4×4
    with pytest.raises(cl.ConformalError, match="a concatenation of branches"):
        model(x)
    with pytest.raises(cl.ConformalError, match="in_channels=2"):
        model(x[:, :1])


def test_a_norm_inside_a_branch() -> None:
    torch.manual_seed(0)
    body = cl.Conv2d(2, 2, 3, padding=1, bias=True), nn.BatchNorm2d(2)
    for layers in (body, (*body, cl.ReSPro())):
        model = cl.ConformalLayers(cl.Residual(*layers), cl.ReSPro())
        model(samples(SHAPE, torch.float32)).square().sum().backward()
        assert layers[0].bias.grad.abs().max() == 0
        cl.testing.assert_folds(model, SHAPE)
