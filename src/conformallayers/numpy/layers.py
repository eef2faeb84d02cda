"""The linear layers of torch.nn in numpy, made from the settings and arrays of a file.

A maker takes the settings and the arrays of one layer and returns a function of a batch. Poolings and
interpolations act on each axis by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays import Array, convolve, each, pad, reshaped, sums, with_bias

Run = Callable[[Array], Array]
_LARGEST = 2**22  # places along one axis
Maker = Callable[[dict[str, Any], dict[str, Array]], Run]


def _conv(s: dict[str, Any], t: dict[str, Array]) -> Run:
    weight, bias = t["weight"], t.get("bias")
    axes = weight.ndim - 2
    spans = [d * (k - 1) for d, k in zip(each(s["dilation"], axes), weight.shape[2:], strict=True)]
    if s["padding"] == "same":
        pads = [(span // 2, span - span // 2) for span in spans]
    else:
        pads = [(p, p) for p in each(0 if s["padding"] == "valid" else s["padding"], axes)]

    def run(x: Array) -> Array:
        padded = pad(x, pads, s["padding_mode"])
        return with_bias(convolve(padded, weight, s["stride"], s["dilation"], s["groups"]), bias)

    return run


def _transposed(s: dict[str, Any], t: dict[str, Array]) -> Run:
    weight, groups = t["weight"], s["groups"]
    axes = weight.ndim - 2
    if not weight.size:
        raise ValueError("a kernel without entries")
    names = ("stride", "dilation", "padding", "output_padding")
    stride, dilation, padding, more = (each(s[name], axes) for name in names)

    def run(x: Array) -> Array:
        """Add what every place of the kernel gives, then cut the margin off."""
        kernel, sizes = weight.shape[2:], x.shape[2:]
        full = [
            (n - 1) * s + d * (k - 1) + 1 + o
            for n, s, d, k, o in zip(sizes, stride, dilation, kernel, more, strict=True)
        ]
        channels = weight.shape[1]
        y = np.zeros((x.shape[0], groups * channels, *full), x.dtype)
        for place in np.ndindex(*kernel):
            starts = [p * d for p, d in zip(place, dilation, strict=True)]
            cut = [
                slice(a, a + (n - 1) * s + 1, s)
                for a, n, s in zip(starts, sizes, stride, strict=True)
            ]
            pairs = zip(np.split(x, groups, 1), np.split(weight, groups), strict=True)
            for group, (part, w) in enumerate(pairs):
                image = np.tensordot(part, w[(slice(None), slice(None), *place)], ((1,), (0,)))
                own = slice(group * channels, (group + 1) * channels)
                y[(slice(None), own, *cut)] += np.moveaxis(image, -1, 1)
        return with_bias(pad(y, [(-p, -p) for p in padding]), t.get("bias"))

    return run


def _checked(out: int, where: str = "an axis") -> int:
    """Refuse a length that only a file without sense asks for."""
    if not 0 < out <= _LARGEST:
        raise ValueError(f"{where} of {out}")
    return out


def _pool(s: dict[str, Any], t: dict[str, Array]) -> Run:
    def run(x: Array) -> Array:
        axes, y, counts = x.ndim - 2, x, []
        sizes = (each(s[name], axes) for name in ("kernel_size", "stride", "padding"))
        for axis, (n, k, step, p) in enumerate(zip(x.shape[2:], *sizes, strict=True), 2):
            out = (n + 2 * p - k + (step - 1 if s["ceil_mode"] else 0)) // step + 1
            if s["ceil_mode"] and (out - 1) * step >= n + p:
                out -= 1  # a window that starts behind the image does not count
            start = np.arange(_checked(out)) * step - p
            stop = np.minimum(start + k, n + p)
            first, last = np.maximum(start, 0), np.minimum(stop, n)
            y = sums(y, axis, first, last)
            counts.append(stop - start if s["count_include_pad"] else last - first)
        divisor = s.get("divisor_override") or math.prod(np.ix_(*counts))
        return np.asarray(y / divisor, x.dtype)

    return run


def _adaptive_pool(s: dict[str, Any], t: dict[str, Array]) -> Run:
    def run(x: Array) -> Array:
        y, sizes = x, each(s["output_size"], x.ndim - 2)
        for axis, (n, wanted) in enumerate(zip(x.shape[2:], sizes, strict=True), 2):
            out = _checked(n if wanted is None else wanted)
            place = np.arange(out)
            first, last = place * n // out, -(-(place + 1) * n // out)
            means = sums(y, axis, first, last)
            y = means / (last - first).reshape(-1, *[1] * (x.ndim - axis - 1))
        return np.asarray(y, x.dtype)

    return run


def _upsample(s: dict[str, Any], t: dict[str, Array]) -> Run:
    mode: str = s["mode"]
    if not mode.startswith("nearest") and not mode.endswith("linear"):
        raise KeyError(f'Upsample(mode="{mode}")')

    def run(x: Array) -> Array:
        axes, y = x.ndim - 2, x
        sizes, factors = each(s["size"], axes), each(s["scale_factor"], axes)
        for axis, (n, size, factor) in enumerate(zip(x.shape[2:], sizes, factors, strict=True), 2):
            out = _checked(math.floor(n * factor) if size is None else size)
            ratio = n / out if size is not None or s["recompute_scale_factor"] else 1 / factor
            y = _interpolated(y, axis, out, ratio, mode, s["align_corners"], x.dtype)
        return np.asarray(y, x.dtype)

    return run


def _interpolated(
    x: Array, axis: int, out: int, ratio: float, mode: str, corners: Any, dtype: Any
) -> Array:
    """Stretch one axis, with places rounded as torch rounds them; linear in float64."""
    n, place = x.shape[axis], np.arange(out)
    if mode.startswith("nearest"):
        half = np.float32(0.5 if mode == "nearest-exact" else 0)
        low = np.minimum((place.astype(np.float32) + half) * np.float32(ratio), n - 1)
        return np.asarray(np.take(x, np.floor(low).astype(int), axis))
    if corners:
        source = place * dtype.type((n - 1) / (out - 1) if out > 1 else 0)
    else:
        source = np.maximum(dtype.type(ratio) * (place.astype(dtype) + dtype.type(0.5)) - 0.5, 0)
    low = np.minimum(np.floor(source).astype(int), n - 1)
    share = (source - low).astype(np.float64).reshape(-1, *[1] * (x.ndim - axis - 1))
    high = np.minimum(low + 1, n - 1)
    return np.asarray((1 - share) * np.take(x, low, axis) + share * np.take(x, high, axis))


def _padding(s: dict[str, Any], t: dict[str, Array], mode: str = "zeros") -> Run:
    ends = list(s["padding"])
    pads = [(ends[i], ends[i + 1]) for i in range(len(ends) - 2, -1, -2)]  # last axis first
    return lambda x: pad(x, pads, mode, s.get("value", 0))


def _linear(s: dict[str, Any], t: dict[str, Array]) -> Run:
    weight, bias = t["weight"].T, t.get("bias")
    return lambda x: x @ weight if bias is None else x @ weight + bias


def _flatten(s: dict[str, Any], t: dict[str, Array]) -> Run:
    def run(x: Array) -> Array:
        start, stop = s["start_dim"] % x.ndim, s["end_dim"] % x.ndim + 1
        return x.reshape(*x.shape[:start], math.prod(x.shape[start:stop]), *x.shape[stop:])

    return run


def _unflatten(s: dict[str, Any], t: dict[str, Array]) -> Run:
    def run(x: Array) -> Array:
        axis, sizes = s["dim"] % x.ndim, list(s["unflattened_size"])
        if -1 in sizes:
            sizes[sizes.index(-1)] = -x.shape[axis] // math.prod(sizes)
        return reshaped(x, *x.shape[1:axis], *sizes, *x.shape[axis + 1 :])

    return run


def _shuffle(s: dict[str, Any], t: dict[str, Array]) -> Run:
    def run(x: Array) -> Array:
        (_, c, h, w), r = x.shape, s["upscale_factor"]
        parts = reshaped(x, c // r**2, r, r, h, w).transpose(0, 1, 4, 2, 5, 3)
        return reshaped(parts, c // r**2, h * r, w * r)

    return run


def _unshuffle(s: dict[str, Any], t: dict[str, Array]) -> Run:
    def run(x: Array) -> Array:
        (_, c, h, w), r = x.shape, s["downscale_factor"]
        parts = reshaped(x, c, h // r, r, w // r, r).transpose(0, 1, 3, 5, 2, 4)
        return reshaped(parts, c * r**2, h // r, w // r)

    return run


def _channel_shuffle(s: dict[str, Any], t: dict[str, Array]) -> Run:
    def run(x: Array) -> Array:
        _, c, *spatial = x.shape
        parts = reshaped(x, s["groups"], c // s["groups"], *spatial).swapaxes(1, 2)
        return parts.reshape(x.shape)

    return run


def _batch_norm(s: dict[str, Any], t: dict[str, Array]) -> Run:
    factor = 1 / np.sqrt(t["running_var"] + np.asarray(s["eps"], t["running_var"].dtype))
    factor = factor * t["weight"] if "weight" in t else factor
    shift = t.get("bias", 0) - t["running_mean"] * factor
    return lambda x: with_bias(x * factor.reshape(-1, *[1] * (x.ndim - 2)), shift)


def _channel_scale(s: dict[str, Any], t: dict[str, Array]) -> Run:
    return lambda x: x * t["factor"].reshape(-1, *[1] * (x.ndim - 2))


def _scale(s: dict[str, Any], t: dict[str, Array]) -> Run:
    return lambda x: x * t["gain"]


def _centre(s: dict[str, Any], t: dict[str, Array]) -> Run:
    return lambda x: x - t["mean"]


def _repeat(s: dict[str, Any], t: dict[str, Array]) -> Run:
    return lambda x: np.tile(x, (1, s["times"], *[1] * (x.ndim - 2)))


def _relu(s: dict[str, Any], t: dict[str, Array]) -> Run:
    return lambda x: np.maximum(x, 0)


def _identity(s: dict[str, Any], t: dict[str, Array]) -> Run:
    return lambda x: x


def _pads(mode: str) -> Maker:
    return lambda s, t: _padding(s, t, mode)


_SPATIAL: dict[str, Maker] = {
    "Conv": _conv,
    "ConvTranspose": _transposed,
    "AvgPool": _pool,
    "AdaptiveAvgPool": _adaptive_pool,
    "BatchNorm": _batch_norm,
    "Dropout": _identity,
    "ZeroPad": _padding,
    "ConstantPad": _padding,
    "ReflectionPad": _pads("reflect"),
    "ReplicationPad": _pads("replicate"),
    "CircularPad": _pads("circular"),
}
MAKERS: dict[str, Maker] = {
    **{f"{name}{n}d": maker for name, maker in _SPATIAL.items() for n in (1, 2, 3)},
    "Linear": _linear,
    "Flatten": _flatten,
    "Unflatten": _unflatten,
    "Identity": _identity,
    "Dropout": _identity,
    "PixelShuffle": _shuffle,
    "PixelUnshuffle": _unshuffle,
    "ChannelShuffle": _channel_shuffle,
    "Upsample": _upsample,
    "RepeatChannels": _repeat,
    "Centre": _centre,
    "Scale": _scale,
    "channel scale": _channel_scale,
    "ReLU": _relu,
}
