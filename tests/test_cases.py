"""Every row of the case registry, in both forms and every path, against the oracle."""

from __future__ import annotations

import copy
import inspect
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from cases import ALPHAS, HOMOGENEOUS_CASES, LINEAR_CASES, Case
from conformallayers.folding.strategies import STRATEGIES
from conformallayers.nn.branches import Composite
from conformallayers.nn.registry import BATCH_NORMS, SPECS
from oracle import bound_of, exact, gradient_error, matrix_of, oracle, randomise, relative_error
from support import ALWAYS, DTYPES, TOLERANCES, check_training, gradients, samples

BATCH = 3
GRADIENTS = {torch.float64: 1e-11, torch.float32: 1e-4}
FORMS = {"published": (False, False), "projective": (True, True), "mixed": (False, True)}


Forms = tuple[bool, bool]


def rows() -> list[object]:
    """List each torch.nn row in both forms; its namesake of this package has both in one stack."""
    found = []
    for turn, case in enumerate(LINEAR_CASES):
        ours = case.name.startswith("cl.") and not case.name.startswith("cl.Scale")
        for form in ["mixed"] if ours else ["published", "projective"]:
            found.append(pytest.param(turn, case, FORMS[form], id=f"{case.name}-{form}"))
    return found


def stack(case: Case, forms: tuple[bool, bool], turn: int) -> cl.ConformalLayers:
    """Build [layer, ReSPro, a linear part, ReSPro] with the next two ways to get α.

    Where all strategies are tried, images stay images: some strategies want them to the end. The
    others start with one more ReSPro: after it the layer runs with a factor in its weight.
    """
    layer = case.build()
    with torch.no_grad():
        shape = layer.eval()(torch.zeros(1, *case.input_shape)).shape[1:]
    last = [nn.Flatten(), cl.Linear(shape.numel(), 3)]
    if has_everything(turn, forms) and "Flatten" not in case.name and 2 <= len(shape) <= 4:
        last = [getattr(cl, f"Conv{len(shape) - 1}d")(shape[0], 3, 1)]
    second = turn + turn // len(ALPHAS)  # runs through all pairs of ways
    model = cl.ConformalLayers(
        layer,
        cl.ReSPro(ALPHAS[turn % len(ALPHAS)], projective=forms[0]),
        *last,
        cl.ReSPro(ALPHAS[second % len(ALPHAS)], projective=forms[1]),
    )
    if not has_everything(turn, forms):
        model.insert(0, cl.ReSPro(0.8, projective=forms[1]))
    randomise(model, turn)
    return model


def strategies(turn: int, forms: Forms, dtype: torch.dtype) -> list[str]:
    """Choose what to fold with: all for one form of a row in float64, else one after the other."""
    everything = has_everything(turn, forms) and dtype == torch.float64
    return list(STRATEGIES) if everything else [[*STRATEGIES][turn % len(STRATEGIES)]]


def has_everything(turn: int, forms: Forms) -> bool:
    return forms == (turn % 2 == 0, turn % 2 == 0)


@pytest.mark.parametrize(("turn", "case", "forms"), rows())
@pytest.mark.sampled(9)
def test_all_paths_agree_with_the_oracle(turn: int, case: Case, forms: Forms) -> None:
    source = stack(case, forms, turn)
    # Both dtypes once for each row; the other form and the other package take them in turn.
    first = turn // 2 % 2
    for dtype in DTYPES if has_everything(turn, forms) else DTYPES[first : first + 1]:
        model, x = copy.deepcopy(source).to(dtype), samples(case.input_shape, dtype, BATCH, turn)
        check_training(model, x, GRADIENTS[dtype])
        expected, wanted = evaluated(model.eval(), x)
        check_evaluation(model, x, expected, wanted)
        for name in strategies(turn, forms, dtype):
            check_strategy(name, model, x, expected, wanted[0])


def evaluated(model: cl.ConformalLayers, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the oracle's outputs, and its gradients to the input and to each parameter."""
    twin, wide = exact(model), x.double().requires_grad_()
    expected = oracle(twin, wide)
    return expected, gradients(expected, wide, *twin.parameters())


def check_evaluation(
    model: cl.ConformalLayers, x: Tensor, expected: Tensor, wanted: list[Tensor]
) -> None:
    """Compare evaluation, and the gradients it keeps, with and without trainable parameters."""
    with torch.no_grad():
        assert relative_error(model(x), expected) <= TOLERANCES[x.dtype]
    x = x.clone().requires_grad_()
    model.requires_grad_(False)  # nothing to lose: the fold runs, and lets gradients through
    assert gradient_error(gradients(model(x), x), wanted[:1]) <= GRADIENTS[x.dtype]
    next(model.parameters()).requires_grad_(True)  # one is enough
    assert model(x.detach()).requires_grad
    model.requires_grad_(True)
    kept = gradients(model(x), x, *model.parameters())
    assert gradient_error(kept, wanted) <= GRADIENTS[x.dtype]


def check_strategy(
    name: str, model: cl.ConformalLayers, x: Tensor, expected: Tensor, wanted: Tensor
) -> None:
    """Compare the fold of a strategy, if it applies, and its gradient to the input."""
    try:
        folded = cl.fold(model, tuple(x.shape[1:]), strategy=name)
    except cl.ConformalError:
        assert name not in ALWAYS
        return
    assert set(folded.strategy.split("+")) <= {name, "layers"}  # a bias cuts stages
    x = x.clone().requires_grad_()
    y = folded(x)
    assert relative_error(y, expected) <= TOLERANCES[x.dtype], name
    assert gradient_error(gradients(y, x), [wanted]) <= GRADIENTS[x.dtype], name


def test_every_supported_type_has_a_row() -> None:
    built = {type(case.build()) for case in LINEAR_CASES}
    homes = {name: getattr(cl, name) for name in cl.__all__}
    file = "conformallayers.nn.layers"
    ours = {v for v in homes.values() if getattr(v, "__module__", "") == file}
    ours -= {cl.Centre, cl.Abs}
    assert ours
    linear = {kind for kind, spec in SPECS.items() if not spec.homogeneous}
    torch_types = {kind for kind in linear if kind.__module__.startswith("torch.")}
    assert ours | torch_types <= built
    packages = "torch.", "conformallayers.nn."
    maps = {kind for kind in {*SPECS} - linear if kind.__module__.startswith(packages)}
    assert maps == {type(case.build()) for case in HOMOGENEOUS_CASES} - {cl.Split}


REFUSED = {
    "inplace",
    "value",
    "track_running_stats",
    "return_indices",
    "norm_type",
}  # must keep their default, see test_errors
PLACEMENT = {"self", "device", "dtype"}


def test_every_option_of_every_type_is_varied() -> None:
    found: dict[type[nn.Module], list[nn.Module]] = {}
    for case in (*LINEAR_CASES, *HOMOGENEOUS_CASES):
        layer = case.build()
        found.setdefault(type(layer), []).append(layer)
    for kind, layers in found.items():
        if issubclass(kind, Composite):
            continue  # they are made of modules, not of options
        for name, parameter in inspect.signature(kind).parameters.items():
            only_zeros = name == "padding_mode" and "Transpose" in kind.__name__
            if only_zeros or name in REFUSED | PLACEMENT or parameter.kind.name.startswith("VAR"):
                continue
            values = [option(layer, name) for layer in layers]
            assert any(differs(value, parameter.default) for value in values), (
                f"no row of {kind.__name__} varies {name}"
            )


def option(layer: nn.Module, name: str) -> object:
    if name == "gain":
        return layer.initial
    if name == "bias":
        return layer.bias is not None
    return getattr(layer, name, None)  # PReLU keeps no init, and its rows vary it


def differs(value: object, default: object) -> bool:
    return (set(value) if isinstance(value, tuple) else {value}) != {default}


@pytest.mark.parametrize("case", LINEAR_CASES, ids=lambda case: case.name)
def test_bounds_are_bounds_and_those_of_the_oracle(case: Case) -> None:
    layer = randomise(case.build(), 3).double().requires_grad_(False)
    (step,) = cl.trace(cl.ConformalLayers(layer), case.input_shape).steps
    norm = torch.linalg.matrix_norm(matrix_of(layer, case.input_shape), 2)
    assert step.bound == pytest.approx(float(bound_of(layer, case.input_shape)), rel=1e-12)
    if not any(isinstance(module, BATCH_NORMS) for module in layer.modules()):
        assert norm <= step.bound * (1 + 1e-12)


STEADY = [case for case in LINEAR_CASES if "Norm" not in case.name]  # whose matrix stays


@pytest.mark.parametrize("case", STEADY[::7], ids=lambda case: case.name)
@pytest.mark.sampled(3)
def test_spectral_nears_the_norm_from_below(case: Case) -> None:
    layer = randomise(case.build(), 5).double()
    model = cl.ConformalLayers(layer, cl.ReSPro("spectral", dtype=torch.float64))
    x = samples(case.input_shape, torch.float64)
    norm = float(torch.linalg.matrix_norm(matrix_of(layer, case.input_shape), 2))
    found = []
    for _ in range(60):
        model(x)
        found.append(float(model[1].norm))
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(found))
    assert 0.97 * norm <= found[-1] <= norm * (1 + 1e-12)
