"""Compare a twin that keeps all rectifiers with the model on points, which it must equal."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..container import layer_by_layer
from ..errors import refusal, shape_text
from ..nn.activations import RadialActivation

SAMPLES = 3  # another number than that of the batch that records shapes


def check_twin(
    where: str, model: nn.Module, shape: tuple[int, ...], read: nn.Module, twin: nn.Module
) -> None:
    """Refuse a model if its twin with all rectifiers is not the model of the point.

    The graph does not show which maps share memory, nor what depends on the number of samples. Numbers do: those
    of three random samples in float64, or in the model's dtype if it runs in no other. Only copies run. The layers
    of the twin are those of ``read``, a copy of the model.
    """
    tensors = [*model.parameters(), *model.buffers()]
    radial = any(isinstance(part, RadialActivation) for part in model.modules())
    if radial or any(tensor.is_meta for tensor in tensors):
        return  # the model has results in other units, or none
    own = next((one.dtype for one in tensors if one.is_floating_point()), torch.float32)
    device = tensors[0].device if tensors else "cpu"
    generator = torch.Generator("cpu").manual_seed(0)
    samples = torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64, device="cpu")
    for dtype in (torch.float64, own):
        plain = copy.deepcopy(model).eval()
        inner, kept = copy.deepcopy((read, twin))
        try:
            plain.to(dtype)
            kept.eval().to(dtype)
            _fill(plain, inner)
            x = samples.to(device, dtype)
            t = (x.square().flatten(1).mean(1) + 1).sqrt()  # for the first offset, 1
            expected = _run(plain, x / t.view(-1, *[1] * len(shape)))
        except Exception as error:
            failure = error
            continue
        if expected.isfinite().all():
            _check_equal(where, expected, kept, x)
        return
    got = f"{type(failure).__name__} with {SAMPLES}"
    remedy = "Keep the batch axis: use flatten(1)."
    raise refusal(where, "a model that takes any number of samples", got, remedy) from failure


def _fill(plain: nn.Module, read: nn.Module) -> None:
    """Fill parameters that are all zero, alike in both: the last weight of a residual would hide its branch."""
    for one, other in zip(plain.parameters(), read.parameters(), strict=True):
        if not one.any():
            one.data.fill_(0.1)
            other.data.fill_(0.1)


def _run(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.random.fork_rng(devices=[]), layer_by_layer():
        result: Tensor = module(x)
    return result


def _check_equal(where: str, expected: Tensor, twin: nn.Module, x: Tensor) -> None:
    """Refuse results that differ by more than layers round, even those that compute in another dtype."""
    try:
        found = _run(twin, x)
        same_shape = found.shape == expected.shape
        got = f"a result of shape {shape_text(expected.shape)} for {SAMPLES} samples"
    except Exception as error:
        same_shape, got = False, type(error).__name__
    if same_shape:
        limits = torch.finfo(expected.dtype)
        distance, size = (found - expected).norm(), expected.norm() + limits.tiny
        if distance <= limits.eps**0.25 * size:
            return
        got = f"results that differ from it by {float(distance / size):.1%}"
    remedy = (
        "The model changes a map in place that it reads again by another name, or mixes samples: "
        "use inplace=False and x = x + y, and keep the batch axis."
    )
    raise refusal(where, "a model that computes what its graph shows", got, remedy)
