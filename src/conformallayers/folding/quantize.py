"""Post-training quantisation of a fold: 8-bit weights and features, calibrated on images."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import ConformalError, refusal
from ..recipe import integer_operations as integer
from ..recipe.recipe import Recipe
from .calibration import Calibration
from .folded import Folded
from .quantization_report import Quantization
from .quantizer import Quantizer

_DTYPES = torch.float32, torch.float64
_SCALED = "Give images as the fold takes them, such as x / 255 of bytes."
_WHERE = "quantize(folded, images)"


def quantize(folded: Folded, images: Tensor) -> Folded:
    """Quantise a fold to integers: 8-bit weights and features, 32-bit sums.

    Torch, numpy, ONNX and C compute the same integers with it. Scales are calibrated on the images, which should
    resemble those to come and include no test image; a few hundred are enough. Energies and norms are computed
    from integers, t is one float64 number for each sample, and the outputs are floats. docs/deploy.md
    explains the arithmetic.

    Args:
        folded: from :func:`conformallayers.fold` or :func:`conformallayers.load`, in float32 or float64.
        images: (N, *input_shape), as the fold takes them.

    Returns:
        A :class:`Folded` whose ``quantization`` prints errors and sizes.

    Raises:
        ConformalError: int8 lacks an operation, such as forms written out; the
            message names a strategy without it.

    Examples:
        >>> import conformallayers as cl
        >>> net = cl.zoo.load("digits-micro")
        >>> _ = torch.manual_seed(0)
        >>> small = cl.quantize(net, torch.rand(50, 1, 8, 8))
        >>> small.quantization.int8_bytes / small.quantization.float_bytes < 0.3
        True
        >>> x = torch.rand(200, 1, 8, 8)
        >>> bool((small(x).argmax(1) == net(x).argmax(1)).float().mean() > 0.9)
        True
    """
    x = _checked(folded, images)
    recipe = folded.recipe.with_constants(lambda _, array: array.cpu())
    calibration = Calibration(recipe, folded.dtype, x)
    try:
        quantized = Quantizer(recipe, calibration).quantized().pruned()
    except (
        ValueError
    ) as error:  # from calibration.py; operations that int8 lacks raise ConformalError
        if isinstance(error, ConformalError):
            raise
        remedy = "Scale the images to about 1 in front of the network, as x / 255."
        raise refusal(_WHERE, "scales that 24 bits can hold", str(error), remedy) from None
    quantized.check_values()
    plans = {path: replace(plan, operations=None) for path, plan in folded.plans.items()}
    result = Folded(quantized, folded.dtype, plans, folded.origin)
    result.labels = folded.labels
    measured = _measured(folded, result, x)
    result.about = {**(folded.about or {}), "quantization": measured.stored()}
    return result.to(folded.anchor.device)


def _checked(folded: Any, images: Any) -> Tensor:
    if not isinstance(folded, Folded):
        got, remedy = type(folded).__name__, "Fold it first: cl.fold(model, input_shape)."
        raise refusal(_WHERE, "a Folded", got, remedy)
    if folded.dtype not in _DTYPES:
        remedy = "Fold with dtype=torch.float32."
        raise refusal(_WHERE, "a fold in float32 or float64", str(folded.dtype), remedy)
    if integer.integer_values(folded.recipe.operations):
        raise refusal(_WHERE, "a fold in floats", "one in int8", "Quantize the fold it came from.")
    if any(array.is_meta for array in folded.recipe.constants.values()):
        raise refusal(_WHERE, "constants with values", "some on meta", "Give them values first.")
    if not isinstance(images, Tensor):
        raise refusal(_WHERE, "images as a tensor", type(images).__name__, "Use torch.as_tensor.")
    if not images.is_floating_point() or images.layout != torch.strided:
        got = f"{images.dtype}, {images.layout}"
        raise refusal(_WHERE, "a dense tensor of floats", got, _SCALED)
    fits = tuple(images.shape[1:]) == folded.input_shape and len(images) > 0
    x = images.detach().to(device="cpu", dtype=folded.dtype)
    remedy = "Give a few hundred images, none of them test images."
    if not fits or not bool(x.isfinite().all()):
        got = f"{tuple(images.shape)}" if not fits else f"some that are not finite in {x.dtype}"
        shape = ", ".join(map(str, folded.input_shape))
        raise refusal(_WHERE, f"finite images of shape (N, {shape})", got, remedy)
    white = (folded.about or {}).get("white")
    if isinstance(white, (int, float)) and not 0 <= x.min() <= x.max() <= white * (1 + 1e-3):
        got = f"{float(x.min()):g} to {float(x.max()):g}"
        raise refusal(_WHERE, f"pixels from 0 to {white:g}", got, _SCALED)
    if not x.any():
        raise refusal(_WHERE, "images that set scales", "zeros alone", remedy)
    return x


def _measured(folded: Folded, quantized: Folded, x: Tensor) -> Quantization:
    with torch.inference_mode():
        expected = folded(x.to(folded.anchor)).double().cpu().flatten(1)
        actual = quantized(x).double().flatten(1)
    size = expected.norm(dim=1)
    error = torch.where(size == 0, 0.0, (actual - expected).norm(dim=1) / size)
    return Quantization(
        images=len(x),
        mean_error=float(error.mean()),
        largest_error=float(error.max()),
        agreement=float((actual.argmax(1) == expected.argmax(1)).double().mean()),
        float_bytes=_bytes(folded.recipe),
        int8_bytes=_bytes(quantized.recipe),
        float_operations=_float_operations(quantized.recipe),
    )


def _bytes(recipe: Recipe) -> int:
    return sum(array.dtype.itemsize * prod(array.shape) for array in recipe.constants.values())


def _float_operations(recipe: Recipe) -> tuple[str, ...]:
    whole = integer.integer_values(recipe.operations)
    kinds = [
        op.kind
        for op in recipe.operations
        if not isinstance(op, integer.KINDS) and op.outputs[0] not in whole
    ]
    return tuple(dict.fromkeys(kinds))
