"""One path in a process of its own: time and memory."""

from __future__ import annotations

import pytest

from conformallayers.lab.experiments import inference


@pytest.mark.slow
def test_process_of_its_own_weighs_the_batch_alone() -> None:
    row = inference.measure_alone(inference.LAYERS, 200, executions=2, seconds=9.0, threads=1)
    assert row["executions"] == 2
    # The batch has 2.3 MiB, the output of the first convolution 22 MiB; torch itself 200 and more.
    assert 20 * 2**20 < row["peak_bytes"] < 100 * 2**20
    failed = inference.measure_alone(inference.FOLDED + "magic", 1, executions=1, seconds=1.0)
    assert "magic" in failed["failed"]
