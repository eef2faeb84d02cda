"""Cases that once gave wrong numbers, stale folds or raw errors; one test each."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.nn import container


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pair() -> cl.ConformalLayers:
    return cl.ConformalLayers(
        cl.Conv2d(3, 8, 3, padding=1), cl.ReSPro(), cl.Conv2d(8, 8, 3, padding=1), cl.ReSPro()
    )


def test_a_projective_certificate_does_not_trust_a_small_norm() -> None:
    model = cl.ConformalLayers(
        cl.Conv2d(1, 2, 3, padding=1),
        cl.Conv2d(2, 2, 3, padding=1),
        cl.ReSPro(projective=True),
        cl.Flatten(),
        cl.Linear(512, 4),
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
    folded = cl.fold(model, (1, 32, 8), strategy="banded", tolerance=1e-2, max_norm=1e-2)
    x = torch.rand(5, 1, 32, 8, dtype=torch.float64)
    x *= 1e-2 / torch.linalg.vector_norm(x.flatten(1), dim=1).view(-1, 1, 1, 1)
    assert cl.fold_error(model, folded, x) <= 1.1e-2
    assert cl.verify(folded, model)


def test_a_tail_that_is_not_linear_is_not_absorbed() -> None:
    model = nn.Sequential(
        cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro()),
        nn.ConstantPad2d(1, 5.0),
        nn.Flatten(),
        nn.Linear(128, 100),
    )
    for name in ("auto", "dense", "banded", "conv", "layers"):
        cl.testing.assert_folds(model, (1, 8, 8), strategy=name)


@pytest.mark.parametrize("strategy", ["dense", "banded", "layers", "auto"])
def test_every_strategy_carries_the_certificate_that_was_asked_for(strategy: str) -> None:
    layers = [m for i in range(8) for m in (cl.Conv2d(8 if i else 1, 8, 3, padding=1), cl.ReSPro())]
    model = cl.ConformalLayers(*layers, cl.Flatten(), cl.Linear(2048, 4))
    folded = cl.fold(model, (1, 16, 16), strategy=strategy, tolerance=1e-2, max_norm=10.0)
    assert folded.certificate is not None
    assert (folded.certificate.epsilon, folded.certificate.max_norm) == (1e-2, 10.0)
    assert 0 <= folded.certificate.margin <= 1
    assert cl.verify(folded, model)


def test_a_container_with_its_own_forward_is_refused() -> None:
    class Doubled(cl.ConformalLayers):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    with pytest.raises(cl.ConformalError, match="Doubled, which overrides it"):
        cl.fold(Doubled(cl.Linear(4, 3), cl.ReSPro()), (4,))


def test_a_bias_that_comes_later_counts_everywhere() -> None:
    model = pair().eval()
    x = torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        before = model(x)
        model[0].bias = nn.Parameter(torch.ones(8))
        after = model(x)
    assert not torch.allclose(after, before, rtol=1e-3)
    assert cl.fold_error(model, cl.fold(model, (3, 8, 8)), x) < 5e-6
    assert torch.allclose(model.train()(x), after, rtol=1e-4)


def test_a_spectral_activation_stands_once() -> None:
    shared = cl.ReSPro("spectral")
    with pytest.raises(cl.ConformalError, match="of its own"):
        cl.ConformalLayers(cl.Linear(8, 8), shared, cl.Linear(8, 8), shared)


def test_dropout_left_in_training_keeps_the_layers() -> None:
    model = cl.ConformalLayers(cl.Linear(32, 32), cl.Dropout(0.5), cl.ReSPro()).eval()
    x = torch.rand(2, 32)
    with torch.no_grad():
        model(x)
        model[1].train()
        assert not torch.equal(model(x), model(x))


def test_a_write_during_a_fold_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cl.ConformalLayers(cl.Linear(8, 8), cl.ReSPro(), cl.Linear(8, 3), cl.ReSPro()).eval()
    original = container.make_plan

    def slow(*arguments, **options):
        with torch.no_grad():
            model[0].weight[0] *= 3
        monkeypatch.setattr(container, "make_plan", original)
        return original(*arguments, **options)

    monkeypatch.setattr(container, "make_plan", slow)
    x = torch.rand(2, 8)
    with torch.no_grad():
        model(x)
        with cl.layer_by_layer():
            expected = model(x)
        assert cl.testing.relative_error(model(x), expected) < 5e-6


@pytest.mark.parametrize("strategy", ["dense", "banded", "layers"])
def test_a_folded_state_carries_its_factors(strategy: str) -> None:
    first, second = pair(), pair()
    with torch.no_grad():
        second[0].weight *= 3
    folded = cl.fold(first, (3, 8, 8), strategy=strategy)
    other = cl.fold(second, (3, 8, 8), strategy=strategy)
    other.load_state_dict(folded.state_dict())
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(other(x), folded(x))


def test_verify_looks_at_bias_form_and_tail() -> None:
    model = nn.Sequential(pair(), nn.Flatten(), nn.Linear(512, 5), nn.ReLU(), nn.Linear(5, 3))
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


def test_backward_hooks_run() -> None:
    model = cl.ConformalLayers(cl.Linear(4, 4), cl.ReSPro(), cl.Linear(4, 2), cl.ReSPro())
    fired = []
    for index in (0, 2):
        model[index].register_full_backward_hook(lambda *_, index=index: fired.append(index))
    model(torch.rand(2, 4, requires_grad=True)).sum().backward()
    assert fired == [2, 0]


def test_empty_batches_pass_every_strategy() -> None:
    circular = cl.ConformalLayers(
        cl.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), cl.ReSPro()
    )
    for strategy in ("spectral", "dense", "banded", "layers"):
        assert cl.fold(circular, (1, 6, 6), strategy=strategy)(torch.rand(0, 1, 6, 6)).shape == (
            0,
            2,
            6,
            6,
        )


def test_a_call_by_keyword_folds() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = pair()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.features(input=x).flatten(1, -1)

    model = Keyword()
    assert cl.fold_error(model, cl.fold(model, (3, 8, 8)), torch.rand(2, 3, 8, 8)) < 5e-6


def test_autocast_gives_one_dtype_whatever_the_strategy() -> None:
    model = cl.ConformalLayers(cl.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), cl.ReSPro())
    x = torch.rand(2, 1, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        for strategy in ("spectral", "dense", "banded", "layers"):
            assert cl.fold(model, (1, 6, 6), strategy=strategy)(x).dtype == torch.bfloat16


def test_refusals_of_odd_arguments() -> None:
    model = pair()
    folded = cl.fold(model, (3, 8, 8))
    x = torch.rand(2, 3, 8, 8)
    for act, text in (
        (lambda: cl.fold(model, (3, 8, 8), max_norm=3.0), "a tolerance beside it"),
        (lambda: cl.fold(model, (3, 8, 8), tolerance=2.0), "the rounding of torch.float32, to 1"),
        (lambda: cl.fold(model, (3, 8, 8), tolerance=1e-12), "exact to rounding"),
        (lambda: cl.fold(model, x), "got a Tensor"),
        (lambda: folded(None), "a tensor, got NoneType"),
        (lambda: folded(x.to("meta")), "an input on cpu"),
        (lambda: model(x.numpy()), "torch.as_tensor"),
        (lambda: cl.ReSPro(3.0)(torch.rand(3)), "a batch of points"),
        (lambda: cl.verify(model, folded), "verify.folded, model"),
    ):
        with pytest.raises(cl.ConformalError, match=text):
            act()


def test_a_cached_fold_needs_no_lock() -> None:
    model = pair().eval()
    x = torch.rand(2, 3, 8, 8)
    done = []

    def read() -> None:
        with torch.no_grad():  # the mode belongs to the thread
            done.append(model(x))

    read()
    with model._lock:  # another thread folds for another shape
        worker = threading.Thread(target=read)
        worker.start()
        worker.join(timeout=30)
    assert len(done) == 2
