"""expand and collapse on whole models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import conformallayers as cl


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.deep = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 5, padding=2, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        return self.deep(torch.relu(self.norm(self.a(x)) + self.b(self.b(x))))


def _network() -> nn.Module:
    layers = nn.Conv2d(3, 8, 5, 2), nn.BatchNorm2d(8), nn.ReLU(), Block(), nn.AdaptiveAvgPool2d(1)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 10))
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.uniform_(norm.running_mean, -1, 1)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    return model.eval()


def _train(model: nn.Module, steps: int = 3) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    model.train()
    for _ in range(steps):
        optimiser.zero_grad()
        model(torch.rand(4, 3, 16, 16)).square().mean().backward()
        optimiser.step()
    model.eval()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", ["chain", "branches", "chain+branches"])
def test_trained_collapsed_and_folded_models_agree(kind: str, norm: bool) -> None:
    model, x = _network(), torch.rand(4, 3, 16, 16)
    before = copy.deepcopy(model.state_dict())
    bigger = cl.expand(model, kind=kind, norm=norm)
    torch.testing.assert_close(bigger(x), model(x), rtol=1e-5, atol=1e-5)
    _train(bigger)
    assert not torch.allclose(bigger(x), model(x), atol=1e-2)
    plain = cl.collapse(bigger)
    assert list(plain.state_dict()) == list(model.state_dict())
    assert str(plain) == str(model)
    torch.testing.assert_close(plain(x), bigger(x), rtol=1e-5, atol=1e-5)
    folds = [cl.fold(m, (3, 16, 16)) for m in (bigger, plain, model)]
    operations = [[(type(op), op.inputs) for op in fold.recipe.operations] for fold in folds]
    assert operations[0] == operations[1] == operations[2]
    assert torch.equal(folds[0](x), folds[1](x))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_the_table_lists_every_layer_with_a_weight() -> None:
    model = _network()
    model[3].a.weight.requires_grad_(False)
    nn.utils.parametrizations.weight_norm(model[3].b)
    text = str(cl.expand(model).expansion)
    assert "3.a" in text
    assert "its weight is frozen" in text
    assert "6       Linear" in text
    assert "not chosen" in text


def test_shared_layers_and_tied_weights_stay_so() -> None:
    first, second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    second.weight = first.weight
    model = nn.Sequential(first, nn.ReLU(), first, second)
    bigger = cl.expand(model)
    assert bigger[0] is bigger[2]
    assert bigger[0].kernel is bigger[3].kernel
    plain = cl.collapse(bigger)
    assert plain[0] is plain[2]
    assert plain[0].weight is plain[3].weight
    part = cl.expand(model, only=["0"])  # the other layer would keep the weight as it is
    assert part[0].weight is part[3].weight
    assert "shared with one that is kept" in str(part.expansion)


def test_convolutions_that_cannot_take_up_a_norm_get_none() -> None:
    tied = nn.Conv1d(4, 4, 3)
    tied.weight = nn.Parameter(torch.randn(4, 4, 3))
    layers = [nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3, bias=False)]
    layers[0].weight = tied.weight
    inside = cl.ConformalLayers(nn.Conv1d(4, 4, 3), cl.ReSPro())
    bigger = cl.expand(nn.Sequential(tied, *layers, nn.ConvTranspose1d(4, 4, 3), inside), norm=True)
    found = [type(layer).__name__ for layer in bigger if not isinstance(layer, cl.ConformalLayers)]
    kept = "ExpandedConv1d"
    assert found == [kept, kept, "NormalizedConv1d", kept, "ExpandedConvTranspose1d"]
    assert type(bigger[-1][0]).__name__ == kept
    again = copy.deepcopy(bigger)
    for module in again.modules():
        if hasattr(module, "terms"):
            module.reset_parameters()
    x = torch.rand(2, 4, 20)
    torch.testing.assert_close(cl.collapse(again.eval())(x), again(x), rtol=1e-5, atol=1e-5)


def test_layers_with_parts_of_a_user_are_kept() -> None:
    model = nn.Sequential(*(nn.Conv2d(2, 2, 3) for _ in range(4)))
    model[0].gamma = nn.Parameter(torch.ones(2))
    model[1].fused = nn.BatchNorm2d(2)
    model[2].register_buffer("mean", torch.ones(2))
    bigger = cl.expand(model)
    assert [type(layer) is nn.Conv2d for layer in bigger] == [True, True, False, False]
    assert cl.collapse(bigger).state_dict().keys() == model.state_dict().keys()


def test_parts_that_are_frozen_collapse_to_a_frozen_layer() -> None:
    bigger = cl.expand(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)))
    bigger[0].requires_grad_(False)
    frozen, trained = cl.collapse(bigger)
    assert not frozen.weight.requires_grad
    assert trained.weight.requires_grad


def test_names_and_functions_choose_layers() -> None:
    model, types = _network(), lambda m: [type(layer).__name__ for layer in m.modules()]
    assert types(cl.expand(model, only=["6"])).count("ExpandedLinear") == 1
    chosen = cl.expand(model, only=lambda name, layer: layer.weight.shape[-1] == 5)
    assert types(chosen).count("ExpandedConv2d") == 2


def test_pointwise_layers_are_expanded_only_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, (1, 3)))
    kept = [type(layer) is nn.Conv2d for layer in cl.expand(model)]
    assert kept == [False, True, False]
    assert type(cl.expand(model, only=["1"])[1]) is not nn.Conv2d


def test_states_load_and_averages_are_those_of_the_terms() -> None:
    bigger, other, x = cl.expand(_network()), cl.expand(_network()), torch.rand(2, 3, 16, 16)
    average = AveragedModel(bigger)
    average.update_parameters(bigger)
    before = {name: value.clone() for name, value in bigger.named_parameters()}
    _train(bigger, 1)
    average.update_parameters(bigger)
    for name, value in average.module.named_parameters():
        expected = (before[name] + bigger.get_parameter(name)) / 2
        torch.testing.assert_close(value, expected)
    torch.testing.assert_close(average.eval()(x), cl.collapse(average.module)(x))
    other(x)  # composes its weights
    other.load_state_dict(bigger.state_dict())
    assert torch.equal(other(x), bigger(x))


def test_own_terms() -> None:
    class Sharpen(nn.Module):
        def __init__(self, layer: nn.Conv2d) -> None:
            super().__init__()
            self.gain, self.scale = nn.Parameter(torch.zeros(layer.out_channels)), 1.0

        def forward(self) -> Tensor:
            pattern = self.scale * torch.tensor([[0.0, -1, 0], [-1, 4, -1], [0, -1, 0]])
            return (self.gain.view(-1, 1, 1, 1) * pattern).expand(-1, 3, -1, -1)

    bigger = cl.expand(nn.Conv2d(3, 8, 3), kind=Sharpen)
    bigger.terms[0].gain.data.fill_(1)
    pattern = cl.collapse(bigger).weight - bigger.kernel
    assert pattern[0, 0, 1, 1].item() == pytest.approx(4)
    with torch.no_grad():
        weight = bigger.eval().weight
        bigger.terms[0].scale = 2.0  # no parameter
        torch.testing.assert_close(bigger.weight, weight + pattern)
    with pytest.raises(cl.ConformalError, match=r"a tensor of shape \(8, 3, 3, 3\)"):
        cl.expand(nn.Conv2d(3, 8, 3), kind=lambda layer: Sharpen(nn.Conv2d(3, 4, 3)))


def test_inside_conformal_layers() -> None:
    layers = cl.ConformalLayers(cl.Conv2d(3, 4, 3), cl.ReSPro(), cl.Conv2d(4, 4, 3), cl.ReSPro())
    model = nn.Sequential(layers, nn.Flatten(), nn.Linear(4 * 16, 5))
    bigger, x = cl.expand(model), torch.rand(3, 3, 8, 8)
    torch.testing.assert_close(bigger.train()(x), model.train()(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bigger.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    assert type(cl.collapse(bigger)[0][0]) is cl.Conv2d


def test_channels_last_and_checkpoints_of_activations() -> None:
    bigger, x = cl.expand(_network()), torch.rand(2, 3, 16, 16)
    _train(bigger)
    bigger.zero_grad()
    other = copy.deepcopy(bigger).to(memory_format=torch.channels_last)
    y = other(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(y, bigger(x), rtol=1e-5, atol=1e-6)
    y.square().sum().backward()
    checkpoint(bigger, x, use_reentrant=False).square().sum().backward()
    for first, second in zip(bigger.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(first.grad, second.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "chains"}, 'Did you mean "chain"'),
        ({"width": 0.5}, "a number from 1 to 16"),
        ({"only": ["0.conv"]}, "names of convolutions"),
        ({"only": ["head"]}, r"got 'head'\. Choose from: 0, 3\.a, 3\.b, 3\.deep, 6\."),
        ({"only": []}, "convolutions to expand, got none"),
    ],
)
def test_refusals(options: dict[str, object], expected: str) -> None:
    with pytest.raises(cl.ConformalError, match=expected):
        cl.expand(_network(), **options)


def test_an_expanded_model_is_not_expanded_again() -> None:
    with pytest.raises(cl.ConformalError, match="collapse"):
        cl.expand(cl.expand(_network()))


def test_models_without_layers_to_expand_are_refused() -> None:
    with pytest.raises(cl.ConformalError, match=r"got none\. Linear layers and 1×1 conv"):
        cl.expand(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with pytest.raises(cl.ConformalError, match="a model with layers, got a Folded"):
        cl.expand(cl.fold(_network(), (3, 16, 16)))
