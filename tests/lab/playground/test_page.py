"""The playground as a file: one page, within its limit, that holds what torch computed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.lab.data.batches import as_input
from conformallayers.lab.data.datasets import load
from conformallayers.lab.playground import page as playground
from conformallayers.lab.playground.page import network_entry, write_playground
from node import needs_node, outputs
from oracle import exact, exact_output, relative_error
from support import assert_says, run_command

HOSTILE = "</script><b>@RUNTIME@"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "new" / "playground.html"
    assert run_command("playground", "--out", out) == 0
    assert out.stat().st_size < 3 * 10**6
    return out.read_text("utf-8")


def fold_file(folder: Path, shape: tuple[int, ...], outputs: int, **notes: object) -> Path:
    torch.manual_seed(0)
    features = cl.ConformalLayers(cl.Flatten(), cl.Linear(int(np.prod(shape)), 4), cl.ReSPro())
    model = nn.Sequential(features, nn.Linear(4, outputs))
    path = folder / "net.safetensors"
    cl.save(cl.fold(model, shape, strategy="dense"), path, **notes)
    return path


def data_of(text: str) -> dict[str, object]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return dict(json.loads(found))


def test_one_page_without_anything_from_outside(written: str) -> None:
    assert not re.search(r'(src|href)="(?!#|data:)', written)
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", written)
    assert "default-src 'none'" in written
    assert not re.search(r"@(STYLE|DATA|RUNTIME|SCRIPTS)@", written)
    data = data_of(written)
    assert set(data) == {"version", "networks", "examples", "graph", "depth", "insight"}
    assert [entry["name"] for entry in data["networks"]] == ["mnist-micro"]


def test_names_and_labels_cannot_leave_their_place(tmp_path: Path) -> None:
    path = fold_file(tmp_path, (1, 4, 4), 2, labels=[HOSTILE, "b"])
    text = write_playground(tmp_path / "page.html", [path]).read_text("utf-8")
    assert HOSTILE not in text
    (entry,) = data_of(text)["networks"]
    assert entry["labels"] == [HOSTILE, "b"]


def test_networks_say_how_their_images_look(tmp_path: Path) -> None:
    about = {"dataset": "digits", "white": 16}
    path = fold_file(tmp_path, (3, 4, 4), 2, about=about)
    found = network_entry(path)
    shown = {"name": "net", "labels": ["0", "1"], "white": 16.0, "fit": (1.0, "box")}
    assert {**found, **shown} == found
    bare = network_entry(fold_file(tmp_path, (3, 4, 4), 2))
    assert (bare["white"], bare["fit"]) == (1.0, None)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    flat = fold_file(tmp_path, (16,), 2)
    assert_says(lambda: write_playground(out, [flat]), "images (1 or 3, H, W)", "(16,) → (2,)")
    assert_says(lambda: write_playground(out, ["digits-mikro"]), "playground digits-mikro")
    assert not out.exists()


# -- demonstrations, against torch --


def test_rows_of_the_matrix_and_the_form_give_what_the_layers_give() -> None:
    """Compare y = M x / (‖x‖ + xᵀQx) + bias with the layers in float64."""
    found = playground.insight()
    model = playground.trained_network()
    images = np.array(found["eigenimages"])
    assert np.allclose(images @ images.T, np.eye(len(images)), atol=1e-3)
    assert found["eigenvalues"] == sorted(found["eigenvalues"], reverse=True)
    x = as_input(load("digits").test_images[:50], shape=(1, 8, 8))
    (part,) = cl.inspect(model, (1, 8, 8)).parts
    matrix, form = part.templates.flatten(1).numpy(), part.forms[0].matrix.numpy()
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
    data = load("digits")
    with torch.no_grad():
        best = playground.trained_network()(data.test_images / 255).argmax(1)
    assert float((best == data.test_labels).double().mean()) > 0.93


@needs_node
def test_stacks_give_the_scores_of_their_layers_at_every_depth(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = [playground.stack(depth) for depth in playground.DEPTHS]
    before = torch.random.get_rng_state()
    documents = playground.depth_documents()
    assert torch.equal(torch.random.get_rng_state(), before)
    x = load("digits").test_images[:4] / 255
    for kind in ("layers", "folded"):
        found = outputs(tmp_path, [(entry[kind], x) for entry in documents])
        for y, model in zip(found, models, strict=True):
            assert relative_error(y, exact_output(model, x)) < 5e-6


def test_graph_is_drawn_before_and_after_its_fold() -> None:
    found = playground.folded_graph()
    labels = {when: [node["label"] for node in found[when]] for when in ("before", "after")}
    assert labels["after"] == ["input", "conv 3×3", "relu", "conv 3×3", "relu"]
    kinds = [label.partition(" ")[0] for label in labels["before"]]
    assert [kinds.count(kind) for kind in ("Conv2d", "BatchNorm2d", "Join")] == [4, 4, 1]
    for when, nodes in labels.items():
        seen: set[str] = set()
        for node in found[when]:  # in the order in which they run
            assert set(node["reads"]) <= seen
            seen.add(node["name"])
        assert len(seen) == len(nodes)
    assert found["multiply_adds"][1] == 64 * 9 * 64 + 36 * 9 * 64


def test_examples_are_one_test_image_of_each_digit() -> None:
    data, found = load("digits"), playground.examples()
    assert [example["label"] for example in found] == list("0123456789")
    stored = (data.test_images.flatten(1) / 255 * 16).round().int().tolist()
    for example in found:
        row = stored.index(example["pixels"])
        assert int(data.test_labels[row]) == int(example["label"])
