"""Use a linear module of your own inside a ConformalLayers: write it, check it, register it."""

import torch
from torch import Tensor, nn

import conformallayers as cl


class Smooth(nn.Module):
    """Blur every channel with a fixed 3×3 kernel whose entries add up to 1."""

    kernel: Tensor

    def __init__(self) -> None:
        super().__init__()
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("kernel", torch.outer(row, row).view(1, 1, 3, 3))

    def forward(self, input: Tensor) -> Tensor:  # (B, C, H, W) → (B, C, H, W)
        channels = input.shape[1]
        kernel = self.kernel.expand(channels, 1, 3, 3)
        return nn.functional.conv2d(input, kernel, padding=1, groups=channels)


# 1. Linear, no bias, each sample by itself? This raises if not.
cl.testing.assert_linear(Smooth(), (3, 8, 8))

# 2. An upper bound of its operator norm: non-negative weights that add up to 1 never add energy.
cl.register_linear(Smooth, bound=lambda module, shape: 1.0, rank=4)

# 3. It trains, traces and folds like any other layer.
model = cl.ConformalLayers(Smooth(), cl.Conv2d(3, 4, 3), cl.ReSPro(), Smooth(), cl.ReSPro())
cl.testing.assert_folds(model, (3, 8, 8))
print(cl.trace(model, (3, 8, 8)))
