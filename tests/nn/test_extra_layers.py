"""Scale, RepeatChannels and Centre: their arguments."""

from __future__ import annotations

import pytest

import conformallayers as cl
from support import assert_says


def test_scale_refuses_bad_arguments() -> None:
    for gain in ("1", float("nan"), float("inf"), True, None):
        assert_says(
            lambda gain=gain: cl.Scale(gain), "Scale(gain=...)", "a finite number", repr(gain)
        )


@pytest.mark.parametrize("times", [0, -1, 1.5, True])
def test_repeat_channels_wants_a_number(times: object) -> None:
    with pytest.raises(cl.ConformalError, match="RepeatChannels"):
        cl.RepeatChannels(times)
