"""cl.export_onnx: one file, any batch size, the numbers of torch; or one clear error and no file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from nets import NETS, SHAPE, folds, net
from oracle import randomise, relative_error
from support import samples

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
runtime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
LIMIT = 1e-5
BATCHES = 1, 4, 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.onnx"


def run(path: Path, x: Tensor) -> Tensor:
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["y"], {"x": x.numpy()})[0])


def check(folded: cl.Folded, path: Path) -> None:
    """Compare one file with torch: batch sizes, zero, NaN, infinity, sizes of numbers."""
    cl.export_onnx(folded, path)
    with torch.no_grad():
        for batch in BATCHES:
            x = samples(folded.input_shape, folded.dtype, batch, seed=7)
            assert relative_error(run(path, x), folded(x)) <= LIMIT
        for scale in (1e-12, 1e11):
            assert relative_error(run(path, scale * x[:9]), folded(scale * x[:9])) <= LIMIT
        odd = x[:5].clone()
        odd[0], odd[1].view(-1)[5], odd[2].view(-1)[5] = 0, float("nan"), float("inf")
        actual, expected = run(path, odd), folded(odd)
        assert relative_error(actual[[0, 3, 4]], expected[[0, 3, 4]]) <= LIMIT
        assert expected[1:3].isnan().all()
        assert actual[1:3].isnan().all()


# -- the same numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(NETS))
@pytest.mark.sampled(6)
def test_numbers_of_every_network_and_strategy(name: str, path: Path) -> None:
    for folded in folds(name, torch.float32):
        check(folded, path)


def test_heads_and_chunks_of_large_batches(path: Path) -> None:
    model = randomise(nn.Sequential(net("chain"), nn.Flatten(), nn.Linear(36, 4), nn.ReLU()))
    folded = cl.fold(model, SHAPE, strategy="dense")
    folded.chunk_size = 1  # a file must not keep the sizes it was made with
    check(folded, path)
    zero = run(path, torch.zeros(3, *SHAPE))
    assert torch.equal(zero, model[2].bias.detach().relu().expand(3, 4))
    operators = [node.op_type for node in onnx.load(path).graph.node]
    assert not set(operators) & {"If", "Loop", "Scan", "Split", "Shape", "DFT"}
    assert len(operators) <= 36
