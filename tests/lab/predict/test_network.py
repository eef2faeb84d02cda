"""Networks of both engines, ready for predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

import conformallayers as cl
from conformallayers.lab.predict.network import ReadyNetwork, open_network
from conformallayers.lab.predict.options import PredictOptions
from pictures import GREY


def test_networks_without_classes_are_refused(tmp_path: Path) -> None:
    stages = cl.Conv2d(1, 2, 3), cl.ReSPro()
    cl.save(cl.fold(cl.ConformalLayers(*stages), GREY), path := tmp_path / "net.safetensors")
    for engine in ("torch", "numpy"):
        with pytest.raises(
            cl.ConformalError, match=r"expected a network that gives scores .*got \(B, 2, 6, 6\)"
        ):
            open_network(path, PredictOptions(engine=engine))


def test_a_network_says_what_its_classes_are_called() -> None:
    plain = ReadyNetwork(lambda x: x, (2,), (2,), None, 1.0)
    assert plain.label(1) == "1"
