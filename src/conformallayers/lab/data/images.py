"""Read images with Pillow, as a network takes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ...errors import first_line, ignored_warnings, missing_extra, shape_text

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Array = np.ndarray[Any, Any]
SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm"),
)
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # nothing that runs a program
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
_SIXTEEN = ("I;16", "I;16B", "I;16L")
_PIXELS = 2**26  # largest image that is decoded
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # EXIF values that swap width and height


class Unreadable(Exception):
    """Raised with the reason why a file cannot be read."""


def require_file(path: str) -> None:
    """Raise Unreadable unless a path is that of a regular file; opening a pipe would block."""
    if not os.path.isfile(path):
        if os.path.exists(path):
            raise Unreadable("no regular file")
        raise Unreadable("a link to nothing" if os.path.islink(path) else "no such file")


def files_below(
    folder: str, suffixes: tuple[str, ...], onerror: Callable[[OSError], object]
) -> Iterator[str]:
    """Yield the files below a folder by suffix, sorted; hidden files and links to folders are skipped."""
    for place, folders, files in os.walk(folder, onerror=onerror):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if name.lower().endswith(suffixes) and not name.startswith("."):
                yield os.path.join(place, name)


def read_image(
    source: str | IO[bytes],
    shape: tuple[int, ...],
    white: float = 1.0,
    resize: bool = False,
    opaque: bool = False,
) -> Array:
    """Return an image as (C, H, W), float32, black 0 and white ``white``.

    Args:
        source: the path of a file, or an open file.
        shape: of the network's input.
        white: value of a white pixel.
        resize: scale an image of another size instead of refusing it.
        opaque: put transparent pixels over white instead of refusing them.

    Raises:
        Unreadable: not an image, damaged, too large, or of another shape.
    """
    from PIL import Image, UnidentifiedImageError

    if len(shape) != 3 or shape[0] not in (1, 3):
        raise Unreadable(f"an image where the model takes {shape_text(shape)}; give .npy files")
    with ignored_warnings(Image.DecompressionBombWarning):  # ignored are such as odd metadata
        try:
            if isinstance(source, str):
                require_file(source)
            with Image.open(source, formats=_formats()) as image:
                return _pixels(image, shape, resize, opaque) * np.float32(white)
        except Unreadable:
            raise
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise Unreadable("too many pixels") from error
        except UnidentifiedImageError as error:
            raise Unreadable(f"no image of {', '.join(_FORMATS)}") from error
        except OSError as error:
            reason = error.strerror or f"a damaged image ({first_line(error)})"
            raise Unreadable(reason) from error
        except Exception as error:  # decoders raise anything for damaged files
            raise Unreadable(f"a damaged image ({first_line(error)})") from error


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    from PIL import Image

    Image.init()  # otherwise Pillow registers only the most common formats
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def need_pillow() -> None:
    """Raise MissingExtra if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise missing_extra("pillow", "experiments", "reading images") from error


def _pixels(image: Picture, shape: tuple[int, ...], resize: bool, opaque: bool) -> Array:
    """Return the pixels, (C, H, W), in [0, 1]."""
    from PIL import Image, ImageOps

    channels, height, width = shape
    # Photographs of phones hold a second picture, which MPO calls a frame.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise Unreadable("several images in one file")
    size = image.size[::-1] if image.getexif().get(_ORIENTATION) in _TURNED else image.size
    if size != (width, height) and not resize:
        found = f"{size[0]}×{size[1]} pixels where the model takes {width}×{height}"
        raise Unreadable(f"{found}; --resize scales them")
    if size[0] * size[1] > _PIXELS:
        raise Unreadable(f"too many pixels: {size[0]}×{size[1]}")
    if image.mode not in (*_MODES, *_SIXTEEN):
        raise Unreadable(f"pixels of mode {image.mode}, whose white is not known")
    upright = ImageOps.exif_transpose(image)
    if upright.mode in _SIXTEEN:
        values = np.asarray(upright).astype(np.float32) / np.float32(65535)
        grey = _resized(Image.fromarray(values), (width, height))
        return np.repeat(np.asarray(grey, np.float32)[None], channels, 0)
    plain = _without_alpha(upright, opaque).convert("L" if channels == 1 else "RGB")
    plain = _resized(plain, (width, height))
    values = np.asarray(plain, np.float32).reshape(height, width, channels)
    return np.ascontiguousarray(values.transpose(2, 0, 1)) / np.float32(255)


def _resized(image: Picture, size: tuple[int, int]) -> Picture:
    """Scale with an antialiasing filter."""
    from PIL.Image import Resampling

    return image if image.size == size else image.resize(size, Resampling.BILINEAR)


def _without_alpha(image: Picture, over_white: bool) -> Picture:
    """Return an image without its alpha channel; transparent pixels are put over white, or refused."""
    from PIL import Image

    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        if over_white:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        elif np.asarray(image.getchannel("A")).min() < 255:
            raise Unreadable("transparent pixels, whose colour is not known")
    return image.convert("RGB") if image.mode not in ("1", "L") else image
