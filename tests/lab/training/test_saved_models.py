"""What MODEL may be on the command line, its labels and its notes."""

from __future__ import annotations

from pathlib import Path

import pytest

import conformallayers as cl
from conformallayers.lab.training.saved_models import load_model


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        cl.ConformalError, match=r"^fold .*nothing: expected a file of cl\.save, .*got no such"
    ):
        load_model(tmp_path / "nothing", "fold")
    with pytest.raises(cl.ConformalError, match=r"got a folder without checkpoint\.safetensors"):
        load_model(tmp_path, "fold")
    path = tmp_path / "file"
    for content in (b"", b"PK\3\4 a zip"):
        path.write_bytes(content)
        with pytest.raises(cl.ConformalError, match=r"expected a whole file of cl\.save"):
            load_model(path, "fold")
