"""Decode any kind of picture to an upright RGB image."""

import io
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image

from oscar_mm.errors import Cancelled, InputError
from oscar_mm.media.decoder_process import decoded_elsewhere
from oscar_mm.media.headers import header_bytes, opened_image
from oscar_mm.media.limits import LARGE_PIXELS, MediaCount, MediaLimits
from oscar_mm.media.source import describe, local_source, none_if_unreadable, read_bytes

ImageSource = str | Path | bytes | bytearray | memoryview | Image.Image | np.ndarray

Fit = Callable[[int, int], tuple[int, int]]
"""Function from the width and height of an upright picture to the size that a model uses."""


@dataclass(frozen=True)
class Exactly:
    """A ``Fit`` that always applies, even to small pictures and even if it enlarges them."""

    size: Fit

    def __call__(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the scaled picture."""
        return self.size(width, height)


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Operation that turns a picture upright, by EXIF orientation; no other orientations need one."""
_LYING = 5
"""EXIF orientations from this number on swap width and height."""
_STOPPING = {"AVIF": 1 << 20, "JPEG2000": 0}
"""Formats whose decoders hold the GIL, and the maximum number of pixels for which they hold it only
briefly. For JPEG 2000 no number is small enough, because a small picture may have many tiles."""
_PIXEL_BYTES = {"WEBP": 17, "AVIF": 30, "JPEG2000": 40}
"""Maximum memory in bytes per pixel while decoding a format, including a decoder process; measured
with pictures of 49 megapixels in all modes."""
_OTHER_PIXEL_BYTES = 13
_STRIP_PIXELS = 1 << 18
"""Number of deep greyscale pixels to scale at a time; each takes 25 bytes in the meantime."""

_DEFAULTS = MediaLimits()


class PictureSize(NamedTuple):
    """Width and height in pixels; stands in for an image where only the size matters."""

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
    """Read a picture, turn it upright, put transparent parts on white, and convert it to RGB.

    Args:
        source: a path, encoded ``bytes``, a ``data:`` URI, an http(s) URL (only with
            ``allow_remote``), a PIL image, or an array (H, W), (H, W, 1), (H, W, 3) or
            (H, W, 4) of uint8, uint16, bool or floats in 0..1. Only the first frame of an animation
            is used. Greyscale deeper than 8 bits is scaled to 8 bits, never clipped.
        allow_remote: whether http(s) URLs may be fetched.
        limits: media limits, checked on the header before any pixel is decoded.
        label: name of the picture in error messages; by default the path or URL.
        fit: function that computes the size that the model uses. A larger picture is scaled down
            to that size right away, a JPEG even while it is decoded, so that 200 megapixels take
            no more memory than other pictures. Pictures of up to ``limits.small_image_pixels`` keep
            their size, except with ``Exactly``.
        count: totals of the request, to which the pixels in the header are added; a request decodes
            its large pictures one at a time.

    Returns:
        A new image; ``source`` stays unchanged.

    Raises:
        InputError: if there is nothing to read, if the source is not an image, or if the image is
            damaged, over a limit, or of a wrong type or shape. The message names the picture and
            says what to do.
    """
    name = label or describe(source, "image")
    if isinstance(source, np.ndarray):
        picture = _from_array(source, limits, name)
        _count(picture, count, name)
        return _decode(picture, limits, name, fit)
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
            f"{name}: {type(source).__name__} is not an image; pass a path, bytes, a binary file, "
            "a PIL image, a numpy array or a torch tensor"
        )
    if not data:
        raise InputError(f"{name}: is empty")
    try:
        opened = opened_image(io.BytesIO(data))
    except Image.DecompressionBombError as error:
        raise InputError(f"{name}: has more pixels than Pillow can open; scale it down") from error
    except Exception as error:  # any error of any parser: the bytes are not trusted
        raise InputError(
            f"{name}: is not an image that can be read; save it as PNG, JPEG or WebP"
        ) from error
    with opened:
        _count(opened, count, name)
        used = _drafted(opened, fit, limits, name)
        pixels = opened.width * opened.height
        scale = scaled
        if pixels > _STOPPING.get(opened.format or "", math.inf):
            scale = partial(decoded_elsewhere, data, check_wanted=count and count.check_wanted)
        with nullcontext() if count is None else count.turn(large=pixels > LARGE_PIXELS):
            return _decode(opened, limits, name, fit, used, scale)


def _drafted(
    image: Image.Image, fit: Fit | None, limits: MediaLimits, label: str
) -> tuple[int, int] | None:
    """Set an opened JPEG to decode at 1/2, 1/4 or 1/8 of its size if that suffices for ``fit``.

    Returns:
        Upright width and height that the model uses; None if the image is decoded in full.

    Raises:
        InputError: if the JPEG is too large even at a reduced size.
    """
    # Decoding a progressive JPEG keeps all coefficients in memory, at any size.
    if fit is None or image.format != "JPEG" or "progressive" in image.info:
        return None
    limits.check_photo(*image.size, label)
    turned = -1 if _orientation(image) >= _LYING else 1
    width, height = image.size[::turned]
    used = _fitting(width, height, fit, limits)
    across, down = used[::turned]
    if (across, down) != image.size:
        image.draft(None, (across, down))
    return used


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an opened picture, 1 if it is upright.

    A TIFF always counts as upright because Pillow itself applies its orientation.
    """
    if image.format == "TIFF":
        return 1
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        return orientation if orientation in _TURNS else 1
    except Exception:  # damaged metadata do not mean that the pixels are damaged
        return 1


def _fitting(width: int, height: int, fit: Fit | None, limits: MediaLimits) -> tuple[int, int]:
    """Return the width and height to scale an upright picture to; its own if it is not scaled."""
    if isinstance(fit, Exactly):
        return fit(width, height)
    if fit is None or width * height <= limits.small_image_pixels:
        return width, height
    used = fit(width, height)
    return used if used[0] <= width and used[1] <= height else (width, height)


def eighth(width: int, height: int) -> tuple[int, int]:
    """Return one eighth of a size: a ``Fit`` for previews and for checking that pictures decode."""
    return max(1, width // 8), max(1, height // 8)


class ImageOutline(NamedTuple):
    """Properties of an encoded image, computed from its header.

    Attributes:
        size: size of the image that ``load_image`` would return.
        decoding_bytes: maximum memory that decoding takes, in addition to the result.
        large: whether a request decodes only one such image at a time.
    """

    size: PictureSize
    decoding_bytes: int
    large: bool


@none_if_unreadable
def image_outline(
    source: Any, *, limits: MediaLimits, fit: Fit | None = None, count: MediaCount | None = None
) -> ImageOutline | None:
    """Return the outline of the image that ``load_image`` would return, from the header alone.

    Args:
        source, limits, fit, count: see ``load_image``.

    Returns:
        The outline; None if the header does not suffice, if the source is invalid, or if it is a
        URL.
    """
    if isinstance(source, np.ndarray | Image.Image):
        is_array = isinstance(source, np.ndarray)
        size = PictureSize(*source.shape[1::-1]) if is_array else _upright(source)
        _count(size, count, "")
        limits.check_frame(*size, "")
        return _outline("" if is_array else source.format, size, _fitting(*size, fit, limits))
    file = local_source(source)
    encoded = file.stat().st_size if isinstance(file, Path) else file.seek(0, io.SEEK_END)
    with opened_image(file) as image:
        upright = _upright(image)
        _count(upright, count, "")
        used = _drafted(image, fit, limits, "")
        limits.check_frame(*image.size, "")
        # Encoded bytes count twice, because a decoder process may get a copy.
        header = 2 * encoded + header_bytes(image)
        return _outline(image.format, image.size, used or _fitting(*upright, fit, limits), header)


def _outline(
    kind: str | None, decoded: tuple[int, int], used: tuple[int, int], header: int = 0
) -> ImageOutline:
    pixels = decoded[0] * decoded[1]
    taken = header + _PIXEL_BYTES.get(kind or "", _OTHER_PIXEL_BYTES) * pixels
    return ImageOutline(PictureSize(*used), taken, pixels > LARGE_PIXELS)


def _upright(image: Image.Image) -> PictureSize:
    # If a PNG has no EXIF data before its pixels, getexif() would decode the pixels to find any.
    lies = (image.format != "PNG" or "exif" in image.info) and _orientation(image) >= _LYING
    return PictureSize(*(image.size[::-1] if lies else image.size))


def _count(image: Image.Image | PictureSize, count: MediaCount | None, label: str) -> None:
    if count is not None:
        count.add(image.width * image.height, label)


def _decode(
    image: Image.Image,
    limits: MediaLimits,
    label: str,
    fit: Fit | None,
    used: tuple[int, int] | None = None,
    scale: Callable[[Image.Image, tuple[int, int]], Image.Image] | None = None,
) -> Image.Image:
    """Return a new image, scaled to ``used`` if given, else by ``fit``.

    Args:
        scale: function that decodes the image to a given size; by default it is decoded in this
            process.
    """
    limits.check_frame(*image.size, label)
    scale = scale or scaled
    try:
        if scale is scaled:
            image.load()  # The orientation of a PNG may follow its pixels.
        orientation = _orientation(image)
        turned = -1 if orientation >= _LYING else 1
        width, height = image.size[::turned]
        across, down = (used or _fitting(width, height, fit, limits))[::turned]
        # Scale before turning and adding the white background, so that copies are small.
        picture = scale(image, (across, down))
        picture.info = {}  # Otherwise the next reader would apply its orientation again.
        turn = _TURNS.get(orientation)
        return picture if turn is None else picture.transpose(turn)
    except Cancelled:
        raise
    except Exception as error:  # decoders raise any exception on damaged data
        raise InputError(f"{label}: the image is damaged or cannot be decoded ({error})") from error


def scaled(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Return a new RGB image of a given size, with transparent parts on white and the same
    orientation."""
    picture = _continuous(image)
    if size != picture.size:
        picture = picture.resize(size, Image.Resampling.BICUBIC)
    if picture.mode == "RGBA":
        white = Image.new("RGB", size, "white")
        white.paste(picture, mask=picture)
        return white
    picture = picture if picture.mode == "RGB" else picture.convert("RGB")
    return picture.copy() if picture is image else picture


def _continuous(image: Image.Image) -> Image.Image:
    """Convert an image to the smallest mode that can be resized: L, RGB or RGBA."""
    if image.mode.startswith("I") or image.mode == "F":
        return _from_deep_gray(image)
    if image.has_transparency_data:
        return image if image.mode == "RGBA" else image.convert("RGBA")
    if image.mode in ("L", "RGB"):
        return image
    return image.convert("L" if image.mode == "1" else "RGB")


def _from_deep_gray(image: Image.Image) -> Image.Image:
    """Convert greyscale in PIL's modes I;16, I or F to mode L, scaling its range to uint8.

    I;16 has a fixed range. For I and F, the range is the smallest usual range that contains all
    values (floats: 0..1 or 0..255; integers: 0..255 or 0..65535), or, if there is none, the
    picture's own minimum to maximum.
    """
    low, high = 0.0, 65535.0
    if not image.mode.startswith("I;16"):
        ends = [(values.min(), values.max()) for _, values in _strips(image)]
        low, high = float(np.min(ends)), float(np.max(ends))
        if not np.isfinite([low, high]).all():
            raise ValueError("it contains NaN or infinite values")
        tops = (1, 255) if image.mode == "F" else (255, 65535)
        low, high = next(((0, top) for top in tops if low >= 0 and high <= top), (low, high))
    gray = Image.new("L", image.size)
    for top, values in _strips(image):
        gray.paste(Image.fromarray(_scale(values, low, high)), (0, top))
    return gray


def _strips(image: Image.Image) -> Iterator[tuple[int, np.ndarray]]:
    """Yield horizontal strips of an image from top to bottom, as (first row's index, values)."""
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        yield top, np.asarray(image.crop(box))


def _scale(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Scale values (H, ...) from low..high to uint8."""
    scaled = np.empty(values.shape, np.uint8)
    rows = max(1, _STRIP_PIXELS // max(1, values[:1].size))
    for top in range(0, len(values), rows):
        part = values[top : top + rows].astype(np.float64)
        scaled[top : top + rows] = ((part - low) * (255 / max(high - low, 1e-30))).round()
    return scaled


def _from_array(array: np.ndarray, limits: MediaLimits, label: str) -> Image.Image:
    shape = array.shape
    if array.ndim not in (2, 3) or (array.ndim == 3 and shape[2] not in (1, 3, 4)):
        hint = "; put the channels last" if array.ndim == 3 and shape[0] in (1, 3, 4) else ""
        hint = "; pass a list of images" if array.ndim == 4 else hint
        raise InputError(
            f"{label}: an array of shape {shape} is not an image; use (H, W), (H, W, 1), "
            f"(H, W, 3) or (H, W, 4), or a tensor (C, H, W){hint}"
        )
    limits.check_frame(shape[1], shape[0], label)
    if array.ndim == 3 and shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype == bool:
        array = array.astype(np.uint8) * np.uint8(255)
    elif array.dtype == np.uint16:
        array = _scale(array, 0, 65535)
    elif np.issubdtype(array.dtype, np.floating):
        # The condition is written so that NaN fails too.
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
