"""Networks for images: the paper's, stage networks, their ReLU counterparts, and baselines."""

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
from .plain import MLP, DepthwiseNet, ResNet8
from .stages import StageNet, StageReLUNet

__all__ = [
    "IMAGE_SHAPE",
    "MLP",
    "BaseLinearNet",
    "BaseReLUNet",
    "BaseReSProNet",
    "D3ModNet",
    "D3ModNetCL",
    "DepthwiseNet",
    "DkNet",
    "DkNetCL",
    "LeNet",
    "LeNetCL",
    "ResNet8",
    "StageNet",
    "StageReLUNet",
]
