"""Functions and methods as modules: each computes what the call does."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import conformallayers as cl
from conformallayers.nn.functions import Batch, call_text, modules_of

CALLS = [
    lambda x: F.relu(x),
    lambda x: x.abs(),
    lambda x: F.leaky_relu(x, 0.3),
    lambda x: x.clamp(0, 6),
    lambda x: x.clamp_min(0),
    lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"),
    lambda x: F.pad(x, (0, 1, 2, 0)),
    lambda x: F.max_pool2d(x, 2, 1),
    lambda x: F.avg_pool2d(x, (2, 1), padding=(1, 0)),
    lambda x: F.lp_pool2d(x, 2, 2),
    lambda x: F.interpolate(x, scale_factor=2.0),
    lambda x: F.dropout(x, 0.5, False),
    lambda x: torch.softmax(x, 1),
    lambda x: x - 1.5,
    lambda x: 2 - x,
    lambda x: x / 4,
    lambda x: -x,
    lambda x: x[:, 1:3],
    lambda x: x.flatten(1),
    lambda x: x.reshape(-1, 2, 2, 6, 5),
    lambda x: x.permute(0, 2, 3, 1),
    lambda x: x.transpose(-1, 1),
    lambda x: x.mean((2, 3)),
    lambda x: x.amax(3, keepdim=True),
]
KEPT = [lambda x: x.mean(0), lambda x: x.clamp(-1, 1), lambda x: 1 / x, lambda x: x[:, ::2]]


def graph_of(call: object, shape: tuple[int, ...]) -> tuple[fx.Node, dict[fx.Node, object]]:
    """Return the last call of a function, and what is known of its nodes."""
    nodes = list(fx.symbolic_trace(call).graph.nodes)  # type: ignore[arg-type]
    result = call(torch.zeros(3, *shape))  # type: ignore[operator]
    return nodes[-2], {nodes[0]: Batch(shape), nodes[-2]: Batch(tuple(result.shape[1:]))}


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_modules_compute_what_the_call_does(call: object) -> None:
    node, values = graph_of(call, (4, 6, 5))
    x = torch.randn(3, 4, 6, 5, dtype=torch.float64)
    chain = modules_of(node, values)
    assert chain is not None, call_text(node)
    results = list[torch.Tensor]()
    for module, (source,) in chain:
        results.append(module.eval()(results[source] if isinstance(source, int) else x))
    torch.testing.assert_close(results[-1], call(x))  # type: ignore[operator]


@pytest.mark.parametrize("call", KEPT, ids=range(len(KEPT)))
def test_other_calls_have_no_modules(call: object) -> None:
    assert modules_of(*graph_of(call, (4, 6, 5))) is None


class Rectified(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = cl.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        y = nn.functional.relu(self.conv(x)) + abs(x) + x.relu() + torch.abs(torch.relu(x))
        return nn.functional.max_pool2d(0 + y * 2 - x, 2)


def test_functions_that_are_homogeneous_maps():
    x = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    block = Rectified().double()
    model = cl.ConformalLayers(cl.Traced(block))
    y = block(x) / x.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    for mode in (True, False):
        assert torch.allclose(model.train(mode)(x), y, rtol=1e-12)
