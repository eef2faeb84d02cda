"""The known data sets: their files with checksums, the usual folders, class names and image shapes.

Checksums are md5 of the decompressed bytes, so that a file and its ``.gz`` have the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

DIGITS = "digits"  # of scikit-learn, without files
CLASSES = 10
_IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_CIFAR_NAMES = (*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin")


@dataclass(frozen=True)
class Layout:
    """The files of a data set."""

    checksums: dict[str, str]  # md5 by file name, training set first
    folders: tuple[str, ...]  # below the data root, the usual one first
    archive: str | None = None  # a tar file with all; idx files may be gzipped one by one

    def stored_names(self, name: str) -> tuple[str, str]:
        """Return the names of the files that may hold a file: its own, and that of its compressed form."""
        return name, self.archive or f"{name}.gz"


def _layout(
    names: tuple[str, ...], checksums: str, *folders: str, archive: str | None = None
) -> Layout:
    return Layout(dict(zip(names, checksums.split(), strict=True)), folders, archive)


LAYOUTS: dict[str, Layout] = {
    "mnist": _layout(
        _IDX_NAMES,
        """6bbc9ace898e44ae57da46a324031adb a25bea736e30d166cdddb491f175f624
        2646ac647ad5339dbf082846283269ea 27ae3e4e09519cfbb04c329615203637""",
        *("mnist", "MNIST/raw", "."),
    ),
    "fashion-mnist": _layout(
        _IDX_NAMES,
        """f4a8712d7a061bf5bd6d2ca38dc4d50a 9018921c3c673c538a1fc5bad174d6f9
        8181f5470baa50b63fa0f6fddb340f0a 15d484375f8d13e6eb1aabb0c3f46965""",
        *("fashion-mnist", "FashionMNIST/raw", "."),
    ),
    "cifar10": _layout(
        _CIFAR_NAMES,
        """5dd7e06a14cb22eb9f671a540d1b7c25 5ea93a67294ea407fff1d09f752e9692
        942cd6a4bcdd0dd3c604fbe906cb4421 ae636b3ba5c66a11e91e8cb52e771fcb
        53f37980c15c3d472c316c40844f3f0d 803d5f7f4d78ea53de84dbe85f74fb6d""",
        *("cifar-10-batches-bin", "cifar10", "."),
        archive="cifar-10-binary.tar.gz",
    ),
}
NAMES = (*LAYOUTS, DIGITS)
# Class names, as the papers and web pages of the sets have them.
LABELS: dict[str, tuple[str, ...]] = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    "cifar10": (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    DIGITS: tuple("0123456789"),
}
# Shapes of the stored images.
SHAPES: dict[str, tuple[int, int, int]] = {
    "mnist": (1, 28, 28),
    "fashion-mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    DIGITS: (1, 8, 8),
}
