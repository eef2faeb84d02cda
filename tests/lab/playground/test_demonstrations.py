"""The demonstrations of the playground against torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

import torch

import conformallayers as cl
from conformallayers.lab.data.datasets import digits
from conformallayers.lab.playground import demonstrations
from node import needs_node, outputs
from oracle import exact, exact_output, relative_error


def test_rows_of_the_matrix_and_the_form_give_what_the_layers_give() -> None:
    """Compare y = M x / (‖x‖ + xᵀQx) + bias with the layers in float64."""
    found = demonstrations.insight()
    model = demonstrations.trained_network()
    images = np.array(found["eigenimages"])
    assert np.allclose(images @ images.T, np.eye(len(images)), atol=1e-3)
    assert found["eigenvalues"] == sorted(found["eigenvalues"], reverse=True)
    x = digits().test_images[:50]
    folded = cl.fold(model, (1, 8, 8), strategy="dense")
    matrix, (form,) = folded.matrix().numpy(), folded.forms().numpy()
    assert np.allclose(found["templates"], matrix, rtol=1e-4)
    assert abs(found["trace"] - np.trace(form)) < 1e-6 * found["trace"]
    assert np.allclose(form @ images.T, images.T * found["eigenvalues"], atol=1e-3)
    rows = x.flatten(1).double().numpy()
    energies = np.einsum("bi,ij,bj->b", rows, form, rows)
    y = rows @ matrix.T / (np.linalg.norm(rows, axis=1) + energies)[:, None]
    bias = model[2].head.bias.detach().double()
    with torch.no_grad(), cl.layer_by_layer():
        expected = exact(model)(x.double())
    assert relative_error(torch.from_numpy(y) + bias, expected) < 1e-5


def test_the_network_that_comes_with_the_page_knows_digits() -> None:
    data = digits()
    with torch.no_grad():
        best = demonstrations.trained_network()(data.test_images).argmax(1)
    assert float((best == data.test_labels).double().mean()) > 0.93


@needs_node
def test_stacks_give_the_scores_of_their_layers_at_every_depth(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = [demonstrations.stack(depth) for depth in demonstrations.DEPTHS]
    before = torch.random.get_rng_state()
    documents = demonstrations.depth_documents()
    assert torch.equal(torch.random.get_rng_state(), before)
    x = digits().test_images[:4]
    for kind in ("layers", "folded"):
        found = outputs(tmp_path, [(entry[kind], x) for entry in documents])
        for y, model in zip(found, models, strict=True):
            assert relative_error(y, exact_output(model, x)) < 5e-6


def test_examples_are_one_test_image_of_each_digit() -> None:
    data, found = digits(), demonstrations.examples()
    assert [example["label"] for example in found] == list("0123456789")
    stored = (data.test_images.flatten(1) * 16).int().tolist()
    for example in found:
        row = stored.index(example["pixels"])
        assert int(data.test_labels[row]) == int(example["label"])
