"""Learn from a trained network: its scores, softened, beside the labels (knowledge distillation)."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import refusal, shape_text
from ..data.catalogue import LABELS
from .config import TrainConfig
from .saved_models import WHITE, input_dtype, load_model, locate

_OPTION = "train --teacher"
_REMEDY = "Train the teacher on the same data set."
_TEMPERATURE = 4.0  # by which scores are divided before the softmax
_SHARE = 0.9  # of the teacher in the loss


class Teacher:
    """A trained network that takes the same images and knows the same classes.

    Args:
        path: a run, a checkpoint, a file of :func:`conformallayers.save`, or a name of the zoo.
        config: of the run of the student.
    """

    def __init__(self, path: str, config: TrainConfig) -> None:
        where, wanted = f"{_OPTION} {path}", config.input_shape
        loaded = load_model(path, _OPTION, config.device)
        module, shape = loaded.module, loaded.native_shape
        if shape != wanted:
            got = shape_text(shape) if shape else "no known shape"
            remedy = "Train on images of its size, or name a teacher for these."
            raise refusal(where, f"a network for images of {shape_text(wanted)}", got, remedy)
        if loaded.white != WHITE:
            remedy = "Train the teacher by conformallayers train."
            raise refusal(where, f"a network with white {WHITE:g}", f"{loaded.white:g}", remedy)
        self._module = module.requires_grad_(False)
        self._dtype = input_dtype(module)
        scores = self(torch.zeros(1, *wanted, device=config.device))
        if scores.shape[1:] != (config.classes,):
            got = "×".join(map(str, scores.shape[1:]))
            raise refusal(where, f"{config.classes} classes", got, _REMEDY)
        own = config.labels or LABELS.get(config.dataset)
        if loaded.labels and own and tuple(own) != loaded.labels:
            expected, got = f"the classes {', '.join(own)}", ", ".join(loaded.labels)
            raise refusal(where, expected, got, "Name a teacher with the same, in this order.")

    def __call__(self, images: Tensor) -> Tensor:
        """Return the scores of images.

        Shape:
            (B, *input_shape) → (B, classes)
        """
        with torch.no_grad():
            scores: Tensor = self._module(images.to(self._dtype))
        return scores.float()


def file_hash(path: object) -> str | None:
    """Return the SHA-256 of the file of a teacher; None without one, or if the option is no path."""
    if not isinstance(path, str):
        return None
    return hashlib.sha256(locate(path, _OPTION).read_bytes()).hexdigest()


def loss_sum(scores: Tensor, labels: Tensor, taught: Tensor | None) -> Tensor:
    """Return the cross entropy of a batch, mixed with the distance from the teacher's softened scores.

    Args:
        scores: (B, classes).
        labels: (B,).
        taught: scores of the teacher, (B, classes), or None.
    """
    hard = F.cross_entropy(scores, labels, reduction="sum")
    if taught is None:
        return hard
    # Softened scores have gradients of the order 1/T²; the factor T² keeps the shares of the sum.
    given, wanted = (F.log_softmax(part / _TEMPERATURE, 1) for part in (scores, taught))
    soft = F.kl_div(given, wanted, reduction="sum", log_target=True)
    return (1 - _SHARE) * hard + _SHARE * _TEMPERATURE**2 * soft
