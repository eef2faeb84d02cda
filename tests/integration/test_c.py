"""cl.export_c: programs of real folds compile without a warning and compute what torch computes."""

from __future__ import annotations

import subprocess
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.recipe import layer_operations as layer
from conformallayers.testing import relative_error
from nets import NETS, OFFSETS, SHAPE, features, net
from oracle import randomise
from programs import COMPILER, FLAGS, SANITIZED, check, compiled, hard, needs_compiler, run_program
from support import folds as all_folds

LIMIT = 512 * 1024


# -- the numbers --------------------------------------------------------------------------------


def geometries() -> Mapping[str, tuple[nn.Module, tuple[int, ...]]]:
    """Networks whose layers use every number of a convolution."""
    line = [cl.Conv1d(2, 4, 3, stride=2, padding=2, dilation=2), cl.ReSPro()]
    line += [cl.Conv1d(4, 6, 2, padding="same", groups=2), cl.ReSPro(), cl.AvgPool1d(2)]
    plane = [cl.Conv2d(2, 4, (3, 2), stride=(1, 2), padding=(2, 1)), cl.ReSPro()]
    plane += [cl.AvgPool2d(3, 2, padding=1), cl.Conv2d(4, 2, 2), cl.ReSPro()]
    block = [cl.Conv3d(1, 2, (2, 3, 2), padding=1), cl.ReSPro(projective=True)]
    block += [cl.AvgPool3d((1, 2, 2)), cl.Conv3d(2, 3, 2, dilation=(1, 2, 1)), cl.Gnomonic()]
    odd = [cl.AdaptiveAvgPool2d((4, 3)), cl.ReSPro(), nn.Upsample(scale_factor=2), cl.Scale(0.3)]
    odd += [cl.ReSPro(), nn.PixelShuffle(1), cl.AvgPool2d(3, ceil_mode=True), cl.ReSPro()]
    bare = [cl.ReSPro(2.0), cl.Flatten(), cl.ReSPro(0.5), cl.Linear(12, 3)]
    shapes = {"line": (2, 17), "plane": (2, 9, 8), "block": (1, 4, 7, 6), "odd": (2, 7, 7)}
    stacks = {"line": line, "plane": plane, "block": block, "odd": odd, "bare": bare}
    return {n: (cl.ConformalLayers(*s), shapes.get(n, (3, 4))) for n, s in stacks.items()}


@needs_compiler
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", [*NETS, *geometries()])
@pytest.mark.sampled(3)
def test_programs_compute_what_torch_computes(name: str, tmp_path: Path) -> None:
    if name in NETS:
        model, shape = net(name), SHAPE
    else:
        torch.manual_seed(0)
        model, shape = geometries()[name]
        randomise(model)
    exports, folds = [], all_folds(model, shape)
    for strategy, folded in folds.items():
        exports.append(cl.export_c(folded, tmp_path, name=f"by_{strategy}"))
    written_out = any(isinstance(op, layer.Matmul) for op in folds["dense"].recipe.operations)
    assert written_out == (name != "biases")  # a bias behind an activation keeps the layers
    for run, folded in zip(compiled(tmp_path, exports), folds.values(), strict=True):
        check(run(hard(shape)), folded, hard(shape), 1e-5)


@needs_compiler
def test_programs_step_beside_no_memory(tmp_path: Path) -> None:
    chosen = {
        "chain": ("dense", "conv"),
        "rules": ("dense",),
        "biases": ("dense",),
        "branches": ("dense",),
        "several": ("layers",),
        "unpadded": ("banded", "conv"),
    }
    exports, folds = [], []
    for name, strategies in chosen.items():
        for strategy in strategies:
            folded = cl.fold(net(name), SHAPE, strategy=strategy)
            exports.append(cl.export_c(folded, tmp_path, name=f"{name}_{strategy}"))
            folds.append(folded)
    inputs = [hard(SHAPE)] * len(folds)
    found = run_program(tmp_path, exports, inputs, [str(COMPILER), *FLAGS, *SANITIZED])
    for actual, folded in zip(found, folds, strict=True):
        check(actual, folded, hard(SHAPE), 1e-5)


@needs_compiler
def test_deep_networks_stay_in_range(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stages = [m for _ in range(60) for m in (cl.Conv2d(2, 2, 3, padding=1), cl.ReSPro())]
    biased = [m for _ in range(4) for m in (cl.Conv2d(2, 2, 1, bias=True), cl.ReSPro())]
    exports, folds = [], []
    for name, layers in (("deep", stages), ("biased", biased)):
        folds.append(cl.fold(cl.ConformalLayers(*layers), SHAPE, strategy="dense"))
        exports.append(cl.export_c(folds[-1], tmp_path, name=name))
    for run, folded in zip(compiled(tmp_path, exports), folds, strict=True):
        check(run(hard(SHAPE)), folded, hard(SHAPE), 1e-5)


@needs_compiler
@pytest.mark.parametrize("strategy", ["dense", "conv"])
@pytest.mark.parametrize("offset", OFFSETS)
def test_a_mean_image_is_subtracted(offset: str, strategy: str, tmp_path: Path) -> None:
    head = nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3)
    model = nn.Sequential(OFFSETS[offset](), randomise(features()) or features(), *head)
    folded = cl.fold(model, SHAPE, strategy=strategy)
    run = compiled(tmp_path, [cl.export_c(folded, tmp_path)])[0]
    x = hard(SHAPE)
    x = x[(x.flatten(1).abs().amax(1) > 1e-2) | x.isnan().flatten(1).any(1)]
    check(run(x), folded, x, 1e-5)
    zero = torch.zeros(1, *SHAPE)
    assert relative_error(run(zero)[1], model.eval()(zero).detach()) < 1e-5


@needs_compiler
def test_the_network_of_the_recipe(tmp_path: Path) -> None:
    torch.manual_seed(0)
    centre = cl.Centre((3, 32, 32))
    centre.mean.copy_(torch.rand(3, 32, 32))
    network = cl.networks.LeNetCL(alpha="spectral", projective=True, gain=100.0)
    model = nn.Sequential(OrderedDict(centre=centre, network=network))
    model(torch.rand(2, 3, 32, 32))
    folded = cl.fold(model, (3, 32, 32), strategy="conv")
    export, x = cl.export_c(folded, tmp_path), torch.rand(4, 3, 32, 32)
    check(compiled(tmp_path, [export])[0](x), folded, x, 1e-5)
    assert export.constant_bytes < LIMIT


# -- int8 and tolerances ------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("strategy", ["auto", pytest.param("dense", marks=pytest.mark.slow)])
def test_a_28_by_28_model_takes_at_most_512_kib_or_a_triangle(
    strategy: str, tmp_path: Path
) -> None:
    """Convolutions fit; a form over 784 pixels written out takes the triangle of its factor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ZeroPad2d(2), cl.RepeatChannels(3), cl.networks.LeNetCL()).eval()
    folded = cl.fold(model, (1, 28, 28), strategy=strategy)
    export = cl.export_c(folded, tmp_path)
    (run,) = compiled(tmp_path, [export])
    x = torch.rand(4, 1, 28, 28)
    command = [str(COMPILER), *FLAGS, "-c", export.source.name, "-o", "model.o"]
    subprocess.run(command, cwd=tmp_path, check=True)
    triangle = 4 * 784 * 785 // 2 if strategy == "dense" else 0
    assert export.constant_bytes + export.work_bytes < LIMIT + triangle
    assert (tmp_path / "model.o").stat().st_size < LIMIT + triangle
    assert relative_error(run(x)[1], folded(x)) < 1e-5
