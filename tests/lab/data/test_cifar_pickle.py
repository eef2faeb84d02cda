"""CIFAR-10's pickles: what numpy writes is read, and nothing else is reached."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conformallayers as cl
from conformallayers.lab.data import cifar_pickle
from conformallayers.lab.data.cifar_pickle import read_pickle
from conformallayers.lab.data.formats import read_cifar_pickle
from datafiles import python2_pickle, random_images


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_pickles_of_python_3_are_read(protocol: int) -> None:
    batch = {b"data": random_images(2, 3072), b"labels": [3, 9], b"filenames": [b"a.png", b"b.png"]}
    found = read_cifar_pickle(pickle.dumps(batch, protocol), "batch")
    assert found["images"].tobytes() == batch[b"data"].tobytes()
    assert found["labels"].tolist() == [3, 9]


class Hostile:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return print, ("executed",)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_in_a_pickle_is_executed(protocol: int, capsys: pytest.CaptureFixture[str]) -> None:
    data = pickle.dumps({"data": Hostile(), "labels": []}, protocol)
    with pytest.raises(
        cl.ConformalError, match="a pickle of arrays, lists and text, got one that fails"
    ):
        read_cifar_pickle(data, "batch")
    assert capsys.readouterr().out == ""


RECONSTRUCT, ENCODE = b"cnumpy.core.multiarray\n_reconstruct\n", b"c_codecs\nencode\n"
HOSTILE = {
    "sets attributes of a stand-in": RECONSTRUCT + b"(N}U\x08__init__K\x01stb.",
    "sets the state of a stand-in": b"cnumpy\ndtype\n(K\x01tb.",
    "builds an array of objects": python2_pickle(random_images(1, 16), [3]).replace(
        b"U\x02u1", b"U\x02O8"
    ),
    "asks for a submodule": b"cnumpy\ncore.multiarray\n.",
    "asks for another codec": b"c_codecs\ndecode\n.",
    "numbers an object beyond memory": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "allocates a bytearray": b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",
    "nests tuples as a key": b"}N" + b"\x85" * 10**6 + b"Ns.",
    "loads by an id": b"Pname\n.",
    "loads an extension": b"\x80\x02\x82\x01.",
    "makes an instance": b"(inumpy\nndarray\n.",
    "makes a new object": b"\x80\x02cnumpy\nndarray\n)\x81.",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_pickles_are_refused_and_change_nothing(data: bytes) -> None:
    recording = vars(cifar_pickle._Call).copy()
    with pytest.raises(
        cl.ConformalError, match="a pickle of arrays, lists and text, got one that fails"
    ):
        read_cifar_pickle(data, "batch")
    assert dict(vars(cifar_pickle._Call)) == recording


def test_text_encoded_many_times_fills_no_memory() -> None:
    text = b"X" + (2**20).to_bytes(4, "little") + b"x" * 2**20
    start = b"\x80\x02" + ENCODE + b"q\x00" + text + b"X\x06\x00\x00\x00latin1\x86q\x01"
    call = b"h\x00h\x01R"  # of 1 MiB of text: all together would hold 100 GiB
    assert read_pickle(start + b"](" + call * 100_000 + b"e.", "batch") == {}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "an entry data of shape"),
        ({"data": np.zeros((2, 3071), np.uint8), "labels": [1, 2]}, r"got \(2, 3071\)"),
        ({"data": np.zeros((2, 3072), np.int8), "labels": [1, 2]}, "an array of type i1"),
        ({"data": np.zeros((2, 3072), np.uint8)}, "an entry labels"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "got 2 and 1"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 1000]}, "got 1000 at position 1"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [-1, 2**70]}, "got -1 at position 0"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, True]}, "an entry labels"),
    ],
)
def test_wrong_contents_of_a_pickle_are_refused(batch: object, message: str) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        read_cifar_pickle(pickle.dumps(batch, 2), "batch")


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 300), st.binary(min_size=1, max_size=4), st.booleans())
def test_damaged_pickles_are_refused_and_nothing_else(at: int, new: bytes, cut: bool) -> None:
    good = python2_pickle(random_images(1, 16), [3])
    at %= len(good)
    data = good[:at] + new + (b"" if cut else good[at + len(new) :])
    with contextlib.suppress(cl.ConformalError):
        read_pickle(data, "batch")
