"""Networks for images: those of the paper, each beside its ReLU counterpart."""

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
]
