"""Graphs: how they print."""

from __future__ import annotations

import pytest
from torch import nn

import conformallayers as cl
from conformallayers.graph.capture import capture

pytestmark = pytest.mark.usefixtures("seeded")


def test_a_graph_prints_its_nodes() -> None:
    part = cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.Residual(cl.Conv2d(2, 2, 1), nn.ReLU()))
    graph = capture(nn.Sequential(part, nn.Flatten(), nn.Linear(72, 3)), (1, 8, 8))
    assert [node.kind for node in graph.nodes] == [
        *("embed", "affine", "affine", "affine", "homogeneous", "join", "leave"),
        *("affine", "affine"),
    ]
    assert [node.name for node in graph.nodes][:6] == [
        *("0", "0.0", "0.1.shortcut", "0.1.body.0", "0.1.body.1", "0.1"),
    ]
    assert "0.1           join" in str(graph)
    assert (graph.parts[0].embed, graph.parts[0].leave) == (0, 6)
