"""The rows of the registry: what is known of each supported layer, and what to use instead of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..functional import Scalar
from . import bounds
from .layers import Abs, Centre, Channels, ChannelScale, RepeatChannels, Rescale, Scale

Bound = Callable[[nn.Module, bounds.Shape], Scalar]
Check = Callable[[nn.Module], str | None]


@dataclass(frozen=True)
class LayerSpec:
    """Describe a linear module type, or a positively homogeneous one.

    Args:
        bound: (module, input shape) → an upper bound of the operator norm; of a homogeneous map, an
            upper bound of ``‖h(x)‖/‖x‖``.
        check: module → why this configuration is refused, or None.
        rank: the number of axes of a batch, if the module fixes it.
        channels: the name of the attribute that holds the size of axis 1.
        identity_in_eval: whether the module is the identity in evaluation mode.
        affine: whether the module adds its ``bias``, if that is not None.
        multiple: whether it multiplies the whole sample by one number in evaluation mode.
        norm_factor: (module, input shape) → the number by which it multiplies the norm of every
            sample, or None if there is no such number.
        homogeneous: whether it is not linear, but ``h(λx) = λ·h(x)`` for λ > 0.
    """

    bound: Bound
    check: Check | None = None
    rank: int | None = None
    channels: str | None = None
    identity_in_eval: bool = False
    affine: bool = False
    multiple: bool = False
    norm_factor: Callable[[Any, bounds.Shape], float | None] | None = None
    homogeneous: bool = False

    def takes(self, shape: bounds.Shape) -> bool:
        """Tell whether samples of a shape have the number of axes that the module fixes."""
        return self.rank is None or len(shape) + 1 == self.rank

    def problem(self, module: nn.Module) -> str | None:
        """Return why the configuration of a module is refused, or None."""
        return None if self.check is None else self.check(module)


BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
PADS = "ZeroPad", "ConstantPad", "ReflectionPad", "ReplicationPad", "CircularPad"
NORM_POOLS = nn.LPPool1d, nn.LPPool2d, nn.LPPool3d
POOLS = *NORM_POOLS, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d


def _keeps_statistics(module: Any) -> str | None:
    if module.running_var is not None:
        return None
    return (
        "expected track_running_stats=True, got False. "
        "Without running statistics the samples of a batch depend on each other."
    )


def _requires(attribute: str, value: object, why: str) -> Check:
    """Return a check that refuses modules whose attribute has another value."""

    def check(module: nn.Module) -> str | None:
        got = getattr(module, attribute)
        if got == value:
            return None
        return f"expected {attribute}={value}, got {attribute}={got}. {why}"

    return check


_not_in_place = _requires(
    "inplace", False, "Use inplace=False: the values before it are needed later."
)
_one_output = _requires("return_indices", False, "A layer returns one tensor.")
_euclidean = _requires("norm_type", 2, "Only the Euclidean norm of windows is supported.")


def _pads_linearly(module: Any) -> str | None:
    value = getattr(module, "value", 0)
    if value != 0:
        return f"expected padding with 0, got {value}. Padding must be linear."
    if bounds.pad_mode(module) == "circular" and min(module.padding) < 0:
        return f"expected circular padding without cropping, got {module.padding}. Crop first."
    return None


def _keeps_batch(module: nn.Module) -> str | None:
    dim = getattr(module, "start_dim", getattr(module, "dim", 1))
    if dim == 0:
        return "expected the batch axis to stay, got axis 0. Start at axis 1."
    return None


def _interpolates_linearly(module: Any) -> str | None:
    """Refuse what has no simple bound, or copies other pixels in float32 than in float64."""
    if module.mode in ("linear", "bilinear", "trilinear"):
        return None
    scales = module.scale_factor
    scales = scales if isinstance(scales, tuple) else (scales,)
    nearest = module.mode in ("nearest", "nearest-exact")
    if nearest and all(
        scale is not None and scale >= 1 and scale == int(scale) for scale in scales
    ):
        return None
    got = f"mode={module.mode!r}, scale_factor={module.scale_factor}"
    return f"expected nearest neighbours with a whole scale_factor, got {got}. Use mode='bilinear'."


def _one_without_copies(module: Any, shape: bounds.Shape) -> float | None:
    """Return the norm factor of padding: 1 if it adds zeros and neither copies nor crops pixels."""
    crops = any(size < 0 for size in module.padding)
    return None if crops or bounds.pad_mode(module) != "zeros" else 1.0


def _spatial_rows(n: int) -> dict[type[nn.Module], LayerSpec]:
    """Return the rows of the layers that torch.nn has for n = 1, 2 and 3 spatial axes."""
    rank = n + 2
    convolves: dict[str, Any] = {"rank": rank, "channels": "in_channels", "affine": True}
    dropout = LayerSpec(
        bounds.one, check=_not_in_place, rank=rank, identity_in_eval=True, multiple=True
    )
    padding = LayerSpec(
        bounds.pad_bound, check=_pads_linearly, rank=rank, norm_factor=_one_without_copies
    )
    batch_norm = LayerSpec(
        bounds.channel_bound,
        check=_keeps_statistics,
        rank=None if n == 1 else rank,  # BatchNorm1d takes (B, C) as well
        channels="num_features",
    )
    average = LayerSpec(bounds.avg_pool_bound, rank=rank)
    largest = LayerSpec(bounds.max_pool_bound, check=_one_output, rank=rank, homogeneous=True)
    rows = {
        "Conv": LayerSpec(bounds.conv_bound, **convolves),
        "ConvTranspose": LayerSpec(bounds.transposed_bound, **convolves),
        **dict.fromkeys(("AvgPool", "AdaptiveAvgPool"), average),
        "Dropout": dropout,
        "BatchNorm": batch_norm,
        **dict.fromkeys(PADS, padding),
        **dict.fromkeys(("MaxPool", "AdaptiveMaxPool"), largest),
        "LPPool": LayerSpec(bounds.norm_pool_bound, check=_euclidean, rank=rank, homogeneous=True),
    }
    return {getattr(nn, f"{name}{n}d"): spec for name, spec in rows.items()}


_MOVES = LayerSpec(bounds.one, rank=4, norm_factor=bounds.one)
_RESHAPES = LayerSpec(bounds.one, check=_keeps_batch, norm_factor=bounds.one)

SUPPORTED: dict[type[nn.Module], LayerSpec] = {
    **_spatial_rows(1),
    **_spatial_rows(2),
    **_spatial_rows(3),
    nn.Linear: LayerSpec(bounds.linear_bound, channels="in_features", affine=True),
    nn.Flatten: _RESHAPES,
    nn.Unflatten: _RESHAPES,
    nn.Identity: LayerSpec(bounds.one, multiple=True, norm_factor=bounds.one),
    nn.Dropout: LayerSpec(
        bounds.one,
        check=_not_in_place,
        identity_in_eval=True,
        multiple=True,
        norm_factor=bounds.one,
    ),
    **dict.fromkeys((nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle), _MOVES),
    nn.Upsample: LayerSpec(
        bounds.upsample_bound, check=_interpolates_linearly, norm_factor=bounds.repeated_pixels
    ),
    RepeatChannels: LayerSpec(bounds.repeat_bound, norm_factor=bounds.repeat_bound),
    ChannelScale: LayerSpec(bounds.scale_bound),
    Rescale: LayerSpec(bounds.rescale_bound, affine=True),
    Scale: LayerSpec(bounds.gain_bound, multiple=True),
    Channels: LayerSpec(bounds.one, channels="channels"),
    nn.ReLU: LayerSpec(bounds.one, check=_not_in_place, homogeneous=True),
    nn.LeakyReLU: LayerSpec(bounds.leaky_bound, check=_not_in_place, homogeneous=True),
    nn.PReLU: LayerSpec(bounds.prelu_bound, homogeneous=True),
    Abs: LayerSpec(bounds.one, homogeneous=True),
}

_ACTIVATIONS = (
    *("ReLU6", "RReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Softplus", "Softsign"),
    *("Sigmoid", "Tanh", "LogSigmoid", "Hardswish", "Hardsigmoid", "Hardtanh", "Hardshrink"),
    *("Softshrink", "Tanhshrink", "Softmax", "Softmax2d", "LogSoftmax", "Softmin"),
    *("GLU", "Threshold"),
)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm)

# A subclass gets the suggestion of its nearest ancestor.
REFUSED: dict[type, str] = {
    **dict.fromkeys(
        (getattr(nn, name) for name in _ACTIVATIONS),
        "Use nn.ReLU(), nn.LPPool2d(2, ...) or cl.ReSPro(), which fold, or put it into the head.",
    ),
    nn.FractionalMaxPool2d: "Use nn.MaxPool2d or nn.LPPool2d(2, ...): its windows are random.",
    nn.FractionalMaxPool3d: "Use nn.MaxPool3d or nn.LPPool3d(2, ...): its windows are random.",
    **dict.fromkeys(
        _NORMS, "Use nn.BatchNorm, which folds, or leave it out: ReSPro already normalises."
    ),
    nn.modules.lazy.LazyModuleMixin: "Give the number of input channels: bounds need the weights.",
    nn.Sequential: "Unpack it: cl.ConformalLayers(*inner, ...).",
    Centre: "Put it before the ConformalLayers: it belongs to the input.",
}
