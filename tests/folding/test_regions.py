"""What explain() says of regions, and their costs."""

from __future__ import annotations

from torch import nn

import blocks
import conformallayers as cl
from support import count


def test_never_more_multiply_adds() -> None:
    """A 1×1 convolution to many channels behind a depthwise one stays apart: together they are dense."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 64, 1))
    assert count(cl.fold(model, (8, 12, 12)), "conv") == 2


def test_explain_has_a_line_for_each_region() -> None:
    layers = blocks.RepVGG(4, 4), nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    folded = cl.fold(blocks.randomised(nn.Sequential(*layers)), (4, 12, 12))
    first, second = folded.explain().regions
    assert sorted(set(first.before)) == ["add", "add_constant", "conv", "multiply"]
    assert (first.after, second.after) == (("conv",), ("conv", "conv"))
    assert first.cost_before.work == (4 * 4 * 10 + 4 * 2 * 3 + 4 * 2) * 144
    assert first.cost_after == (4 * 4 * 9 * 144, 4 * 4 * 9 + 4, 0)
    assert second.cost_before == second.cost_after
    lines = str(folded.explain()).splitlines()
    assert lines[2].startswith("3 multiply, 3 add_constant, 2 conv, 2 add → conv")
    assert lines[3].endswith("a padded window after another window: the border would differ")
    assert lines[4].startswith("2 regions: ")
    assert lines[5] == "Takes other spatial sizes as well, if the model does."
    assert (len(lines), folded.strategy) == (6, "merged")
