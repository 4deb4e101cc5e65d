"""Open encoded pictures: read their headers within limits, without decoding any pixels."""

import io
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from PIL import BmpImagePlugin, IcoImagePlugin, Image, JpegImagePlugin

# Formats that may be decoded from untrusted bytes. Pillow's other decoders start programs (EPS) or
# open other files, for formats that cameras, browsers and scanners do not write.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO")

_JPEG, _PNG, _ICON = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"\0\0\1\0"
_TIFF = {b"II": "<", b"MM": ">"}
"""Byte order of a TIFF (of ``struct``), by the file's first two bytes."""
_TURNING_TEXTS = b"Raw profile type exif", b"XML:com.adobe.xmp"
"""Keywords of PNG text chunks that may contain the picture's orientation."""
_ARRAYS = {258, 273, 320, 324, 338, 339}
"""TIFF tags that Pillow reads in full: BitsPerSample, StripOffsets, ColorMap, TileOffsets,
ExtraSamples and SampleFormat."""
_MAX_VALUES = 1 << 18
"""Maximum number of values of each of these tags: 50 megapixels have 195,000 tiles of 16 x 16."""
_STRIP_BYTES = 400
"""Memory in bytes that Pillow takes per strip or tile, whatever its number of pixels."""
_ICON_SIDE = 256
"""Maximum side in pixels of an icon that is not a PNG."""

_one_at_a_time = threading.Lock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_one_at_a_time.acquire,
        after_in_parent=_one_at_a_time.release,
        after_in_child=_one_at_a_time.release,
    )


def opened_image(source: Path | BinaryIO) -> Image.Image:
    """Open a picture and read only its header; parsers may raise any error.

    Headers are parsed one at a time, because parsing some of them takes a hundred megabytes.
    """
    with source.open("rb") if isinstance(source, Path) else nullcontext(source) as file:
        file.seek(0)
        first = file.read(8)
        if first == _PNG and (texts := [*_texts(file)]):
            return opened_image(_without(file, texts))
        if first[:4] == _ICON:
            return _opened_icon(file)
        if first[:2] in _TIFF:
            _check_arrays(file, _TIFF[first[:2]], large=first[2:3] == b"+")
        file.seek(0)
    with _one_at_a_time:
        if first.startswith(_JPEG):
            # Image.open would reject a JPEG that is too large to be decoded in full.
            return JpegImagePlugin.JpegImageFile(source)
        Image.init()
        return Image.open(source, formats=[kind for kind in FORMATS if kind in Image.OPEN])


def header_bytes(image: Image.Image) -> int:
    """Return the memory that the header of an opened picture takes, in bytes."""
    return _STRIP_BYTES * len(getattr(image, "tile", ()))


def _texts(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield start and end of each compressed text chunk of a PNG that does not affect how it looks.

    Pillow would decompress each chunk (a kilobyte may become a mebibyte) and keep up to 64 MiB in
    total.
    """
    at = len(_PNG)
    while len(head := _at(file, at, 40)) >= 8:
        length, kind = struct.unpack_from(">I4s", head)
        end = at + 12 + length
        if kind in (b"zTXt", b"iTXt") and head[8:].partition(b"\0")[0] not in _TURNING_TEXTS:
            yield at, end
        at = end


def _without(file: BinaryIO, parts: list[tuple[int, int]]) -> BinaryIO:
    """Copy a file, leaving out the given (start, end) parts."""
    begins = [0, *(end for _, end in parts)]
    ends = [*(begin for begin, _ in parts), file.seek(0, io.SEEK_END)]
    return io.BytesIO(
        b"".join(
            _at(file, begin, max(0, end - begin)) for begin, end in zip(begins, ends, strict=True)
        )
    )


def _opened_icon(file: BinaryIO) -> Image.Image:
    """Open the largest picture in an icon, as Pillow would, but without decoding it.

    The picture may be larger than the icon's directory says.
    """
    file.seek(0)
    icon: Any = IcoImagePlugin.IcoFile(file)
    start = icon.entry[0].offset
    if _at(file, start, len(_PNG)) == _PNG:
        return opened_image(io.BytesIO(_at(file, start, -1)))
    file.seek(start)
    if max(BmpImagePlugin.DibImageFile(file).size) > 2 * _ICON_SIDE:
        raise ValueError("the bitmap is too large for an icon; save the picture as PNG")
    return icon.frame(0)


def _check_arrays(file: BinaryIO, order: str, *, large: bool) -> None:
    """Reject a TIFF whose first directory has a tag with more values than a picture needs.

    Raises:
        ValueError: if a tag has too many values.
    """
    start, entries, entry = ("Q", "Q", "HHQQ") if large else ("I", "H", "HHII")
    [at] = _unpacked(file, 8 if large else 4, order + start)
    [count] = _unpacked(file, at, order + entries)
    size = struct.calcsize(order + entry)
    data = _at(file, at + struct.calcsize(order + entries), size * min(count, 1 << 16))
    for tag, _, values, _ in struct.iter_unpack(order + entry, data[: len(data) // size * size]):
        if tag in _ARRAYS and values > _MAX_VALUES:
            raise ValueError(f"TIFF tag {tag} has {values:,} values")


def _unpacked(file: BinaryIO, start: int, form: str) -> tuple[Any, ...]:
    return struct.unpack(form, _at(file, start, struct.calcsize(form)))


def _at(file: BinaryIO, start: int, count: int) -> bytes:
    file.seek(start)
    return file.read(count)
