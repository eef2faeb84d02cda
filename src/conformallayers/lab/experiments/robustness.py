"""Experiment 6: accuracy on corrupted images, by corruption and strength."""

from __future__ import annotations

import importlib.resources
import sys
import types
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from statistics import fmean
from typing import Any
from unittest import mock

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from ...errors import ignored_warnings, missing_extra, refusal
from ...nn.extra_layers import Centre
from ...testing import relative_error
from ..checks import require_choice, require_positive, torch_settings
from ..data.batches import as_input, derive_seed
from ..data.datasets import Dataset, load
from ..options import RobustnessOptions
from ..report import figures
from ..training.evaluate import accuracy
from .cost import named
from .records import Cells, Records, Row, grouped

CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur"),
    *("motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast"),
    *("elastic_transform", "pixelate", "jpeg_compression"),
)
STRENGTHS = (1, 2, 3, 4, 5)
CONTRASTS = (0.4, 0.3, 0.2, 0.1, 0.05)  # of the corruption "contrast", by strength
# No corruption, and a change of contrast to which projective networks without offset are invariant.
CLEAN, SCALED = "none", "scaled"
NAMES = (
    *("LeNet", "LeNetCL", "StageNet-micro", "StageNet-micro-no-offset"),
    *("StageNet-micro-depth2-norm-no-respro", "StageReLUNet-micro-average"),
    "StageReLUNet-micro-max",
)
_COMPARED = 256  # images whose scores are compared
_WHERE = "experiment 6"


def run_robustness(*, say: Callable[[str], object] = print, **options: Any) -> Row:
    """Measure trained networks on corrupted test images; write rows, table and figure.

    Args:
        say: receives one line per row.
        **options: fields of :class:`conformallayers.lab.options.RobustnessOptions`.
    """
    chosen = RobustnessOptions(**options)
    require_positive(_WHERE, chosen, "images", "threads")
    kinds = chosen.corruptions or (*CORRUPTIONS, SCALED)
    for kind in kinds:
        require_choice(f"{_WHERE} --corruptions", kind, (*CORRUPTIONS, SCALED), "Name one of them.")
    for strength in chosen.strengths:
        if strength not in STRENGTHS:
            remedy = "5 is the strongest."
            raise refusal(f"{_WHERE} --strengths", "1 to 5", str(strength), remedy)
    models = {
        one.name: one.load(chosen.dataset, 0, _WHERE).module
        for one in named(f"{_WHERE} --only", chosen.only or NAMES)
    }
    data = load(chosen.dataset, chosen.data_root, verify=chosen.verify)
    records = Records(
        *(_WHERE, chosen, chosen.dataset, ("corruption", "strength", "name")),
        cells=cells,
        figure=strength_figure,
        settings=("dataset", "images"),
        say=say,
    )
    # Images are corrupted once for all networks, and kept for one corruption and strength only.
    draw = lru_cache(maxsize=1)(partial(_images, data, chosen.images))
    cases = [(CLEAN, 0), *((kind, strength) for kind in kinds for strength in chosen.strengths)]
    with torch_settings(chosen.threads), records:
        for kind, strength in cases:
            for name, model in models.items():
                key = (kind, strength, name)
                records.row(key, partial(_measure, key, model, draw))
    return records.record


def _images(data: Dataset, count: int | None, kind: str, strength: int) -> tuple[Tensor, Tensor]:
    images, labels = data.test_images[:count], data.test_labels[:count]
    return images if kind in (CLEAN, SCALED) else corrupted(images, kind, strength), labels


def _measure(
    key: tuple[str, int, str], model: nn.Module, draw: Callable[..., tuple[Tensor, Tensor]]
) -> Row:
    kind, strength, name = key
    images, labels = draw(kind, strength)
    row: Row = {"corruption": kind, "strength": strength, "name": name}
    if kind != SCALED:
        return {**row, "accuracy": accuracy(model, images, labels)}
    means = [module.mean for module in model.modules() if isinstance(module, Centre)]
    mean = means[0] if means else torch.zeros(())

    def run(x: Tensor) -> Tensor:
        scores: Tensor = model(scaled(x, mean, strength))
        return scores

    with torch.inference_mode():
        x = as_input(images[:_COMPARED])
        row["change_of_scores"] = relative_error(run(x), model(x))
    return {**row, "accuracy": accuracy(run, images, labels)}


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
    with figures.styled(9.6, 4.4, columns=3) as (figure, panels):
        for axes, (title, kinds) in zip(panels, titles.items(), strict=True):
            for index, (name, found) in enumerate(grouped(rows, "name").items()):
                drawn = [row for row in found if row["corruption"] in (CLEAN, *kinds)]
                points = sorted((s, _mean(same)) for s, same in grouped(drawn, "strength").items())
                axes.plot(*zip(*points, strict=True), **figures.line_style(index, name))
            axes.set(xlabel="strength", title=title)
            axes.sharey(panels[0])
            axes.grid(alpha=0.3)
        panels[0].set(ylabel="test accuracy (%)")
        figures.legend_below(figure, panels[0])
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
