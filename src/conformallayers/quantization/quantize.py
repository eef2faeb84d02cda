"""Post-training quantization of a fold: 8-bit weights and features, calibrated on images."""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import refusal
from ..folding.folded import Folded, Quantization
from ..recipe.integer_operations import integer_values
from ..recipe.recipe import Recipe
from .calibration import Calibration
from .rewrite import Quantizer

_DTYPES = torch.float32, torch.float64
_IMAGES = (
    "Give a few hundred training images as the fold takes them, such as x / 255 of bytes; "
    "from a loader, torch.cat([x for x, _ in batches])."
)
_WHERE = "quantize(folded, images)"


def quantize(folded: Folded, images: Tensor) -> Folded:
    """Quantize a fold to integers: 8-bit weights and features, 32-bit sums.

    Torch, numpy, ONNX and C compute the same integers with it. Scales are calibrated on the images, which should
    resemble later inputs and include no test image; a few hundred are enough. Energies and norms are computed
    from integers, t is one float64 number for each sample, and the outputs are floats. NaN is read as 0.
    docs/deploy.md explains the arithmetic.

    Args:
        folded: from :func:`conformallayers.fold` or :func:`conformallayers.load`, in float32 or float64.
        images: (N, *input_shape), as the fold takes them.

    Returns:
        A :class:`Folded` whose ``quantization`` prints errors and sizes.

    Raises:
        ConformalError: int8 lacks an operation, such as forms written out or a sigmoid between layers with weights.

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
    recipe = folded.recipe.with_constants(lambda _, array: array.cpu().clone())
    try:
        quantized = Quantizer(recipe, Calibration(recipe, folded.dtype, x)).quantized()
    except OverflowError as error:  # from calibration.py
        remedy = "Scale the images to about 1 before the network, such as x / 255."
        raise refusal(_WHERE, "scales that 24 bits can hold", str(error), remedy) from None
    quantized.check_values()
    result = Folded(quantized, folded.dtype, folded.plans, folded.origin)
    result.labels = folded.labels
    measured = asdict(_measured(folded, result, x))
    result.about = {**(folded.about or {}), "quantization": measured}
    return result.to(folded.anchor.device)


def _checked(folded: Any, images: Any) -> Tensor:
    if not isinstance(folded, Folded):
        got, remedy = type(folded).__name__, "Fold it first: cl.fold(model, input_shape)."
        raise refusal(_WHERE, "a Folded", got, remedy)
    if folded.dtype not in _DTYPES:
        remedy = "Fold with dtype=torch.float32."
        raise refusal(_WHERE, "a fold in float32 or float64", str(folded.dtype), remedy)
    if integer_values(folded.recipe.operations):
        raise refusal(_WHERE, "a fold in floats", "one in int8", "Pass the original fold.")
    shape = f"(N, {', '.join(map(str, folded.input_shape))})"
    is_batch = isinstance(images, Tensor) and images.layout == torch.strided and images.numel() > 0
    if not is_batch or images.shape[1:] != folded.input_shape or not images.is_floating_point():
        expected = f"a tensor of images {shape}, floats as the network was trained on"
        named = isinstance(images, Tensor)
        got = f"{images.dtype} {tuple(images.shape)}" if named else type(images).__name__
        remedy = "Convert it with torch.from_numpy(x)." if got == "ndarray" else _IMAGES
        raise refusal(_WHERE, expected, got, remedy)
    x: Tensor = images.detach().to(device="cpu", dtype=folded.dtype)
    if not bool(x.isfinite().all()) or not x.any():
        got = "zeros alone" if x.isfinite().all() else f"some that are not finite in {x.dtype}"
        raise refusal(_WHERE, "finite images that are not all 0", got, _IMAGES)
    white = (folded.about or {}).get("white")
    if isinstance(white, (int, float)) and not 0 <= x.min() <= x.max() <= white * (1 + 1e-3):
        got = f"{float(x.min()):g} to {float(x.max()):g}"
        raise refusal(_WHERE, f"pixels from 0 to {white:g}", got, _IMAGES)
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
    )


def _bytes(recipe: Recipe) -> int:
    return sum(array.dtype.itemsize * prod(array.shape) for array in recipe.constants.values())
