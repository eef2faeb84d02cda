"""Networks for images: those of the paper and networks of stages, each beside its ReLU counterpart."""

from .base import IMAGE_SHAPE
from .paper import (
    BaseLinearNet,
    BaseReLUNet,
    BaseReSProNet,
    D3ModNet,
    D3ModNetCL,
    DkNet,
    DkNetCL,
    LeNet,
    LeNetCL,
)
from .stages import StageNet, StageReLUNet

__all__ = [
    "IMAGE_SHAPE",
    "BaseLinearNet",
    "BaseReLUNet",
    "BaseReSProNet",
    "D3ModNet",
    "D3ModNetCL",
    "DkNet",
    "DkNetCL",
    "LeNet",
    "LeNetCL",
    "StageNet",
    "StageReLUNet",
]
