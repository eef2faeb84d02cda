"""Conformance cases: one row for every option of every linear layer and every homogeneous map.

An option that no test varies can hide a wrong fold. The project's own tests run over these rows; the
tests of a new strategy, file format or runtime can do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

from torch import nn

from conformallayers.nn import layers
from conformallayers.nn.branches import Parallel, Residual, Split

ALPHAS: tuple[str | float | None, ...] = (None, "young", "spectral", "learned", 2.5)


@dataclass(frozen=True)
class Case:
    """One layer with one choice of options.

    Args:
        name: unique among the cases, as in a call.
        build: returns a new layer.
        input_shape: the shape of one sample.

    Examples:
        >>> case = LINEAR_CASES[0]
        >>> case.name, case.build(), case.input_shape
        ('nn.Conv1d', Conv1d(2, 3, kernel_size=(3,), stride=(1,), bias=False), (2, 9))
    """

    name: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]


_Options = dict[str, Any]
_SIZES = {1: (9,), 2: (7, 6), 3: (5, 4, 6)}  # image sizes by number of axes
_PADDED_MODES = ("reflect", "replicate", "circular")


def _first(n: int, *values: int) -> tuple[int, ...]:
    """Return the values of the first n axes."""
    return values[:n]


def _conv_options(n: int) -> Iterator[_Options]:
    yield {}
    yield {"kernel_size": _first(n, 2, 3, 1)}
    yield {"stride": 2}
    yield {"stride": _first(n, 3, 1, 2)}
    yield {"padding": 1}
    yield {"padding": _first(n, 2, 0, 1)}
    yield {"padding": "valid"}
    yield {"padding": "same"}
    yield {"padding": "same", "kernel_size": _first(n, 4, 2, 3)}
    yield {"padding": "same", "kernel_size": 2, "dilation": 3}
    yield {"dilation": 2, "padding": 1}
    yield {"dilation": _first(n, 2, 1, 3), "kernel_size": 2}
    yield {"groups": 2, "in_channels": 4, "out_channels": 2}
    yield {"groups": 2, "out_channels": 4, "stride": 2, "padding": 1}
    for mode in _PADDED_MODES:
        yield {"padding_mode": mode}
        yield {"padding_mode": mode, "padding": 2}
        yield {"padding_mode": mode, "padding": _first(n, 0, 2, 1), "stride": 2}
        yield {"padding_mode": mode, "padding": "same"}
        yield {"padding_mode": mode, "padding": "same", "kernel_size": _first(n, 4, 2, 3)}
        yield {"padding_mode": mode, "padding": 1, "dilation": 2, "kernel_size": 2}
    yield {"bias": True}
    yield {"bias": True, "padding": 1, "stride": 2, "groups": 2, "out_channels": 4}
    # More padding than the kernel covers: the image wraps around more than once.
    yield {"padding_mode": "circular", "padding": 3, "kernel_size": 2}


def _transposed_options(n: int) -> Iterator[_Options]:
    yield {}
    yield {"kernel_size": _first(n, 2, 3, 1)}
    yield {"stride": 2}
    yield {"stride": _first(n, 2, 1, 3), "kernel_size": 2}
    yield {"padding": 1}
    yield {"padding": _first(n, 1, 2, 0), "stride": 2}
    yield {"stride": 2, "output_padding": 1}
    yield {"stride": 3, "padding": 1, "output_padding": _first(n, 2, 0, 1)}
    yield {"groups": 2, "out_channels": 4}
    yield {"dilation": 2}
    yield {"bias": True, "stride": 2}
    yield {"dilation": _first(n, 1, 3, 2), "groups": 2, "out_channels": 2, "padding": 1}


def _pool_options(n: int) -> Iterator[_Options]:
    yield {"kernel_size": 2}
    yield {"kernel_size": _first(n, 3, 2, 1) if n > 1 else 3}
    yield {"kernel_size": 3, "stride": 1}
    yield {"kernel_size": 2, "stride": _first(n, 3, 1, 2) if n > 1 else 3}
    yield {"kernel_size": 3, "padding": 1}
    yield {"kernel_size": 4, "stride": 2, "padding": _first(n, 2, 1, 0) if n > 1 else 2}
    yield {"kernel_size": 4, "stride": 3, "ceil_mode": True}
    border: _Options = {"ceil_mode": True, "count_include_pad": False}
    # The last window would start outside the image, so torch drops it.
    yield {"kernel_size": 2, "stride": 3, **border}
    yield {"kernel_size": 3, "padding": 1, "count_include_pad": False}
    yield {"kernel_size": 3, "stride": 2, "padding": 1, **border}
    if n > 1:
        yield {"kernel_size": 2, "divisor_override": 1}
        yield {"kernel_size": 3, "stride": 1, "padding": 1, "divisor_override": 5}
        yield {"kernel_size": 2, "padding": 1, "count_include_pad": False, "divisor_override": 3}


def _adaptive_options(n: int) -> Iterator[_Options]:
    yield {"output_size": 1}
    yield {"output_size": 3}
    yield {"output_size": max(_SIZES[n]) + 2}
    yield {"output_size": _first(n, 4, 2, 3)}
    if n > 1:
        yield {"output_size": (*(None,) * (n - 1), 2)}
        yield {"output_size": (3, *(None,) * (n - 1))}


def _upsample_options(n: int) -> Iterator[_Options]:
    linear = ("linear", "bilinear", "trilinear")[n - 1]
    yield {"scale_factor": 2}
    yield {"scale_factor": _first(n, 2, 1, 3) if n > 1 else 3, "mode": "nearest-exact"}
    yield {"scale_factor": 1.7, "mode": linear}
    yield {"scale_factor": 1.7, "mode": linear, "recompute_scale_factor": True}
    yield {"size": 5, "mode": linear, "align_corners": True}


def _label(options: _Options) -> str:
    shown = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"({shown})" if shown else ""


def _row(
    owner: Any, name: str, shape: tuple[int, ...], options: _Options, base: _Options | None = None
) -> Case:
    """Return the case of a class of torch.nn or of this package."""
    package = "nn" if owner is nn else "cl"
    build = partial(getattr(owner, name), **{**(base or {}), **options})
    return Case(f"{package}.{name}{_label(options)}", build, shape)


def _spatial_cases(owner: Any, n: int) -> Iterator[Case]:
    """Yield the cases of the convolutions that both packages have."""
    sizes = _SIZES[n]
    base: _Options = {"in_channels": 2, "out_channels": 3, "kernel_size": 3}
    if owner is nn:
        base["bias"] = False
    for options in _conv_options(n):
        yield _row(owner, f"Conv{n}d", (options.get("in_channels", 2), *sizes), options, base)
    small = tuple(min(size, 6 - n) for size in sizes)
    for options in _transposed_options(n):
        yield _row(owner, f"ConvTranspose{n}d", (2, *small), options, base)


def _torch_cases(n: int) -> Iterator[Case]:
    """Yield the cases of the other layers with n spatial axes."""
    sizes = _SIZES[n]
    for options in _pool_options(n):
        yield _row(nn, f"AvgPool{n}d", (2, *sizes), options)
    for options in _adaptive_options(n):
        yield _row(nn, f"AdaptiveAvgPool{n}d", (2, *sizes), options)
    yield _row(nn, f"Dropout{n}d", (4, *sizes), {"p": 0.3})
    newer = [{"bias": False}] * ("bias" in signature(nn.BatchNorm1d).parameters)  # not in torch 2.6
    for options in ({}, {"eps": 0.1, "momentum": 0.3}, {"affine": False}, *newer):
        yield _row(nn, f"BatchNorm{n}d", (3, *sizes), options, {"num_features": 3})
    small = tuple(min(size, 4) for size in sizes)
    for options in _upsample_options(n):
        name = f"Upsample in {n} dimensions{_label(options)}"
        yield Case(f"nn.{name}", partial(nn.Upsample, **options), (2, *small))
    pads = (1, _first(2 * n, 2, 0, 1, 2, 0, 1), _first(2 * n, 0, 3, 0, 0, 2, 2))
    crop = _first(2 * n, -1, 2, 0, -2, 1, -1)  # where padding is negative
    for mode in ("Zero", "Constant", "Reflection", "Replication", "Circular"):
        base: _Options = {"value": 0.0} if mode == "Constant" else {}
        for padding in (*pads, crop) if mode in ("Zero", "Constant") else pads:
            yield _row(nn, f"{mode}Pad{n}d", (2, *sizes), {"padding": padding}, base)


def _plain_cases() -> Iterator[Case]:
    """Yield the cases of the layers for any number of axes."""
    for owner in (nn, layers):
        bias: _Options = {"bias": False} if owner is nn else {}
        yield _row(owner, "Linear", (6,), {"in_features": 6, "out_features": 4}, bias)
        yield _row(owner, "Linear", (2, 3, 5), {"in_features": 5, "out_features": 7}, bias)
        yield _row(owner, "Linear", (6,), {"in_features": 6, "out_features": 4, "bias": True})
    yield _row(nn, "Dropout", (3, 4), {})
    yield _row(nn, "Dropout", (3, 4, 2), {"p": 0.2})
    yield _row(nn, "Flatten", (2, 3, 4), {})
    yield _row(nn, "Flatten", (2, 3, 4), {"start_dim": 2})
    yield _row(nn, "Flatten", (2, 3, 4), {"start_dim": -3, "end_dim": 2})
    yield _row(nn, "Identity", (2, 3), {})


def _composite_cases() -> Iterator[Case]:
    """Yield branches without activations, which are linear layers."""

    def conv(bias: bool = False, out: int = 2, kernel: int = 3) -> nn.Module:
        return layers.Conv2d(2, out, kernel, padding=kernel // 2, bias=bias)

    wide = partial(Parallel, join="concatenate")
    builders: dict[str, Callable[[], nn.Module]] = {
        "Residual": lambda: Residual(conv(), layers.AvgPool2d(3, 1, 1)),
        "Residual(bias)": lambda: Residual(conv(True), nn.BatchNorm2d(2)),
        "Residual(shortcut)": lambda: Residual(conv(out=3), shortcut=conv(True, 3, kernel=1)),
        "Parallel": lambda: Parallel(conv(True), nn.Identity(), conv()),
        "Parallel(concatenate)": lambda: wide(nn.Sequential(conv(), conv()), conv(True, 3)),
        "Parallel(concatenate, dim=-1)": lambda: wide(conv(), layers.AvgPool2d((1, 2)), dim=-1),
    }
    for name, build in builders.items():
        yield Case(f"cl.{name}", build, (2, 5, 6))
    groups = partial(Split, [2, 1])
    yield Case("cl.Split", lambda: groups([conv(True, 3), layers.Conv2d(1, 1, 3, 1, 1)]), (3, 5, 6))


def _linear_cases() -> Iterator[Case]:
    for owner in (nn, layers):
        for n in _SIZES:
            yield from _spatial_cases(owner, n)
    yield from _plain_cases()
    for n in _SIZES:
        yield from _torch_cases(n)
    yield _row(nn, "Unflatten", (6, 2), {"dim": 1, "unflattened_size": (3, 2)})
    yield _row(nn, "Unflatten", (2, 6), {"dim": -1, "unflattened_size": (2, -1)})
    yield _row(nn, "PixelShuffle", (8, 2, 3), {"upscale_factor": 2})
    yield _row(nn, "PixelUnshuffle", (2, 4, 6), {"downscale_factor": 2})
    yield _row(nn, "ChannelShuffle", (6, 3, 2), {"groups": 3})
    yield _row(nn, "BatchNorm1d", (4,), {}, {"num_features": 4})
    yield _row(layers, "RepeatChannels", (2, 3, 4), {"times": 3})
    yield from _composite_cases()
    yield _row(layers, "Scale", (3, 4), {})
    yield _row(layers, "Scale", (3, 4), {"gain": -0.5})


def _max_pool_options(n: int) -> Iterator[_Options]:
    yield {"kernel_size": 2}
    yield {"kernel_size": _first(n, 3, 2, 1) if n > 1 else 3, "stride": 1}
    yield {"kernel_size": 3, "stride": 2, "padding": 1}
    yield {"kernel_size": 2, "stride": _first(n, 1, 2, 3), "dilation": _first(n, 3, 1, 2)}
    yield {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2}
    yield {"kernel_size": 2, "stride": 3, "ceil_mode": True}
    yield {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}


def _norm_pool_options(n: int) -> Iterator[_Options]:
    yield {"kernel_size": 2}
    yield {"kernel_size": _first(n, 3, 2, 1) if n > 1 else 3, "stride": 1}
    yield {"kernel_size": 3, "stride": _first(n, 2, 1, 3) if n > 1 else 2}
    yield {"kernel_size": 3, "stride": 2, "ceil_mode": True}
    yield {"kernel_size": 4, "stride": 3, "ceil_mode": True}


def _split_cases() -> Iterator[Case]:
    def mean_and_norm() -> nn.Module:
        return Split([1, 2], [layers.AvgPool2d(2), nn.LPPool2d(2, 2)])

    def deeper() -> nn.Module:
        rest = nn.Sequential(nn.ReLU(), layers.Conv2d(2, 2, 3, padding=1, bias=True))
        return Split([1, 2], [nn.Identity(), rest])

    yield Case("cl.Split(mean and norm)", mean_and_norm, (3, 5, 6))
    yield Case("cl.Split(deeper)", deeper, (3, 5, 6))


def _homogeneous_cases() -> Iterator[Case]:
    yield _row(nn, "ReLU", (3, 4), {})
    for slope in (0.01, 0.3, -0.4, 1.5):
        yield _row(nn, "LeakyReLU", (3, 4), {"negative_slope": slope})
    yield _row(nn, "PReLU", (3, 4, 5), {"init": -0.3})
    yield _row(nn, "PReLU", (3, 4), {"num_parameters": 3})
    yield _row(layers, "Abs", (3, 4), {})
    for n, sizes in _SIZES.items():
        for options in _max_pool_options(n):
            yield _row(nn, f"MaxPool{n}d", (2, *sizes), options)
        for options in _adaptive_options(n):
            yield _row(nn, f"AdaptiveMaxPool{n}d", (2, *sizes), options)
        for options in _norm_pool_options(n):
            yield _row(nn, f"LPPool{n}d", (2, *sizes), options, {"norm_type": 2})
    yield from _split_cases()


LINEAR_CASES: tuple[Case, ...] = tuple(_linear_cases())
HOMOGENEOUS_CASES: tuple[Case, ...] = tuple(_homogeneous_cases())
