"""The base class: networks in a folder or on the Hub, which ``huggingface_hub``'s mixin rebuilds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from conformallayers import networks
from conformallayers.errors import ConformalError

hub = pytest.importorskip("huggingface_hub")
CASES: dict[str, Callable[[], nn.Module]] = {
    "BaseLinearNet": lambda: networks.BaseLinearNet(1, num_classes=7),
    "BaseReLUNet": lambda: networks.BaseReLUNet(hidden=5),
    "BaseReSProNet": lambda: networks.BaseReSProNet(
        1, 8, alpha=0.1 + 0.2, projective=True, gain=3.0, num_classes=4
    ),
    "LeNet": lambda: networks.LeNet(dropout=0.3, num_classes=3),
    "LeNetCL": lambda: networks.LeNetCL(alpha="learned", hidden=9, dropout=0.1, gain=2.0),
    "DkNet": lambda: networks.DkNet(2, hidden=4),
    "DkNetCL": lambda: networks.DkNetCL(2, 4, alpha="spectral", gain=0.1, num_classes=3),
    "D3ModNet": networks.D3ModNet,
    "D3ModNetCL": lambda: networks.D3ModNetCL(projective=True, gain=-1.0),
    "StageNet": lambda: networks.StageNet(
        "small", rectifier="max", signed=0.5, respro=False, offset=0.5, unit="norm"
    ),
    "StageReLUNet": lambda: networks.StageReLUNet(in_shape=(3, 32, 32), pool="max"),
    "MLP": lambda: networks.MLP(7, num_classes=3),
    "DepthwiseNet": networks.DepthwiseNet,
    "ResNet8": lambda: networks.ResNet8(num_classes=3),
}


def test_every_network_is_published() -> None:
    kinds = {name for name in networks.__all__ if isinstance(getattr(networks, name), type)}
    assert set(CASES) == kinds
    assert issubclass(networks.LeNetCL, hub.PyTorchModelHubMixin)


@pytest.mark.parametrize("name", CASES)
def test_networks_come_back_to_the_bit(name: str, tmp_path: Path) -> None:
    network = CASES[name]()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)
    network.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("README.md", "config.json", "model.safetensors")
    }
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert all(config[key] == json.loads(json.dumps(v)) for key, v in network.arguments.items())
    loaded = type(network).from_pretrained(tmp_path)
    assert type(loaded) is type(network)
    assert not loaded.training
    assert loaded.arguments == network.arguments
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(x), network.eval()(x))


def test_the_card_names_the_library(tmp_path: Path) -> None:
    networks.LeNetCL().save_pretrained(tmp_path)
    card = hub.ModelCard.load(tmp_path / "README.md")
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "conformallayers")
    assert card.data.pipeline_tag == "image-classification"
    assert {"geometric-algebra", "pytorch_model_hub_mixin"} <= set(card.data.tags)
    assert "https://github.com/conformallayers/conformallayers" in card.text


def test_without_the_extra_it_is_named() -> None:
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from conformallayers.networks import MLP\n"
        "from conformallayers import MissingExtra\n"
        "net = MLP()\n"
        "for use in (net.save_pretrained, net.push_to_hub, MLP.from_pretrained):\n"
        "    try: use('folder')\n"
        "    except MissingExtra as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("conformallayers[hub]") == 3


def test_unknown_options_are_named() -> None:
    with pytest.raises(ConformalError, match=r"got 'classes'\. .* Did you mean \"num_classes\"\?"):
        networks.StageNet("micro", classes=3)
