"""The plain networks: their sizes, and that they learn."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import conformallayers as cl


def multiply_adds(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.rand(1, *cl.networks.IMAGE_SHAPE))
    return int(counter.get_total_flops()) // 2


def test_resnet8_is_that_of_mlperf_tiny() -> None:
    model = cl.networks.ResNet8()
    assert multiply_adds(model) == 12_501_632
    weights = sum(parameter.numel() for parameter in model.parameters())
    statistics = sum(b.numel() for name, b in model.named_buffers() if "running" in name)
    assert (weights, weights + statistics) == (78_186, 78_666)  # Keras counts both


def test_mlp_costs_as_much_as_lenet() -> None:
    assert multiply_adds(cl.networks.MLP()) == 3072 * 200 + 200 * 10
    assert multiply_adds(cl.networks.LeNet()) == 651_720
