"""The options of a training run, validated before anything is read or written.

Only their values need torch, not their names, so that the command line can print its help at once.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from ...errors import ConformalError, first_line, refusal, shape_text
from ...utils.text import suggest
from ..checks import command_line, flag
from ..data.catalogue import CLASSES, LABELS, NAMES
from .own_networks import build_own, find_network, is_own

if TYPE_CHECKING:
    import torch

FAMILIES = {
    "LeNet": ("LeNet", "LeNetCL"),
    "Base": ("BaseReLUNet", "BaseReSProNet"),
    "Stage": ("StageNet", "StageReLUNet", "ResNet8", "DepthwiseNet", "MLP"),
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
_DECAYS: dict[str | None, Mapping[str, Any]] = {
    "base": {"weight_decay": 0.1},
    "compact": {"weight_decay": 0.06},
    "large": {"weight_decay": 0.1},
}
# With --expand; large presets take _STAGES. Factors of a kernel that move together move it further, unless a
# BatchNorm removes its scale.
_EXPANDED: dict[str, Mapping[str, Any]] = {
    "Stage": {"weight_decay": 0.06},
    "conformal": {"learning_rate": 5e-3},
}
_CONFORMAL_OPTIONS = {"projective": True, "alpha": "spectral", "gain": 100.0}

# Chosen by validation accuracy; docs/training.md gives the reason for each option.
PRESETS: dict[tuple[str, str], Mapping[str, Any]] = {
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
    ("Stage", "cifar10"): {
        **_STAGES,
        "learning_rate": 1e-2,
        "epochs": 30,
        "flips": True,
        "shift": 2,
    },
    ("Stage", PICTURES): {**_STAGES, "epochs": 30, "batch_size": 32, "shift": 2},
}
NETWORK_OPTIONS = (
    *("preset", "depth", "hidden", "pool_stride", "alpha", "projective", "gain", "dropout"),
    *("rectifier", "respro", "offset", "pool", "width"),
)
_REQUIRED = ("network", "dataset")
# Set by train, not by the user.
DERIVED = ("classes", "labels", "in_shape", "pictures", "source")
_OFF_AT_ZERO = ("hidden", "gain", "dropout")  # 0 turns off what a preset has turned on
_IMAGE_SHAPE = (3, 32, 32)  # networks.IMAGE_SHAPE, without the import of torch
_NONE = "none"  # an offset of None, where not given means the network's default


class TrainConfig(BaseModel):
    """The options of a run; stored in its folder, and compared when it is resumed.

    The fields in ``DERIVED`` are set by :func:`conformallayers.lab.training.train.train`: ``classes``, the number
    of outputs, ``labels`` and ``in_shape`` (None: 3×32×32) follow from the data set, ``pictures`` is the digest
    of a folder of pictures, ``source`` is the hash of the file of the network.

    Args:
        network, dataset: as in :func:`conformallayers.lab.training.train.train`.
        size: Height and width to which pictures of a folder are scaled, N or HxW; 32 if not
            given. Networks of other input than 32 are StageNet, StageReLUNet and your own.
        preset: Size of StageNet and StageReLUNet: nano, micro (if not given), small,
            base, compact or large.
        depth: Number of convolutions of DkNet and DkNetCL.
        training_preset: modern: defaults of other options by network and data set (docs/training.md).
        hidden: Width of an additional layer in the head, linear in DkNet and DkNetCL, with
            ReLU in BaseReLUNet and BaseReSProNet; 0 for none. In LeNet and LeNetCL, width of the
            first layer of the head; 0 for the paper's 120.
        pool_stride: Stride of the pooling in the Base networks; 2 if not given.
        alpha: young (the paper's), spectral, learned or a number; for conformal networks.
        projective: Use the projective form of ReSPro.
        gain: Initial value of a learned factor after the conformal part; 0 for none.
        dropout: Dropout probability in the head of LeNet and LeNetCL.
        rectifier: Pooling of StageNet: norm (if not given), relu, abs or max.
        respro: Whether the stages of StageNet have a ReSPro; they have one if not given.
        offset: Of the embedding of StageNet: learned (if not given), none or a number.
        pool: Pooling of StageReLUNet: average (if not given), max or norm.
        width: Factor of the channels of StageReLUNet.
        expand: Train each convolution as a sum of chains and branches (docs/expand.md); the
            deployed network is the same.
        flips: Mirror a random half of the training images in every epoch.
        shift: Shift the training images by up to this many pixels of the network's input.
        centre: Subtract the mean training image from every image.
        optimizer: adam if not given.
        learning_rate: Learning rate, or its largest value by schedule; 0.001 if not given.
        batch_size: Batch size over all processes; 256 if not given.
        epochs: Passes over the training images; 10 if not given.
        weight_decay: Weight decay of the optimizer.
        schedule: Schedule of the learning rate; constant if not given.
        validation: Training images to hold out, as a fraction below 1 or a count.
        seed: Seed of the weights and the order of the images.
        threads: Threads of torch; its own default if not given.
        device: Device to train on; cpu if not given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    network: str
    dataset: str
    preset: str | None = None
    depth: int | None = Field(default=None, gt=0)
    training_preset: Literal["modern"] | None = None
    hidden: int | None = Field(default=None, ge=0)
    pool_stride: int | None = Field(default=None, gt=0)
    alpha: str | float | None = None
    projective: bool = False
    gain: float | None = Field(default=None, ge=0)
    dropout: float | None = Field(default=None, ge=0, lt=1)
    rectifier: str | None = None
    respro: bool | None = None
    offset: str | float | None = None
    pool: str | None = None
    width: float | None = Field(default=None, gt=0)
    expand: bool = False
    flips: bool = False
    shift: int = Field(default=0, ge=0, le=16)
    centre: bool = False
    optimizer: Literal["adam", "adamw", "rmsprop"] = "adam"
    learning_rate: PositiveFloat = 1e-3
    batch_size: PositiveInt = 256
    epochs: PositiveInt = 10
    weight_decay: NonNegativeFloat = 0.0
    schedule: Literal["constant", "one-cycle"] = "constant"
    validation: NonNegativeFloat = 0.0
    seed: int = Field(default=0, ge=0, lt=2**63)
    threads: int | None = Field(default=None, gt=0)
    device: str = "cpu"
    size: str | None = None
    classes: PositiveInt = CLASSES
    labels: list[str] | None = None
    in_shape: list[PositiveInt] | None = None
    pictures: str | None = None
    source: str | None = None

    @field_validator("alpha", "offset", mode="before")
    @classmethod
    def _parse_number(cls, value: Any) -> Any:
        try:
            return float(value)
        except (TypeError, ValueError):
            return value

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        import torch

        try:
            torch.empty(1, device=value)
        except (RuntimeError, AssertionError) as error:
            got = f"{value!r} ({first_line(error)})"
            raise _refused("device", "a device of this machine", got) from error
        return value

    @model_validator(mode="after")
    def _check_network_options(self) -> TrainConfig:
        accepted = inspect.signature(find_network(self.network, self.source)).parameters
        for option in NETWORK_OPTIONS:
            value = getattr(self, option)
            if option not in accepted and value not in (None, DEFAULTS[option]):
                raise _refused(option, "a network with this option", self.network)
        takes_any = is_own(self.network) or "in_shape" in accepted
        if not takes_any and self.input_shape != _IMAGE_SHAPE:
            expected = f"images of {shape_text(_IMAGE_SHAPE)} for {self.network}"
            suggestion = " StageNet takes other sizes."
            raise _refused("size", expected, shape_text(self.input_shape), suggestion)
        if self.network in ("DkNet", "DkNetCL") and self.depth is None:
            raise _refused("depth", f"the number of convolutions of {self.network}", "none")
        return self

    def build(self) -> torch.nn.Module:
        """Return the network with random weights, after a Centre if ``centre`` is set."""
        import torch

        from ...nn.layers import Centre

        network, own = find_network(self.network, self.source), is_own(self.network)
        accepted = inspect.signature(network).parameters
        chosen = {name: getattr(self, name) for name in NETWORK_OPTIONS if name in accepted}
        given = {
            key: None if value == _NONE else value
            for key, value in chosen.items()
            if value is not None and (value or key not in _OFF_AT_ZERO)
        }
        derived = {"num_classes": self.classes, "in_shape": self.input_shape}
        given |= {key: value for key, value in derived.items() if key in accepted}
        module = build_own(self.network, network, given) if own else network(**given)
        if self.expand:
            module = self.expanded(module)
        if self.centre:
            return torch.nn.Sequential(OrderedDict(centre=Centre(self.input_shape), network=module))
        return module

    def expanded(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the network as it trains with ``expand``: normalized, unless it has a BatchNorm."""
        from torch.nn.modules.batchnorm import _BatchNorm

        from ...expansion import expand

        return expand(module, norm=not any(isinstance(m, _BatchNorm) for m in module.modules()))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one image as the network takes it."""
        return tuple(self.in_shape or _IMAGE_SHAPE)

    @property
    def network_name(self) -> str:
        """The network without the path of its file."""
        return self.network.rpartition(":")[2]

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """A name for each class; None if they have none, as of an own data set under a known name."""
        names = tuple(self.labels or LABELS.get(self.dataset, ()))
        return names if len(names) == self.classes else None

    @property
    def dataset_name(self) -> str:
        """The data set without the path of its folder."""
        return Path(self.dataset).name if self.pictures else self.dataset

    def command(self, extra: Mapping[str, Any]) -> str:
        """Return the command line of the run; ``extra`` has options that do not change its result."""
        usual = dict(DEFAULTS)
        if self.training_preset:
            usual |= preset_options(self.network, self.dataset, self.preset, self.expand)
        options = self.model_dump(exclude={*_REQUIRED, *DERIVED})
        given = {
            f"no_{key}" if value is False else key: value is False or value
            for key, value in options.items()
            if value not in (None, usual[key])
        }
        return command_line(["train", self.network, self.dataset], {**given, **extra})

    @property
    def folder(self) -> Path:
        """The default folder of the run."""
        preset = f"-{self.preset}" if self.preset else ""
        depth = f"-depth{self.depth}" if self.depth else ""
        expanded = "-expanded" if self.expand else ""
        name = f"{self.network_name}{preset}{depth}{expanded}-{self.dataset_name}-seed{self.seed}"
        return Path("runs") / name


DEFAULTS = {
    name: field.default for name, field in TrainConfig.model_fields.items() if name not in _REQUIRED
}


def make_config(**options: Any) -> TrainConfig:
    """Validate the options of a run; the first wrong one raises an error of one line."""
    import torch

    try:
        config = TrainConfig(**options)
        # Modules validate their own options, such as alpha. Code of the user may need numbers.
        device = "cpu" if is_own(config.network) else "meta"
        with torch.random.fork_rng(devices=[]), torch.device(device):
            config.build()
    except ValidationError as error:
        raise _one_line(error) from None
    return config


def _one_line(error: ValidationError) -> ConformalError:
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConformalError):
        return cause
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        known = [name for name in DEFAULTS if name not in DERIVED]
        return _refused(name, "an option of train", "another", suggest(name, known))
    # Such as: a valid integer, got a number with a fraction; greater than 0; 'adam' or 'adamw'.
    expected = first["msg"].removeprefix("Input should be ").partition(", got")[0]
    if not expected.startswith(("a ", "'")):
        expected = f"a value {expected}"
    return _refused(name, expected, repr(first["input"]))


def _refused(option: str, expected: str, got: str, suggestion: str = "") -> ConformalError:
    where = f"train {flag(option)}"
    return refusal(where, expected, got, f"See conformallayers train --help.{suggestion}")


def preset_options(
    network: str, dataset: str, preset: str | None = None, expand: bool = False
) -> dict[str, Any]:
    """Return the options of the training preset for a network, its preset if it has one, and a data set."""
    other = "Stage" if is_own(network) else ""
    family = next((key for key, names in FAMILIES.items() if network in names), other)
    kind = dataset if dataset in NAMES else PICTURES
    if (family, kind) not in PRESETS:
        remedy = f"Leave --training-preset out and give the options.{suggest(dataset, NAMES)}"
        expected, got = "a network and a data set of docs/training.md", f"{network} on {dataset}"
        raise refusal("train --training-preset", expected, got, remedy)
    conformal = _CONFORMAL_OPTIONS if network in CONFORMAL else {}
    key = "conformal" if network in CONFORMAL else family
    factors = _STAGES if preset in _DECAYS else _EXPANDED.get(key, {})
    own = {**PRESETS[family, kind], **(factors if expand else {}), **_DECAYS.get(preset, {})}
    return {**_COMMON, **conformal, **own}


def resolved(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the options of the training preset, if it is named; given options, not None, take precedence."""
    given = {name: value for name, value in options.items() if value is not None}
    if "training_preset" not in given:
        return dict(options)
    names = given["network"], given["dataset"], given.get("preset")
    return {**preset_options(*names, expand=bool(given.get("expand"))), **given}
