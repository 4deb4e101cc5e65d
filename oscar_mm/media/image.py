"""Pictures of any kind as upright RGB images."""

import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, JpegImagePlugin

from oscar_mm.errors import InputError
from oscar_mm.media.limits import LARGE_PIXELS, MediaCount, MediaLimits
from oscar_mm.media.source import describe, local_source, none_if_unreadable, read_bytes

# Formats that may be decoded from untrusted bytes. Pillow's other decoders start programs (EPS) or
# read further files, and no camera, browser or scanner writes their formats.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO")

ImageSource = str | Path | bytes | bytearray | memoryview | Image.Image | np.ndarray

Fit = Callable[[int, int], tuple[int, int]]
"""Function from the width and height of an upright picture to the size that a model uses."""

_SMALL = 1 << 22
"""Pixels up to which a picture stays as it is, for the model's own processor to scale it down."""

_JPEG = b"\xff\xd8\xff"
_LYING = range(5, 9)
"""EXIF orientations that turn a picture by a quarter; there are none above."""

_DEFAULTS = MediaLimits()


class PictureSize(NamedTuple):
    """Width and height in pixels; stands for an image where only these count."""

    width: int
    height: int


def load_image(
    source: ImageSource,
    *,
    allow_remote: bool = False,
    limits: MediaLimits = _DEFAULTS,
    label: str | None = None,
    fit: Fit | None = None,
    count: MediaCount | None = None,
) -> Image.Image:
    """Read one picture, turned upright, transparent parts on white, in mode RGB.

    Args:
        source: a path, encoded ``bytes``, a ``data:`` URI, an http(s) address (only with
            ``allow_remote``), a PIL image, or an array (H, W), (H, W, 1), (H, W, 3) or
            (H, W, 4) of uint8, uint16, bool or floats in 0..1. Of an animation the first frame
            is taken. Greyscale deeper than 8 bits is scaled down to it, never clipped.
        allow_remote: fetch http(s) addresses; nothing is fetched without it.
        limits: bounds, checked on the header before any pixel is decoded.
        label: name of the picture in error messages; by default the path or address.
        fit: computes the size that the model uses. A larger picture is scaled down to it at once,
            a JPEG while it is decoded, so that one of 200 megapixels takes no more memory than
            others. Pictures of up to 4 megapixels keep their size.
        count: counts the picture's pixels, by its header; large pictures of a count take turns.

    Returns:
        A new image; ``source`` stays unchanged.

    Raises:
        InputError: there is nothing to read, or no image; the image is damaged, over a limit, or
            of a wrong type or shape. The message names the picture and what would be right.
    """
    name = label or describe(source, "image")
    if isinstance(source, np.ndarray):
        picture = _from_array(source, limits, name)
        _count(picture, count, name)
        return _finished(picture, fit)
    if isinstance(source, Image.Image):
        _count(source, count, name)
        return _decode(source, limits, name, fit)
    if isinstance(source, (str, Path)):
        data = read_bytes(source, allow_remote=allow_remote, limits=limits, label=name)
    elif isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
        limits.check_bytes(len(data), name)
    else:
        raise InputError(
            f"{name}: {type(source).__name__} is not an image; pass a path, bytes, a PIL image "
            "or a numpy array"
        )
    if not data:
        raise InputError(f"{name}: there are no bytes in it")
    try:
        opened = opened_image(io.BytesIO(data))
    except Image.DecompressionBombError as error:
        raise InputError(f"{name}: more pixels than Pillow opens; scale it down") from error
    except Exception as error:  # any error of any parser: the bytes are not trusted
        raise InputError(
            f"{name}: is not an image that can be read; save it as PNG, JPEG or WebP"
        ) from error
    with opened:
        _count(opened, count, name)
        used = _drafted(opened, fit, limits, name)
        large = opened.width * opened.height > LARGE_PIXELS
        with nullcontext() if count is None else count.turn(large=large):
            return _decode(opened, limits, name, fit, used, in_place=True)


def opened_image(source: Path | BinaryIO) -> Image.Image:
    """A picture whose header alone is read; errors of the parsers are not caught."""
    with source.open("rb") if isinstance(source, Path) else nullcontext(source) as file:
        is_jpeg = file.read(3) == _JPEG
        file.seek(0)
    if is_jpeg:
        # Image.open would refuse a JPEG that is too large to be decoded in full.
        return JpegImagePlugin.JpegImageFile(source)
    Image.init()
    return Image.open(source, formats=[kind for kind in FORMATS if kind in Image.OPEN])


def _drafted(
    image: Image.Image, fit: Fit | None, limits: MediaLimits, label: str
) -> tuple[int, int] | None:
    """Let an opened JPEG be decoded at a half, a quarter or an eighth if ``fit`` uses no more.

    Returns:
        the width and height that are used, upright; None if the image is decoded in full.

    Raises:
        InputError: the JPEG is too large even so.
    """
    # A progressive JPEG has all coefficients in memory at once, at whatever size it is decoded.
    if fit is None or image.format != "JPEG" or "progressive" in image.info:
        return None
    limits.check_photo(*image.size, label)
    turned = -1 if _lies(image) else 1
    width, height = image.size[::turned]
    used = _fitting(width, height, fit)
    across, down = used[::turned]
    if (across, down) != image.size:
        image.draft(None, (across, down))
    return used


def _knows_exif(image: Image.Image) -> bool:
    """Whether the EXIF data of a picture can be read; damaged ones say nothing about its pixels."""
    try:
        image.getexif()
    except Exception:  # decoders raise what they like
        return False
    return True


def _lies(image: Image.Image) -> bool:
    """Whether the EXIF data of an opened picture turn it by a quarter."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1) in _LYING
    except Exception:  # the data are not trusted; decoding reports what is wrong
        return False


def _fitting(width: int, height: int, fit: Fit | None) -> tuple[int, int]:
    """The size to which an upright picture is scaled down; its own if it is not."""
    if fit is None or width * height <= _SMALL:
        return width, height
    used = fit(width, height)
    return used if used[0] <= width and used[1] <= height else (width, height)


def eighth(width: int, height: int) -> tuple[int, int]:
    """A ``Fit`` for checking whether a picture can be read, or for showing it small."""
    return max(1, width // 8), max(1, height // 8)


@none_if_unreadable
def image_size(
    source: Any, *, limits: MediaLimits, fit: Fit | None = None, count: MediaCount | None = None
) -> PictureSize | None:
    """Size of the image that ``load_image`` would return, by its header alone.

    Args:
        source, limits, fit, count: as of ``load_image``.

    Returns:
        None where the header does not say, something is wrong, or the source is an address.
    """
    if isinstance(source, np.ndarray | Image.Image):
        is_array = isinstance(source, np.ndarray)
        size = PictureSize(*source.shape[1::-1]) if is_array else _upright(source)
        _count(size, count, "")
        limits.check_frame(*size, "")
        return PictureSize(*_fitting(*size, fit))
    with opened_image(local_source(source)) as image:
        upright = _upright(image)
        _count(upright, count, "")
        used = _drafted(image, fit, limits, "")
        limits.check_frame(*image.size, "")
    return PictureSize(*(used or _fitting(*upright, fit)))


def _upright(image: Image.Image) -> PictureSize:
    # Where a PNG's header has no EXIF data, Pillow would decode the pixels to look for them; the
    # size of a TIFF is upright already.
    has_exif = image.format != "TIFF" and (image.format != "PNG" or "exif" in image.info)
    return PictureSize(*(image.size[::-1] if has_exif and _lies(image) else image.size))


def _count(image: Image.Image | PictureSize, count: MediaCount | None, label: str) -> None:
    if count is not None:
        count.add(image.width * image.height, label)


def _decode(
    image: Image.Image,
    limits: MediaLimits,
    label: str,
    fit: Fit | None,
    used: tuple[int, int] | None = None,
    *,
    in_place: bool = False,
) -> Image.Image:
    """A new image, scaled down to ``used`` if that is given, else by ``fit``."""
    limits.check_frame(*image.size, label)
    try:
        # In place, the pixels are not copied.
        if _knows_exif(image):
            image = ImageOps.exif_transpose(image, in_place=in_place) or image
        return _finished(image, fit, used)
    except Exception as error:  # decoders raise what they like on damaged data
        raise InputError(f"{label}: the image is damaged or cannot be decoded ({error})") from error


def _finished(
    image: Image.Image, fit: Fit | None, used: tuple[int, int] | None = None
) -> Image.Image:
    picture = _to_rgb(image)
    size = used or _fitting(*picture.size, fit)
    if size != picture.size:
        return picture.resize(size, Image.Resampling.BICUBIC)
    return picture.copy() if picture is image else picture


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_deep_gray(np.asarray(image), image.mode))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _deep_gray(values: np.ndarray, mode: str) -> np.ndarray:
    """Greyscale (H, W) of PIL's modes I;16, I or F as uint8 over the range of its values.

    I;16 has a fixed range. I and F have none: the smallest usual one that contains all values
    applies (floats: 0..1, 0..255; integers: 0..255, 0..65535), else the picture's own.
    """
    if mode.startswith("I;16"):
        return _scale(values, 0, 65535)
    low, high = float(values.min()), float(values.max())
    if not np.isfinite([low, high]).all():
        raise ValueError("it holds NaN or infinite values")
    tops = (1, 255) if mode == "F" else (255, 65535)
    for top in tops:
        if low >= 0 and high <= top:
            return _scale(values, 0, top)
    return _scale(values, low, high)


def _scale(values: np.ndarray, low: float, high: float) -> np.ndarray:
    span = max(high - low, 1e-30)
    return ((values.astype(np.float64) - low) * (255 / span)).round().astype(np.uint8)


def _from_array(array: np.ndarray, limits: MediaLimits, label: str) -> Image.Image:
    shape = array.shape
    if array.ndim not in (2, 3) or (array.ndim == 3 and shape[2] not in (1, 3, 4)):
        hint = "; put the channels last" if array.ndim == 3 and shape[0] in (1, 3, 4) else ""
        raise InputError(
            f"{label}: an array of shape {shape} is not an image; use (H, W), (H, W, 1), "
            f"(H, W, 3) or (H, W, 4){hint}"
        )
    limits.check_frame(shape[1], shape[0], label)
    if array.ndim == 3 and shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype == bool:
        array = array.astype(np.uint8) * np.uint8(255)
    elif array.dtype == np.uint16:
        array = _scale(array, 0, 65535)
    elif np.issubdtype(array.dtype, np.floating):
        # Written so that NaN fails too.
        if not (array.min() >= 0 and array.max() <= 1):
            raise InputError(
                f"{label}: floats must lie in 0..1; divide by 255 or pass uint8, and remove NaN"
            )
        array = _scale(array, 0, 1)
    elif array.dtype != np.uint8:
        raise InputError(
            f"{label}: an array of {array.dtype} is not an image; use uint8, uint16, bool or "
            "floats in 0..1"
        )
    return Image.fromarray(np.ascontiguousarray(array))
