"""Networks in a folder or on the Hub: they load as saved or are refused; pickles are never opened."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers import networks
from conformallayers.hub import config_of

hub = pytest.importorskip("huggingface_hub")

SHAPE = (3, 32, 32)
CASES: dict[str, Callable[[], nn.Module]] = {
    "BaseLinearNet": lambda: networks.BaseLinearNet(1, num_classes=7),
    "BaseReLUNet": lambda: networks.BaseReLUNet(hidden=5),
    "BaseReSProNet": lambda: networks.BaseReSProNet(
        1, 8, alpha=0.1 + 0.2, projective=True, gain=3.0, num_classes=4
    ),
    "LeNet": lambda: networks.LeNet(dropout=0.3, num_classes=3),
    "LeNetCL": lambda: networks.LeNetCL(alpha="learned", dtype=torch.float64),
    "LeNetCL dropout": lambda: networks.LeNetCL(hidden=9, dropout=0.1, gain=2.0),
    "LeNetCL bfloat16": lambda: networks.LeNetCL(dtype=torch.bfloat16),
    "DkNet": lambda: networks.DkNet(2, hidden=4),
    "DkNetCL": lambda: networks.DkNetCL(
        2, 4, alpha="spectral", gain=0.1, padding_mode="circular", num_classes=3
    ),
    "D3ModNet": networks.D3ModNet,
    "D3ModNetCL": lambda: networks.D3ModNetCL(projective=True, gain=-1.0),
    "StageNet": lambda: networks.StageNet(
        "small", depth=3, rectifier="max", signed=0.5, respro=False, offset=0.5, unit="norm"
    ),
    "StageReLUNet": lambda: networks.StageReLUNet(in_shape=[3, 32, 32], pool="max"),
    "MLP": lambda: networks.MLP(7, num_classes=3),
    "ResNet8": lambda: networks.ResNet8(num_classes=3),
}


class Wider(networks.LeNetCL):
    def __init__(self, width: int, *, num_classes: int = 10, **factory: Any) -> None:
        super().__init__(hidden=10 * width, num_classes=num_classes, **factory)


def inputs(network: nn.Module) -> torch.Tensor:
    return torch.rand(2, *SHAPE).to(next(network.parameters()).dtype)


@pytest.fixture
def lenet(tmp_path: Path) -> Path:
    networks.LeNetCL().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", list(CASES))
def test_networks_come_back(name: str, tmp_path: Path) -> None:
    network = CASES[name]()
    network(inputs(network))  # a spectral norm moves
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += torch.rand_like(parameter) / 10
    network.save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["README.md", "config.json", "model.safetensors"]
    state = torch.get_rng_state()
    again = type(network).from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(again) is type(network)
    assert repr(again) == repr(network)
    assert not again.training
    assert all(parameter.requires_grad for parameter in again.parameters())
    expected = network.state_dict()
    assert list(again.state_dict()) == list(expected)
    for key, tensor in again.state_dict().items():
        assert tensor.dtype == expected[key].dtype
        assert torch.equal(tensor, expected[key])
    x = inputs(network)
    with torch.no_grad():
        assert torch.equal(again(x), network.eval()(x))
    assert config_of(again) == config_of(network)


def test_every_argument_of_every_network_is_kept() -> None:
    kinds = [getattr(networks, name) for name in networks.__all__ if name != "IMAGE_SHAPE"]
    made = [make() for make in CASES.values()]
    assert {type(network) for network in made} == set(kinds)
    for network in made:
        named = {
            name
            for name, parameter in inspect.signature(type(network)).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        assert set(network.arguments) == named
        assert set(config_of(network)) == named | {"network", "dtype"}
        assert isinstance(network, hub.PyTorchModelHubMixin)


def test_a_subclass_keeps_its_own_arguments(tmp_path: Path) -> None:
    network = Wider(3, num_classes=4)
    network.note = "attributes of one's own are not the constructor's"
    assert config_of(network) == {
        "network": "Wider",
        "dtype": "float32",
        "width": 3,
        "num_classes": 4,
    }
    network.save_pretrained(tmp_path)
    again = Wider.from_pretrained(tmp_path)
    assert torch.equal(again.head[0].weight, network.head[0].weight)


def test_networks_copy_pickle_fold_and_save(tmp_path: Path) -> None:
    network = networks.DkNetCL(1, num_classes=3)
    names = {key.split(".")[0] for key in network.state_dict()}
    assert names == {"features", "head"}
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert config_of(other) == config_of(network)
    x = inputs(network)
    folded = cl.fold(network, SHAPE)  # by torch.fx
    assert torch.allclose(folded(x), network(x), rtol=1e-4, atol=1e-6)
    network.save_pretrained(tmp_path)
    cl.save(networks.DkNetCL.from_pretrained(tmp_path), tmp_path / "net.safetensors")


def test_a_network_of_a_file_is_published(tmp_path: Path) -> None:
    network = networks.DkNetCL(1, num_classes=3)
    x = inputs(network)
    cl.save(network, tmp_path / "net.safetensors")
    loaded: Any = cl.load(tmp_path / "net.safetensors")
    loaded.save_pretrained(tmp_path)
    assert torch.equal(networks.DkNetCL.from_pretrained(tmp_path)(x), network.eval()(x))


def test_a_dtype_can_be_asked_for(lenet: Path) -> None:
    wide = networks.LeNetCL.from_pretrained(lenet, dtype=torch.float64)
    narrow = networks.LeNetCL.from_pretrained(str(lenet), map_location="cpu")
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float64}
    assert torch.equal(wide.head[0].weight, narrow.head[0].weight.double())


def changed_head(network: Any) -> None:
    network.head[2] = nn.Linear(120, 84, bias=False)


def changed_activation(network: Any) -> None:
    network.features[1] = cl.ReSPro(3.0)


def hooked(network: Any) -> None:
    network.register_forward_hook(lambda module, inputs, output: output + 1)


def mixed(network: Any) -> None:
    network.head.double()


def slightly_changed(network: Any) -> None:
    network.features[1].alpha = 2 + 1e-9  # its repr rounds


@pytest.mark.parametrize(
    "change", [changed_head, changed_activation, slightly_changed, hooked, mixed]
)
def test_a_changed_network_is_refused(change: Callable[[Any], None], tmp_path: Path) -> None:
    network = networks.LeNetCL(alpha=2.0)
    change(network)
    with pytest.raises(cl.ConformalError, match=r"expected the layers that its constructor makes"):
        network.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_number_of_classes_is_kept(tmp_path: Path) -> None:
    network = networks.LeNetCL()
    network.head[4] = nn.Linear(84, 5)
    network.save_pretrained(tmp_path)
    assert networks.LeNetCL.from_pretrained(tmp_path).head[4].out_features == 5
    with pytest.raises(cl.ConformalError, match="it is read from the network"):
        network.save_pretrained(tmp_path, config={"num_classes": 10})


# -- damage -------------------------------------------------------------------------------------


def refused(folder: Path | str, message: str, kind: Any = networks.LeNetCL, **options: Any) -> None:
    with pytest.raises(cl.ConformalError, match=message) as caught:
        kind.from_pretrained(folder, **options)
    assert str(caught.value).startswith(f"{kind.__name__}.from_pretrained({folder})")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "runs/of/lenet"])
def test_a_name_that_is_no_repository_is_not_requested(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", None)
    refused(name, "expected a folder, got none")


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_a_pickle_is_never_opened(
    lenet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lenet / "model.safetensors").unlink()
    refused(lenet, r"weights in model\.safetensors, got none")
    monkeypatch.chdir(tmp_path)
    torch.save(Bomb(), lenet / "pytorch_model.bin")
    refused(lenet, r"got none\. .* pickles are never opened")
    shutil.copy(lenet / "pytorch_model.bin", lenet / "model.safetensors")
    refused(lenet, "a file that fails")
    assert not Path("exploded").exists()


def test_a_repository_with_a_pickle_alone_is_refused(
    lenet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(*arguments: Any, **options: Any) -> str:
        name = options.get("filename") or arguments[1]
        asked.append(name)
        if name == "config.json":
            return str(lenet / "config.json")
        raise hub.errors.EntryNotFoundError(f"no {name}")

    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", download)
    refused("someone/lenet", "got not both. .* pickles are never opened", revision="main")
    assert asked == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"network": "LeNet"}, "got one of LeNet. Use the class that it names"),
        ({"network": None}, "got none"),
        ({"network": ["LeNetCL"]}, "got none"),
        ({"depth": 3}, "expected arguments of LeNetCL, got depth=3"),
        ({"device": "cuda"}, "got device='cuda'"),
        ({"dtype": "int8"}, "got dtype='int8'"),
        ({"dtype": ["float32"]}, r"got dtype=\['float32'\]"),
        ({"dtype": "float64"}, "expected weights of torch.float64, got .* of torch.float32"),
        ({"num_classes": "ten"}, "some that fail"),
        ({"num_classes": 10**9}, "expected the weights of its arguments, got others"),
        ({"num_classes": -1}, "some that fail|got others"),
        ({"gain": 1.0}, "expected the weights of its arguments, got others"),
        ({"self": 1}, "got self=1"),
        ({"token": "x"}, "got token='x'"),
        ({"model_id": "x"}, "got model_id='x'"),
        ({"cls": "x"}, "got cls='x'"),
        ({"map_location": "meta"}, "got map_location='meta'"),
        ({"alpha": "old"}, "some that fail .*'old'"),
    ],
)
def test_an_invalid_config_is_refused(change: dict[str, Any], message: str, lenet: Path) -> None:
    config = json.loads((lenet / "config.json").read_text())
    (lenet / "config.json").write_text(json.dumps({**config, **change}))
    refused(lenet, message)


def test_a_depth_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    networks.DkNetCL(1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "depth": 10**9}))
    refused(tmp_path, "depth: expected 10000 at most", networks.DkNetCL)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_no_file_is_refused(name: str, lenet: Path) -> None:
    """Reading a pipe would wait for ever, and a device has no end."""
    path = lenet / name
    path.unlink()
    os.mkfifo(path)
    refused(lenet, f"in {name}, got a device or a pipe")
    path.unlink()
    path.symlink_to("/dev/zero")
    refused(lenet, f"in {name}, got a device or a pipe")
    path.unlink()
    path.mkdir()
    refused(lenet, f"in {name}, got a folder")
    path.rmdir()
    path.symlink_to("nowhere")
    refused(lenet, f"in {name}, got none")


def test_weights_of_another_network_are_refused(lenet: Path, tmp_path: Path) -> None:
    networks.LeNet().save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", lenet)
    refused(lenet, "expected the weights of its arguments, got others")


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(lenet: Path) -> None:
    before = {name: (lenet / name).read_bytes() for name in ("config.json", "model.safetensors")}
    (lenet / "README.md").unlink()
    with pytest.raises(cl.ConformalError, match="accuracy"):
        networks.LeNetCL(gain=1.0).save_pretrained(lenet, model_card_kwargs={"accuracy": 2})
    assert {path.name: path.read_bytes() for path in lenet.iterdir()} == before


def test_an_incomplete_folder_is_refused(lenet: Path) -> None:
    refused(lenet / "none", "expected a folder, got none")
    refused(lenet, "got one of LeNetCL", networks.DkNetCL)
    (lenet / "config.json").write_text("[1]")
    refused(lenet, "got no JSON object")
    (lenet / "config.json").write_text('{"alpha": ')
    refused(lenet, "got no JSON object")
    (lenet / "config.json").write_bytes(json.dumps({}).encode("utf-16"))
    refused(lenet, "got no JSON object")
    (lenet / "config.json").write_text(" " * 2**20 + "{}")
    refused(lenet, "got 1048578 bytes")
    (lenet / "config.json").unlink()
    refused(
        lenet, r"arguments in config\.json, got none\. A fold or a model of cl\.save loads with"
    )


@pytest.mark.parametrize("length", [0, 7, 100, 5000])
def test_cut_weights_are_refused(length: int, lenet: Path) -> None:
    path = lenet / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    refused(lenet, "a file that fails")


def test_push_to_hub_hands_over_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub begins at HfApi: what would be sent is what from_pretrained reads."""

    class Api:
        def __init__(self, **options: Any) -> None:
            pass

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, *, repo_id: str, folder_path: Any, **options: Any) -> str:
            shutil.copytree(folder_path, tmp_path / "sent")
            return f"sent to {repo_id}"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    network = networks.LeNetCL(gain=1.5).eval()
    x = inputs(network)
    assert network.push_to_hub("someone/lenet") == "sent to someone/lenet"
    assert torch.equal(networks.LeNetCL.from_pretrained(tmp_path / "sent")(x), network(x))
    shutil.rmtree(tmp_path / "sent")
    done = network.save_pretrained(tmp_path / "lenet", push_to_hub=True, repo_id="someone/lenet")
    assert done == "sent to someone/lenet"


# -- without huggingface_hub --------------------------------------------------------------------

WITHOUT = """
import sys
import conformallayers as cl
cl.fold, cl.ConformalLayers
print("huggingface_hub" in sys.modules)

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "huggingface_hub":
            raise ImportError(name)

sys.meta_path.insert(0, Forbidden())
import torch
from conformallayers.hub import model_card

net = cl.networks.LeNetCL()
assert net(torch.rand(1, 3, 32, 32)).shape == (1, 10)
calls = (
    lambda: net.save_pretrained("nowhere"),
    lambda: net.push_to_hub("someone/lenet"),
    lambda: cl.networks.LeNetCL.from_pretrained("nowhere"),
    lambda: model_card(net),
)
for call in calls:
    try:
        call()
    except cl.MissingExtra as error:
        print(error)
"""


def test_the_package_does_not_import_the_extra_and_names_it_where_it_is_missing() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(cl.__file__).parents[1])}
    command = [sys.executable, "-W", "error", "-c", WITHOUT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported, *lines = done.stdout.splitlines()
    assert imported == "False"
    owners = ("save_pretrained", "push_to_hub", "from_pretrained", "a model card")
    install = "pip install 'conformallayers[hub]'"
    assert lines == [f"{owner} needs huggingface_hub: {install}" for owner in owners]
