"""cl.save and cl.load: the same numbers again, or one clear error; never half a file."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.export.archive import checksum
from conformallayers.utils.fingerprint import fingerprint
from nets import DTYPES, NETS, OFFSETS, SHAPE, Offset, features, folds, net
from support import samples

DATA = Path(__file__).parent / "data"
kinds = pytest.mark.parametrize("name", list(NETS))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.safetensors"


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(*zeroed(a, b))


def zeroed(*tensors: Tensor) -> list[Tensor]:
    return [tensor.nan_to_num() for tensor in tensors]


# -- round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@kinds
def test_folds_come_back_to_the_bit(name: str, dtype: torch.dtype, path: Path) -> None:
    x = samples(SHAPE, dtype, batch=5)
    x[1], x[2, 0, 0, 0] = 0, float("nan")
    seen = set()
    for folded in folds(name, dtype):
        cl.save(folded, path)
        loaded = cl.load(path)
        assert isinstance(loaded, cl.Folded)
        for batch in (x, x[:0], 1e3 * x):
            assert same(loaded(batch), folded(batch))
        for attribute in ("strategy", "certificate", "dtype", "piece", "origin", "input_shape"):
            assert getattr(loaded, attribute) == getattr(folded, attribute)
        assert str(loaded.explain()) == str(folded.explain())
        assert not list(loaded.parameters())
        assert not loaded.training
        seen.add(folded.strategy)
    assert len(seen) >= 2


@kinds
def test_models_come_back(name: str, path: Path) -> None:
    model = net(name)
    if name == "calls":
        with pytest.raises(cl.ConformalError, match=r"save: model.*got Called\. Save its weights"):
            cl.save(model, path)
        return
    first = next(model.parameters()).requires_grad_(False)
    model(samples(SHAPE, torch.float32))  # statistics of normalisations move
    cl.save(model, path)
    state = torch.get_rng_state()
    loaded = cl.load(path)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(loaded) is type(model)
    assert loaded.training
    assert repr(loaded) == repr(model)
    assert fingerprint(loaded) == fingerprint(model)
    assert [p.requires_grad for p in loaded.parameters()] == [
        p is not first for p in model.parameters()
    ]
    x = samples(SHAPE, torch.float32)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(x), model.eval()(x))
    cl.save(model, path)
    assert not cl.load(path).training


@pytest.mark.parametrize("name", [n for n in cl.networks.__all__ if n.endswith(("Net", "NetCL"))])
def test_networks_of_the_paper_come_back(name: str, path: Path) -> None:
    model = getattr(cl.networks, name)(*([2] if name.startswith("Dk") else [])).eval()
    cl.save(model, path)
    loaded = cl.load(path)
    x = samples((3, 32, 32), torch.float32, batch=1)
    with torch.no_grad(), cl.layer_by_layer():
        assert torch.equal(loaded(x), model(x))
    assert type(loaded) is type(model)


def test_spectral_norms_and_layouts_come_back(path: Path) -> None:
    model = cl.ConformalLayers(cl.Conv2d(2, 4, 3), cl.ReSPro("spectral"), cl.Conv2d(4, 2, 3))
    model(samples(SHAPE, torch.float32))
    model = model.to(memory_format=torch.channels_last)
    cl.save(model, path)
    loaded: Any = cl.load(path)
    assert torch.equal(loaded[1].norm, model[1].norm)
    assert loaded[0].weight.stride() == model[0].weight.stride()
    shared = nn.Sequential(layer := nn.Linear(3, 3), nn.ReLU(), layer)
    cl.save(shared, path)
    loaded = cl.load(path)
    assert loaded[0] is loaded[2]


def test_certificates_come_back(path: Path) -> None:
    model = net("chain")
    folded = cl.fold(model, SHAPE, strategy="banded", tolerance=1e-2, max_norm=10.0)
    cl.save(folded, path)
    loaded = cl.load(path)
    assert loaded.certificate == folded.certificate is not None
    assert cl.verify(loaded, model)
    cl.save(cl.fold(model, SHAPE, strategy="dense", tolerance=1e-2), path)
    assert cl.load(path).certificate.max_norm == float("inf")


def test_what_is_loaded_can_be_saved_and_moved_again(path: Path) -> None:
    folded = cl.fold(net("biases"), SHAPE, strategy="dense")
    cl.save(folded, path)
    first = path.read_bytes()
    cl.save(cl.load(path), path)
    assert path.read_bytes() == first
    x = samples(SHAPE, torch.float64)
    assert torch.equal(cl.load(path).double()(x), folded.double()(x))


def test_origin_tells_the_weights(path: Path) -> None:
    model = net("chain")
    folded = cl.fold(model, SHAPE)
    assert folded.origin == fingerprint(model)
    with torch.no_grad():
        model[0].weight += 1
    assert folded.origin != fingerprint(model)
    cl.save(folded, path)
    assert header(path)["origin"] == folded.origin


def test_other_readers_understand_the_arrays(path: Path) -> None:
    folded = cl.fold(net("chain"), SHAPE, strategy="dense")
    cl.save(folded, path)
    assert torch.equal(load_file(path)["body.core.matrix"], folded.body.core.matrix)
    with safe_open(path, "pt") as file:
        assert set(file.metadata()) == {"conformallayers", "sha256"}
    document = header(path)
    assert document["format"] == 1
    assert document["library"] == cl.__version__
    assert (document["kind"], document["dtype"]) == ("folded", "float32")
    assert (tuple(document["input_shape"]), document["strategy"]) == (SHAPE, "dense")


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_files_of_format_1_stay_readable(kind: str) -> None:
    expected = torch.tensor([1.8113415, -0.0595131, -0.2351091])  # of the layers, in float64
    x = torch.linspace(-1, 1, 36).view(1, 1, 6, 6)
    file = DATA / f"{kind}-1.safetensors"
    assert torch.allclose(cl.load(file)(x)[0], expected, rtol=3e-6)
    assert torch.allclose(torch.from_numpy(cln.load(file)(x.numpy()))[0], expected, rtol=3e-6)


# -- refused ------------------------------------------------------------------------------------


class Own(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * input


class Cauchy(cl.RadialActivation):
    def growth(self, q: Tensor) -> Tensor:
        return 1 + q / 4


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = cl.ConformalLayers(cl.Linear(3, 3), cl.ReSPro())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(x)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, inputs, output: output + 1)
    return model


def extended(mask: Tensor) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_buffer("mask", mask)
    return layer


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


def registered(strategy: str) -> cl.Folded:
    cl.register_linear(Own, bound=lambda module, shape: 2.0)
    model = cl.ConformalLayers(cl.Linear(3, 3), Own(), cl.ReSPro())
    return cl.fold(model, (3,), strategy=strategy)


def custom_rule() -> cl.Folded:
    return cl.fold(cl.ConformalLayers(cl.Linear(3, 3), Cauchy()), (3,), strategy="dense")


def traced() -> nn.Module:
    return cl.ConformalLayers(cl.Traced(nn.Sequential(cl.Linear(3, 3))), cl.ReSPro())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Identity(), Own()), r"save: 1: .* got Own\. Save its weights"),
        (lambda: registered("layers"), 'got Own. Fold with strategy="dense"'),
        (custom_rule, "got the rule of Cauchy"),
        (lambda: cl.ConformalLayers(cl.Linear(2, 2), Cauchy()), "got Cauchy"),
        (traced, "got Traced"),
        (hooked, "got Linear with hooks"),
        (tied, r"save: 1\.weight: expected a tensor of its own, got the tensor of 0\.weight"),
        (lambda: nn.Sequential(weight_norm(nn.Linear(2, 2))), "got ParametrizedLinear"),
        (lambda: cl.fold(Skip(), (3,)), "expected a chain around the folded parts"),
        (lambda: nn.Linear(2, 2, device="meta"), "on meta"),
        (lambda: extended(torch.zeros(1, dtype=torch.bool)), "save: mask: .*torch.bool"),
        (lambda: extended(torch.zeros(1)), "this fails: Linear with other tensors"),
        (lambda: "model", "expected an nn.Module, got str"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_by_name(
    make: Callable[[], Any], message: str, path: Path
) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        cl.save(make(), path)
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize(
    ("ending", "other"), [("onnx", "cl.export_onnx"), ("PT", "torch.save"), ("c", "cl.export_c")]
)
def test_an_ending_of_another_format_is_refused(ending: str, other: str, tmp_path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=rf"save\(path\): .*there is {other}"):
        cl.save(cl.fold(net("chain"), SHAPE), tmp_path / f"net.{ending}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_constant_that_is_subtracted_comes_back_to_the_bit(offset: str, path: Path) -> None:
    head = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), Offset(5, add=True))
    folded = cl.fold(nn.Sequential(OFFSETS[offset](), features(), head), SHAPE)
    cl.save(folded, path)
    x = samples(SHAPE, torch.float32, batch=5)
    assert torch.equal(cl.load(path)(x), folded(x))
    torch.testing.assert_close(torch.from_numpy(cln.load(path)(x.numpy())), folded(x))


def test_a_constant_for_a_batch_is_refused(path: Path) -> None:
    folded = cl.fold(nn.Sequential(features(), Offset(2, 4, 3, 3)), SHAPE)
    with pytest.raises(cl.ConformalError, match=r"a chain around the folded parts, got .*sub"):
        cl.save(folded, path)


def test_a_registered_layer_may_fold_away(path: Path) -> None:
    folded = registered("dense")
    cl.save(folded, path)
    x = samples((3,), torch.float32)
    assert torch.equal(cl.load(path)(x), folded(x))


# -- writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file(
    step: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = cl.fold(net("chain"), SHAPE), cl.fold(net("biases"), SHAPE)
    cl.save(old, path)
    before = path.read_bytes()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space"):
        cl.save(new, path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_an_interrupt_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cl.save(nn.Linear(2, 2), path)
    before = path.read_bytes()

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cl.save(nn.Linear(3, 3), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_links_and_modes_are_those_of_any_file(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    mask = os.umask(0o022)
    try:
        cl.save(nn.Linear(2, 2), link)
    finally:
        os.umask(mask)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o644
    with pytest.raises(FileNotFoundError):
        cl.save(nn.Linear(2, 2), path.parent / "none" / "net")


# -- damage -------------------------------------------------------------------------------------


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def header(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(split(path)[0]["__metadata__"]["conformallayers"])
    return document


def signed(path: Path, head: dict[str, Any], document: Any, data: bytes) -> None:
    """Write a file whose checksum is right, whatever its content is."""
    head = json.loads(json.dumps(head))
    head["__metadata__"]["conformallayers"] = json.dumps(document)
    head["__metadata__"]["sha256"] = checksum(head, [data])
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def tiny(path: Path) -> tuple[Path, cl.Folded, Tensor]:
    model = cl.ConformalLayers(cl.Linear(2, 2, bias=True), cl.ReSPro(), cl.Linear(2, 1))
    folded = cl.fold(model, (2,), strategy="dense")
    cl.save(folded, path)
    return path, folded, samples((2,), torch.float32)


def outcome(path: Path, expected: Tensor, x: Tensor) -> bool:
    """Load a mutant both ways: refused by both, or equal numbers from both."""
    try:
        loaded = cl.load(path)
    except cl.ConformalError:
        with pytest.raises(cl.ConformalError):
            cln.load(path)
        return False
    assert torch.equal(loaded(x), expected)
    assert torch.allclose(torch.from_numpy(cln.load(path)(x.numpy())), expected, rtol=1e-5)
    return True


def test_every_damage_is_found_or_harmless(tiny: tuple[Path, cl.Folded, Tensor]) -> None:
    path, folded, x = tiny
    expected, content = folded(x), path.read_bytes()
    choice = random.Random(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for place in range(len(content)):
        mutant = bytearray(content)
        mutant[place] ^= 1 << choice.randrange(8)
        path.write_bytes(mutant)
        outcome(path, expected, x)
    for length in (*range(200), *range(200, len(content), 13), len(content) - 1):
        path.write_bytes(content[:length])
        assert not outcome(path, expected, x)
    for extra in (b"\0", b" " * 8, content):
        path.write_bytes(content + extra)
        assert not outcome(path, expected, x)
    for length in (0, 1, 2**31, 2**40, 2**63, 2**64 - 1):
        path.write_bytes(struct.pack("<Q", length) + content[8:])
        assert not outcome(path, expected, x)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100_000  # KiB


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for _, key in list(found):
        if isinstance(value[key], (dict, list)):
            found += places(value[key])
    return found


_JUNK: tuple[Any, ...] = (
    None,
    -1,
    0,
    10**9,
    10**18,
    1e308,
    "x",
    [],
    {},
    True,
    [2**40],
    {"is": "?"},
)


def refused(load: Callable[[Path], Any], path: Path) -> str | None:
    try:
        load(path)
    except cl.ConformalError as error:
        return str(error)
    return None  # another number in a right place makes another network


@pytest.mark.parametrize("name", ["biases", "unpadded", "circular", "several", "linear branches"])
def test_a_header_without_sense_is_refused(name: str, path: Path) -> None:
    choice = random.Random(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for folded in folds(name, torch.float32):
        cl.save(folded, path)
        head, data = split(path)
        text = head["__metadata__"]["conformallayers"]
        for _ in range(25):
            document = json.loads(text)
            container, key = choice.choice(places(document))
            container[key] = choice.choice(_JUNK)
            signed(path, head, document, data)
            for load in (cl.load, cln.load):
                message = refused(load, path)
                assert message is None or message.startswith(f"load({path})")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200_000  # KiB


def test_indices_of_sparse_matrices_are_looked_at(path: Path) -> None:
    cl.save(cl.fold(net("unpadded"), SHAPE, strategy="sparse"), path)
    head, data = split(path)
    document = header(path)
    start, _ = head["body.core.matrix_column"]["data_offsets"]
    wrong = data[:start] + struct.pack("<i", 1_000_000) + data[start + 4 :]
    signed(path, head, document, wrong)
    for load in (cl.load, cln.load):
        with pytest.raises(cl.ConformalError, match="makes no network"):
            load(path)


def test_newer_files_ask_for_a_newer_library(tiny: tuple[Path, cl.Folded, Tensor]) -> None:
    path, _, _ = tiny
    head, data = split(path)
    signed(path, head, {**header(path), "format": 2, "library": "9.0"}, data)
    for load in (cl.load, cln.load):
        with pytest.raises(cl.ConformalError, match=r"format 2, .* 9\.0\. Upgrade"):
            load(path)


def test_other_files_are_told_apart(path: Path) -> None:
    save_file({"weight": torch.ones(2)}, path)
    for load in (cl.load, cln.load):
        with pytest.raises(cl.ConformalError, match=r"another safetensors file.*load_file"):
            load(path)
    path.write_bytes(b"")
    with pytest.raises(cl.ConformalError, match="a header of 0 bytes in a file of 0"):
        cl.load(path)
    with pytest.raises(FileNotFoundError):
        cl.load(path.with_name("none"))


def test_arrays_of_another_layer_are_refused(path: Path) -> None:
    cl.save(nn.Linear(3, 2), path)
    head, data = split(path)
    document = header(path)
    document["structure"]["settings"]["in_features"] = 10**12
    signed(path, head, document, data)
    with pytest.raises(cl.ConformalError, match="makes no network"):
        cl.load(path)
    document["structure"] = {**document["structure"], "type": "os.system", "settings": {}}
    signed(path, head, document, data)
    with pytest.raises(cl.ConformalError, match="makes no network"):
        cl.load(path)
