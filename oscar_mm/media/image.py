"""Any picture to an upright RGB image."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from oscar_mm.errors import InputError
from oscar_mm.media.limits import MediaLimits
from oscar_mm.media.source import describe, read_bytes

# Decoders for untrusted bytes. Others which Pillow knows start programs (EPS) or read further
# files, and no camera, browser or scanner writes them.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO")

ImageSource = str | Path | bytes | bytearray | memoryview | Image.Image | np.ndarray

_DEFAULTS = MediaLimits()


def load_image(
    source: ImageSource,
    *,
    allow_remote: bool = False,
    limits: MediaLimits = _DEFAULTS,
    label: str | None = None,
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

    Returns:
        A new image; ``source`` is left as it was.

    Raises:
        InputError: nothing there, not an image, damaged, over a limit, or of a type or shape
            that cannot be read. The message names the picture and what would be right.
    """
    name = label or describe(source, "image")
    if isinstance(source, np.ndarray):
        return _to_rgb(_from_array(source, limits, name))
    if isinstance(source, Image.Image):
        return _decode(source, limits, name)
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
    Image.init()
    known = [kind for kind in FORMATS if kind in Image.OPEN]
    try:
        opened = Image.open(io.BytesIO(data), formats=known)
    except Image.DecompressionBombError as error:
        raise InputError(f"{name}: more pixels than Pillow opens; scale it down") from error
    except Exception as error:  # any parser error of any plugin: the bytes are a stranger's
        raise InputError(
            f"{name}: is not an image that can be read; save it as PNG, JPEG or WebP"
        ) from error
    with opened:
        return _decode(opened, limits, name)


def _decode(image: Image.Image, limits: MediaLimits, label: str) -> Image.Image:
    limits.check_frame(*image.size, label)
    try:
        return _to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # decoders raise what they like on damaged data
        raise InputError(f"{label}: the image is damaged or cannot be decoded ({error})") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_deep_gray(np.asarray(image), image.mode))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _deep_gray(values: np.ndarray, mode: str) -> np.ndarray:
    """Greyscale (H, W) of PIL's modes I;16, I or F to uint8 over the range that it is written in.

    I;16 has a known range. I and F have none: the smallest usual one that holds all values is
    taken (floats 0..1, then 8 bits, for integers 16 bits), else the picture's own range.
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
