"""Experiment 6: accuracy on corrupted images, by corruption and strength."""

from __future__ import annotations

import importlib.resources
import sys
import types
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import product
from statistics import fmean
from typing import Any
from unittest import mock

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from ...errors import ignored_warnings, missing_extra
from ...nn.layers import Centre
from ..checks import torch_settings
from ..data.batches import as_input, derive_seed
from ..data.datasets import load
from ..options import RobustnessOptions
from ..report import figures
from ..training.evaluate import all_scores, share_correct
from .cost import load_runs
from .records import Cells, Records, Row, grouped

CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur"),
    *("motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast"),
    *("elastic_transform", "pixelate", "jpeg_compression"),
)
CONTRASTS = (0.4, 0.3, 0.2, 0.1, 0.05)  # of the corruption "contrast", by strength
# No corruption, and a change of contrast to which projective networks without offset are invariant.
CLEAN, SCALED = "none", "scaled"
KINDS, STRENGTHS = (*CORRUPTIONS, SCALED), range(1, 6)
NAMES = (
    *("LeNet", "LeNetCL", "StageNet-micro-expanded", "StageNet-micro-no-offset-expanded"),
    *("StageNet-micro-no-respro-expanded", "StageReLUNet-micro-expanded"),
)
_WHERE = "experiment 6"


def run_robustness(options: RobustnessOptions) -> Row:
    """Measure trained networks on corrupted test images; return the record."""
    runs = load_runs(options.only or NAMES, options.dataset, 0, _WHERE)
    data = load(options.dataset, options.data_root, verify=options.verify)
    labels = data.test_labels[: options.images]
    key, settings = ("corruption", "strength", "name"), ("dataset", "images")
    records = Records(
        *(_WHERE, options, options.dataset, key, cells, strength_figure),
        settings=settings,
    )

    @lru_cache(maxsize=1)  # for all networks, and for one corruption and strength only
    def images(kind: str, strength: int) -> Tensor:
        clean = data.test_images[: options.images]
        return clean if kind in (CLEAN, SCALED) else corrupted(clean, kind, strength)

    def measure(kind: str, strength: int, name: str) -> Row:
        model, x = runs[name].module, images(kind, strength)
        row = {"corruption": kind, "strength": strength, "name": name}
        seen = _scaling(model, strength) if kind == SCALED else model
        return {**row, "accuracy": share_correct(all_scores(seen, x), labels)}

    with torch_settings(options.threads), records:
        for kind, strength in [(CLEAN, 0), *product(KINDS, STRENGTHS)]:
            for name in runs:
                records.row(kind, strength, name, measure=partial(measure, kind, strength, name))
    return records.record


def _scaling(model: nn.Module, strength: int) -> Callable[[Tensor], Tensor]:
    """Return a network that sees its images scaled, towards the mean image that it subtracts."""
    means = [module.mean for module in model.modules() if isinstance(module, Centre)]
    mean, contrast = means[0] if means else torch.zeros(()), CONTRASTS[strength - 1]
    return lambda x: model(mean + contrast * (x - mean))


def cells(rows: Sequence[Row]) -> Cells:
    """Return the header of a table, and one line of accuracies in per cent for each network.

    The accuracy of a corruption is the mean over its strengths.
    """
    measured = {row["corruption"] for row in rows}
    kinds = [kind for kind in (CLEAN, *CORRUPTIONS, SCALED) if kind in measured]
    lines = []
    for name, found in grouped(rows, "name").items():
        means = {kind: _mean(same) for kind, same in grouped(found, "corruption").items()}
        common = [means[kind] for kind in CORRUPTIONS if kind in means]
        line = [name, f"{fmean(common):.1f}" if common else ""]
        lines.append([*line, *(f"{means[k]:.1f}" if k in means else "" for k in kinds)])
    return ["network", "mean of corruptions", *kinds], lines


def _mean(rows: Sequence[Row]) -> float:
    return 100 * fmean(row["accuracy"] for row in rows)


def strength_figure(rows: Sequence[Row]) -> Figure:
    """Plot accuracy against strength: the mean of the corruptions, contrast, and scaling."""
    titles = {"mean of corruptions": CORRUPTIONS, "contrast": ("contrast",), SCALED: (SCALED,)}
    with figures.styled(9.6, 4.4, columns=3, legend=2) as (figure, panels):
        for axes, (title, kinds) in zip(panels, titles.items(), strict=True):
            lines = {}
            for name, found in grouped(rows, "name").items():
                drawn = [row for row in found if row["corruption"] in (CLEAN, *kinds)]
                lines[name] = [(s, _mean(same)) for s, same in grouped(drawn, "strength").items()]
            figures.draw_lines(axes, lines)
            axes.set(xlabel="strength", title=title)
            axes.sharey(panels[0])
        panels[0].set(ylabel="test accuracy (%)")
    return figure


def corrupted(images: Tensor, corruption: str, strength: int) -> Tensor:
    """Return corrupted images, each by random numbers of its own.

    Shape:
        (N, 1 or 3, H, W), unsigned bytes → (N, 3, 32, 32), unsigned bytes
    """
    corrupt, whole = _package(), as_input(images).mul(255).round().byte()
    pixels = whole.permute(0, 2, 3, 1).contiguous().numpy()
    with _todays_numpy():
        for index, image in enumerate(pixels):
            key = derive_seed(0, index, f"{corruption} {strength}")
            np.random.seed(key % 2**32)  # the package draws from numpy's global state
            pixels[index] = corrupt(image, corruption_name=corruption, severity=strength)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


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
