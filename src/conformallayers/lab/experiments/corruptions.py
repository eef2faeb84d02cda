"""Corrupted images: the corruptions of CIFAR-10-C, as the package imagecorruptions makes them."""

from __future__ import annotations

import importlib.resources
import sys
import types
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from ...errors import missing_extra
from ...utils.quiet import ignored_warnings
from ..data.batches import as_input, derive_seed

CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur"),
    *("motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast"),
    *("elastic_transform", "pixelate", "jpeg_compression"),
)
STRENGTHS = (1, 2, 3, 4, 5)
CONTRASTS = (0.4, 0.3, 0.2, 0.1, 0.05)  # of the corruption "contrast", by strength


def corrupted(images: Tensor, corruption: str, strength: int, seed: int = 0) -> Tensor:
    """Return corrupted images, each by random numbers of its own.

    Shape:
        (N, 1 or 3, H, W), unsigned bytes → (N, 3, 32, 32), unsigned bytes
    """
    corrupt, whole = _package(), as_input(images).mul(255).round().byte()
    pixels = whole.permute(0, 2, 3, 1).contiguous().numpy()
    with _todays_numpy():
        for index, image in enumerate(pixels):
            key = derive_seed(seed, index, f"{corruption} {strength}")
            np.random.seed(key % 2**32)  # the package draws from numpy's global state
            pixels[index] = corrupt(image, corruption_name=corruption, severity=strength)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


def scaled(x: Tensor, mean: Tensor, strength: int) -> Tensor:
    """Move images towards the mean training image: ``mean + c·(x − mean)``.

    Shape:
        (B, 3, 32, 32) → (B, 3, 32, 32)
    """
    return mean + CONTRASTS[strength - 1] * (x - mean)


@lru_cache(maxsize=1)
def _package() -> Callable[..., Any]:
    """Import imagecorruptions, which is of 2020, and patch what newer dependencies have dropped."""
    # setuptools no longer has pkg_resources, with which the package finds its pictures of frost.
    stand_in: Any = types.ModuleType("pkg_resources")
    stand_in.resource_filename = lambda name, file: str(
        importlib.resources.files(name.partition(".")[0]) / file
    )
    used = sys.modules.setdefault("pkg_resources", stand_in)
    try:
        with ignored_warnings():  # of names that scipy has moved
            import imagecorruptions
            from imagecorruptions import corruptions
    except ImportError as error:
        raise missing_extra("imagecorruptions", "robustness", "experiment 6") from error
    finally:
        if used is stand_in:
            del sys.modules["pkg_resources"]
    skimage, gaussian = corruptions.sk, corruptions.gaussian

    def blur(image: Any, sigma: Any, multichannel: bool = False, **options: Any) -> Any:
        return gaussian(image, sigma, channel_axis=-1 if multichannel else None, **options)

    def noise(image: Any, **options: Any) -> Any:  # newer versions ignore numpy's global state
        return skimage.util.random_noise(image, rng=np.random.randint(2**31), **options)

    corruptions.gaussian = blur
    util = types.SimpleNamespace(random_noise=noise)
    corruptions.sk = types.SimpleNamespace(util=util, color=skimage.color)
    found: Callable[..., Any] = imagecorruptions.corrupt
    return found


# numpy 2 has no float_, which the package uses.
_todays_numpy = partial(mock.patch.object, np, "float_", np.float64, create=True)
