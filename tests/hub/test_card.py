"""Model cards: metadata for the Hub, facts for a reader, and code that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import conformallayers as cl
from conformallayers import networks
from conformallayers.hub import model_card

hub = pytest.importorskip("huggingface_hub")

SHAPE = (3, 32, 32)


def test_the_card_says_what_a_reader_asks(tmp_path: Path) -> None:
    network = networks.LeNetCL(alpha="spectral")
    row = {"network": "LeNetCL", "dataset": "cifar10", "accuracy": 0.5028, "epochs": 200}
    network.save_pretrained(tmp_path, model_card_kwargs={**row, "samples": {"train": 5}})
    card = hub.ModelCard.load(tmp_path / "README.md")
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "conformallayers")
    assert {"conformallayers", "pytorch_model_hub_mixin"} <= set(card.data.tags)
    (result,) = card.data.eval_results
    assert (result.dataset_type, result.metric_value) == ("uoft-cs/cifar10", 0.5028)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    said = [
        *("10.1016/j.patrec.2022.11.002", "LeNetCL.from_pretrained(", "cl.fold(net, (3, 32, 32))"),
        *(f"{parameters:,}", "linear in the input", "50.28 %", "| epochs | 200 |", "'spectral'"),
    ]
    for words in said:
        assert words in card.text
    assert "samples" not in card.text
    network.save_pretrained(tmp_path, model_card_kwargs={"dataset": "mnist"})
    assert hub.ModelCard.load(tmp_path / "README.md").text == card.text  # a card may be edited


def test_the_code_of_a_card_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    networks.LeNetCL().save_pretrained(tmp_path)
    folded = cl.fold(networks.LeNetCL(), SHAPE)
    (tmp_path / "folded").mkdir()
    cl.save(folded, tmp_path / "folded" / "model.safetensors")
    cards = {
        ".": (tmp_path / "README.md").read_text(),
        "folded": str(model_card(folded)),
        "plain": str(model_card(networks.LeNet())),
    }
    networks.LeNet().save_pretrained("plain")
    for folder, card in cards.items():
        code = card.split("```python\n")[1].split("```")[0]
        code = code.replace("FOLDER or USER/REPOSITORY", f"./{folder}").replace("FOLDER", folder)
        names: dict[str, Any] = {}
        exec(code, names)
        assert names["scores"].shape == (8, 10)
    assert "does not fold" in cards["plain"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"network": "DkNetCL"}, "expected a row of LeNetCL, got 'DkNetCL'"),
        ({"accuracy": 0.9}, "got no data set with it"),
        ({"dataset": "mnist", "accuracy": 98.6}, "a number from 0 to 1 and its data set, got 98.6"),
        ({"dataset": "mnist", "accuracy": "high"}, "got 'high'"),
    ],
)
def test_a_wrong_row_is_refused(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        networks.LeNetCL().save_pretrained(tmp_path / "new", model_card_kwargs=row)


def test_names_stay_within_their_cells_and_dtypes_are_written() -> None:
    model = cl.ConformalLayers(cl.Linear(4, 2, dtype=torch.float64), cl.ReSPro())
    row = {"dataset": "mine | <b>\nyours", "command": "a | b"}
    card = model_card(cl.fold(model, (4,)), network="Own", accuracy=0.5, **row)
    assert card.data.model_name == "Own Folded"
    assert card.data.eval_results[0].dataset_name == row["dataset"]
    for words in ("| Data set | mine \\| <b> yours |", "| command | `a \\| b` |", "# Own Folded"):
        assert words in card.text
    assert "torch.rand(8, 4, dtype=torch.float64)" in card.text
    assert "3×32×32" not in card.text
