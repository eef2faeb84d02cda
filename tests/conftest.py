"""Settings of the whole suite."""

from __future__ import annotations

import os

import torch

# The tests run many tiny tensors: a second thread would only wait, and slow the first one down.
torch.set_num_threads(1)
# Choices must not hang on how busy the machine is, and tests leave no files behind.
os.environ.setdefault("CONFORMALLAYERS_CALIBRATE", "0")
