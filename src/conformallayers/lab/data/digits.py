"""scikit-learn's digits as tensors: 1797 grey images of 8×8, which come with that package."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

SHAPE = (1, 8, 8)
CLASSES = 10


class Digits(NamedTuple):
    """A fixed split: images (N, 1, 8, 8) with values in [0, 1], and labels (N,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def digits() -> Digits:
    """Load the digits; a quarter of each class, always the same one, is the test set.

    Examples:
        >>> data = digits()
        >>> tuple(data.train_images.shape), tuple(data.test_images.shape)
        ((1347, 1, 8, 8), (450, 1, 8, 8))
    """
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(bunch.target).long()
    train, test = train_test_split(
        range(len(labels)), test_size=0.25, random_state=0, stratify=bunch.target
    )
    return Digits(images[train], labels[train], images[test], labels[test])
