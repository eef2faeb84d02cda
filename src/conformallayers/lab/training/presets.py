"""Presets: tested combinations of training options, by network family and data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import refusal
from ...utils.text import suggest
from ..checks import require_choice
from ..data.catalogue import NAMES

Options = Mapping[str, Any]
FAMILIES = {
    "LeNet": ("LeNet", "LeNetCL"),
    "Base": ("BaseReLUNet", "BaseReSProNet"),
    "Stage": ("StageNet", "StageReLUNet", "ResNet8", "MLP"),
}
CONFORMAL = ("BaseReSProNet", "LeNetCL")
PICTURES = "a folder of pictures"

_COMMON = {
    "optimizer": "adamw",
    "weight_decay": 0.05,
    "schedule": "one-cycle",
    "learning_rate": 1e-2,
    "batch_size": 128,
    "centre": True,
}
_STAGES = {"learning_rate": 3e-3, "weight_decay": 0.02}
# Of presets that would learn their training images by heart.
_DECAYS: dict[str | None, Options] = {
    "base": {"weight_decay": 0.1},
    "compact": {"weight_decay": 0.06},
    "large": {"weight_decay": 0.1},
}
_CONFORMAL_OPTIONS = {"projective": True, "alpha": "spectral", "gain": 100.0}

# Chosen by validation accuracy; docs/training.md gives the reason for each option.
PRESETS: dict[str, dict[tuple[str, str], Options]] = {
    "modern": {
        ("LeNet", "digits"): {"epochs": 30, "batch_size": 64, "shift": 1},
        ("LeNet", "mnist"): {"epochs": 20, "shift": 1},
        ("LeNet", "fashion-mnist"): {
            "epochs": 40,
            "flips": True,
            "shift": 1,
            "weight_decay": 0.02,
            "hidden": 512,
        },
        ("LeNet", "cifar10"): {"epochs": 30, "flips": True, "shift": 2},
        ("Base", "digits"): {"epochs": 15, "batch_size": 64, "hidden": 64},
        ("Base", "mnist"): {"epochs": 6, "hidden": 64},
        ("Base", "fashion-mnist"): {"epochs": 6, "hidden": 64, "flips": True},
        ("Base", "cifar10"): {"epochs": 8, "hidden": 64, "flips": True},
        ("Stage", "digits"): {**_STAGES, "epochs": 30, "batch_size": 64, "shift": 1},
        ("Stage", "mnist"): {**_STAGES, "epochs": 20, "shift": 2},
        ("Stage", "fashion-mnist"): {**_STAGES, "epochs": 30, "flips": True, "shift": 1},
        ("Stage", "cifar10"): {**_STAGES, "epochs": 30, "flips": True, "shift": 2},
        ("Stage", "shapes"): {**_STAGES, "epochs": 8, "batch_size": 64},
        ("Stage", PICTURES): {**_STAGES, "epochs": 30, "batch_size": 32, "shift": 2},
    }
}


def preset_options(
    name: str, network: str, dataset: str, preset: str | None = None
) -> dict[str, Any]:
    """Return the options of a preset for a network, its preset if it has one, and a data set.

    Examples:
        >>> preset_options("modern", "LeNetCL", "mnist")["optimizer"]
        'adamw'
        >>> preset_options("modern", "DkNetCL", "mnist")
        Traceback (most recent call last):
        ...
        conformallayers.errors.ConformalError: train --training-preset modern: expected one of LeNet, LeNetCL, BaseReLUNet, BaseReSProNet, StageNet, StageReLUNet, ResNet8, MLP on digits, mnist, fashion-mnist, cifar10, shapes, a folder of pictures, got DkNetCL on mnist. Leave --training-preset out and give the options.
    """
    require_choice("train --training-preset", name, PRESETS, "See docs/training.md.")
    table = PRESETS[name]
    family = next((key for key, names in FAMILIES.items() if network in names), "")
    kind = dataset if dataset in NAMES else PICTURES
    if (family, kind) not in table:
        from ... import networks  # which imports torch: the help of a command does without

        members = [name for names in FAMILIES.values() for name in names]
        known = [name for key, name in table if key == family or not family]
        names = network if family else f"one of {', '.join(members)}"
        expected = f"{names} on {', '.join(dict.fromkeys(known))}"
        suggestions = suggest(network, networks.__all__) + suggest(dataset, NAMES)
        remedy = f"Leave --training-preset out and give the options.{suggestions}"
        raise refusal(
            f"train --training-preset {name}", expected, f"{network} on {dataset}", remedy
        )
    conformal = _CONFORMAL_OPTIONS if network in CONFORMAL else {}
    return {**_COMMON, **conformal, **table[family, kind], **_DECAYS.get(preset, {})}


def resolved(options: Options) -> dict[str, Any]:
    """Fill in the options of the preset, if one is named; given options, not None, take precedence.

    Examples:
        >>> found = resolved(
        ...     {"network": "LeNetCL", "dataset": "mnist", "training_preset": "modern", "gain": 3.0}
        ... )
        >>> found["gain"], found["projective"]
        (3.0, True)
    """
    given = {name: value for name, value in options.items() if value is not None}
    if "training_preset" not in given:
        return dict(options)
    preset = given.get("preset")
    return {
        **preset_options(given["training_preset"], given["network"], given["dataset"], preset),
        **given,
    }
