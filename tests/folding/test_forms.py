"""Quadratic forms built from columns."""

from __future__ import annotations

import pytest
import torch

from conformallayers.folding.certificate import (
    ErrorBudget,
)
from conformallayers.folding.forms import forms_of
from nets import conv_stack
from support import chain_of

pytestmark = pytest.mark.usefixtures("seeded")


CPU = torch.device("cpu")


def test_what_a_truncated_form_lacks_is_below_its_bound() -> None:
    model = conv_stack(8, channels=16, padding=1)
    chain = chain_of(model, (3, 12, 12))
    exact = forms_of(chain, CPU, ErrorBudget(0.0))
    short = forms_of(chain, CPU, ErrorBudget(1e-3, radius=20.0))
    assert exact.missing == 0
    lacking = torch.linalg.matrix_norm(exact.values[0] - short.values[0], 2)
    assert 0 < float(lacking) <= short.missing
