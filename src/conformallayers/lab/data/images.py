"""Read images with Pillow, as a network takes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ...errors import first_line, ignored_warnings, shape_text

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Array = np.ndarray[Any, Any]
SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm"),
)
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # nothing that runs a program
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # of 8 bits or less


class Unreadable(Exception):
    """Raised with the reason why a file cannot be read."""


def files_below(folder: str, onerror: Callable[[OSError], object]) -> Iterator[str]:
    """Yield the images below a folder, sorted; hidden files and links to folders are skipped."""
    for place, folders, files in os.walk(folder, onerror=onerror):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                yield os.path.join(place, name)


def find_images(paths: Iterable[str]) -> Iterator[str]:
    """Yield the images of files and folders, in order, and the folders that cannot be read."""
    for path in paths:
        closed: list[OSError] = []
        yield from files_below(path, closed.append) if os.path.isdir(path) else [path]
        yield from (str(error.filename) for error in closed)


def read_image(source: str | IO[bytes], shape: tuple[int, ...]) -> Array:
    """Return an image as (C, H, W), float32, with values in [0, 1], scaled to the shape; transparent pixels are put over white.

    Raises:
        Unreadable: not an image, damaged, or too large.
    """
    from PIL import Image, UnidentifiedImageError

    if len(shape) != 3 or shape[0] not in (1, 3):
        raise Unreadable(f"an image where the model takes {shape_text(shape)}")
    with ignored_warnings(Image.DecompressionBombWarning):  # ignored are such as odd metadata
        try:
            if isinstance(source, str) and os.path.exists(source) and not os.path.isfile(source):
                raise Unreadable("not a regular file")  # opening a pipe would block
            with Image.open(source, formats=_FORMATS) as image:
                return _pixels(image, shape)
        except Unreadable:
            raise
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise Unreadable("too many pixels") from error
        except UnidentifiedImageError as error:
            raise Unreadable(f"not an image of {', '.join(_FORMATS)}") from error
        except Exception as error:  # decoders raise anything for damaged files
            reason = error.strerror if isinstance(error, OSError) else None
            raise Unreadable(reason or f"a damaged image ({first_line(error)})") from error


def _pixels(image: Picture, shape: tuple[int, ...]) -> Array:
    """Return the pixels, (C, H, W), in [0, 1]."""
    from PIL import Image, ImageOps

    channels, height, width = shape
    # Photographs of phones hold a second picture, which MPO calls a frame.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise Unreadable("several images in one file")
    if image.mode not in _MODES:
        raise Unreadable(f"pixels of mode {image.mode}, whose white is not known")
    upright = ImageOps.exif_transpose(image)
    if upright.has_transparency_data:
        upright = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
    plain = upright if upright.mode in ("1", "L") else upright.convert("RGB")
    plain = plain.convert("L" if channels == 1 else "RGB")
    if plain.size != (width, height):
        plain = plain.resize((width, height), Image.Resampling.BILINEAR)
    values = np.asarray(plain, np.float32).reshape(height, width, channels)
    return np.ascontiguousarray(values.transpose(2, 0, 1)) / np.float32(255)
