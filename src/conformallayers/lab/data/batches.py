"""Images as networks take them: batches in an order that depends on seed and epoch only, and adapted networks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import refusal, shape_text
from ...networks import IMAGE_SHAPE
from ...nn.layers import Centre, RepeatChannels

Shape = tuple[int, ...]
_CHANNELS, _SIDE = IMAGE_SHAPE[0], IMAGE_SHAPE[1]


def as_input(
    images: Tensor, dtype: torch.dtype = torch.float32, shape: Shape = IMAGE_SHAPE
) -> Tensor:
    """Convert images to the input of a network, with values in [0, 1].

    Images that have the shape are only scaled. Others are enlarged by the largest whole factor that
    fits in 32×32, and padded with zeros. Grey images are expanded to three channels, which copies nothing.

    Shape:
        (B, 1 or 3, H, W), unsigned bytes → ``(B, *shape)``
    """
    return _enlarge(images, shape).to(dtype).div_(255).expand(-1, shape[0], -1, -1)


def mean_image(images: Tensor, shape: Shape = IMAGE_SHAPE) -> Tensor:
    """Return the mean of images as a network input, in float64.

    Shape:
        (N, 1 or 3, H, W), unsigned bytes → ``(1, *shape)``
    """
    # numpy converts a part at a time; torch would take eight times the memory of the images.
    mean = torch.from_numpy(images.numpy().mean(0, dtype="float64", keepdims=True))
    return as_input(mean, torch.float64, shape)


def flip_and_shift(images: Tensor, flipped: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Mirror some images, (B, C, H, W), then shift each by whole pixels, (B,), filling with black."""
    # Output pixel (i, j) is input pixel (i - down, j - right), counted from the right if flipped;
    # the padding by ``reach`` holds the pixels from outside.
    reach = int(torch.stack([down, right]).abs().max()) if len(images) else 0
    height, width = (torch.arange(side, device=images.device) for side in images.shape[2:])
    rows, columns = height - down[:, None], width - right[:, None]
    columns = torch.where(flipped[:, None], len(width) - 1 - columns, columns)
    padded = F.pad(images, (reach,) * 4)
    sample = torch.arange(len(images), device=images.device)[:, None, None]
    taken = padded[sample, :, rows[:, :, None] + reach, columns[:, None, :] + reach]
    return taken.permute(0, 3, 1, 2)


def enlargement(height: int, width: int) -> tuple[int, tuple[int, int, int, int]]:
    """Return the factor that enlarges images, and the padding (left, right, top, bottom) to 32×32."""
    factor = _SIDE // max(height, width)
    rows, columns = _SIDE - factor * height, _SIDE - factor * width
    return factor, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)


def _enlarge(images: Tensor, shape: Shape) -> Tensor:
    """Enlarge and pad images to 32×32, of any dtype, unless they have the shape already."""
    if images.shape[1:] == shape:
        return images
    for module in _conversion(tuple(images.shape[1:])):
        if not isinstance(module, RepeatChannels):
            images = module(images)
    return images


def derive_seed(seed: int, epoch: int, purpose: str = "") -> int:
    """Return the seed of an epoch for one purpose; epoch 1 of seed 0 is not epoch 0 of seed 1."""
    text = f"{seed} {epoch} {purpose}".rstrip()
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@dataclass(frozen=True, eq=False)
class Batches:
    """Iterate once over images ``(B, *shape)`` with values in [0, 1] and labels (B,)."""

    images: Tensor  # (N, 1 or 3, H, W), unsigned bytes
    labels: Tensor
    batch_size: int  # of all ranks together; the last may be smaller
    shuffle: bool = False  # a new order in every epoch
    seed: int = 0  # with the epoch, of the order, the flips and the shifts
    epoch: int = 0
    flips: bool = False  # mirror a random half left to right
    shift: int = 0  # the largest along each axis, in pixels of the input
    shape: Shape = IMAGE_SHAPE  # of the input; see as_input
    device: torch.device | str = "cpu"
    rank: int = 0
    world_size: int = 1  # processes that share every batch

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def size(self, index: int) -> int:
        """Return the number of images in a batch, of all ranks together."""
        return min(self.batch_size, len(self.labels) - index * self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.labels)
        order = torch.arange(count)
        if self.shuffle:
            order = torch.randperm(count, generator=self._generator())
        moves = self._moves()
        for index in range(len(self)):
            start = index * self.batch_size
            # Shares differ by one image at most; a small last batch may leave a rank without any.
            first, last = (
                start + self.size(index) * n // self.world_size for n in (self.rank, self.rank + 1)
            )
            rows = order[first:last]
            images, labels = self.images[rows].to(self.device), self.labels[rows].to(self.device)
            if self.flips or self.shift:
                flipped, down, right = moves[:, rows].to(self.device)
                images = flip_and_shift(_enlarge(images, self.shape), flipped > 0, down, right)
            yield as_input(images, shape=self.shape), labels

    def _moves(self) -> Tensor:
        """Return flips and shifts of all images, (3, N), the same on every rank."""
        generator, count = self._generator("moves"), len(self.labels)
        flipped = torch.randint(0, 1 + self.flips, (1, count), generator=generator)
        shifts = torch.randint(-self.shift, self.shift + 1, (2, count), generator=generator)
        return torch.cat([flipped, shifts])

    def _generator(self, purpose: str = "") -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self.seed, self.epoch, purpose))


# -- networks for stored images, adapted by modules that fold --


def from_images(
    model: nn.Module, shape: Shape, native: Shape = IMAGE_SHAPE, where: str = "from_images"
) -> nn.Module:
    """Return a model that takes images of another shape than its native one and converts them as in training.

    :func:`conformallayers.fold` folds the conversion if it comes directly before the network. A mean
    image that was computed from images of this shape is therefore subtracted before it.
    """
    if shape == native:
        return model
    fits = len(shape) == 3 and shape[0] in (1, _CHANNELS) and 1 <= min(shape) <= max(shape) <= _SIDE
    if native != IMAGE_SHAPE or not fits:
        expected = f"samples of shape {shape_text(native)}"
        if native == IMAGE_SHAPE:
            expected = f"images (1 or 3, H, W) with sides of at most {_SIDE}"
        remedy = f"Give --shape {','.join(map(str, native))}."
        raise refusal(f"{where} --shape", expected, shape_text(shape), remedy)
    conversion, rest = _conversion(shape), [model]
    if isinstance(model, nn.Sequential) and isinstance(model[0], Centre):
        centre = _small_centre(model[0], shape)
        if centre is not None:
            conversion, rest = [centre, *conversion], list(model)[1:]
    return nn.Sequential(*conversion, *rest).train(model.training)


def _conversion(shape: Shape) -> list[nn.Module]:
    """Return modules that convert images to 3×32×32 as batches.as_input does."""
    factor, padding = enlargement(shape[1], shape[2])
    found: list[nn.Module] = []
    if factor > 1:
        found.append(nn.Upsample(scale_factor=(factor, factor), mode="nearest"))
    if any(padding):
        found.append(nn.ZeroPad2d(padding[0] if len(set(padding)) == 1 else padding))
    if shape[0] == 1:
        found.append(RepeatChannels(_CHANNELS))
    return found


def _small_centre(centre: Centre, shape: Shape) -> Centre | None:
    """Return a Centre whose mean converts to that of another one bit by bit; None if there is none.

    There is one if the network was trained on images of this shape: enlarged pixels are equal, margins are 0.
    """
    factor, (left, right, top, bottom) = enlargement(shape[1], shape[2])
    rows, columns = slice(top, _SIDE - bottom, factor), slice(left, _SIDE - right, factor)
    mean = centre.mean[: shape[0], rows, columns]
    if not torch.equal(nn.Sequential(*_conversion(shape))(mean[None])[0], centre.mean):
        return None
    small = Centre(shape, device=mean.device, dtype=mean.dtype)
    small.mean.copy_(mean)
    return small
