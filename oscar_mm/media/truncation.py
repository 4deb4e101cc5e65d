"""Detect truncated files, which decoders would accept as complete."""

from __future__ import annotations

import io
import re
import struct
from pathlib import Path
from typing import BinaryIO

from oscar_mm.errors import InputError
from oscar_mm.media.resample import MIN_SHARE

_OGG_PAGE = 27 + 255 + 255 * 255
"""Maximum size of an Ogg page in bytes: header, segment table and segments."""
_OGG_END = 4
"""Flag on the last page of a stream."""
_OGG_FIRST_PAGE = re.compile(rb"OggS\0[\2\3\6\7]")
_OGG_LATER_PAGE = re.compile(rb"OggS\0[\0\1\4\5]")
_OGG_NUMBER = re.compile(rb"OggS\0[\0-\7].{8}(.{4})(.{4})", re.S)
"""Header of a page, with the serial number of its stream and the page's number in the stream."""
_OGG_STREAMS = 64
"""Maximum number of streams per Ogg file whose pages are counted."""
_PIECE_BYTES = 1 << 20
_SLACK_BYTES = 4096
"""Number of bytes that may be missing, because some headers overstate the size slightly."""
_SLACK_SHARE = 0.001
"""Fraction of the bytes that may be missing in addition."""
_PIPED_BYTES = 0x7FFFF000
"""Minimum size in headers of files from programs that write to a pipe and do not know the size."""
_RIFF_CHUNKS = 64
"""Maximum number of chunks to search for the samples in a WAV file."""
_CAF_CHUNKS = 64
"""Maximum number of chunks in a CAF file whose sizes are read."""
_MPEG_DELAY = 3
"""Number of frames in an MP3 that may be encoder delay and padding, which decoders skip."""


def opened_bytes(source: Path | bytes, label: str) -> BinaryIO:
    """Open a file, or bytes in memory, for reading.

    Raises:
        InputError: if the file cannot be opened.
    """
    if isinstance(source, bytes):
        return io.BytesIO(source)
    try:
        return source.open("rb")
    except OSError as error:
        raise InputError(f"{label}: cannot be read ({error.strerror})") from error


def check_whole(source: Path | bytes, label: str) -> None:
    """Reject a WAV, AVI, CAF, Matroska, WebM or Ogg file whose end is missing.

    An Ogg file has a flag on its last page; the headers of the other formats give the size. An
    interrupted live recording in Ogg lacks the flag too. Since it cannot be distinguished from a
    truncated file, it is rejected as well.

    Raises:
        InputError: if the file is cut off, or cannot be opened.
    """
    with opened_bytes(source, label) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        head = file.read(256)
        if head[:4] == b"OggS":
            file.seek(max(0, size - 2 * _OGG_PAGE))
            if not _ends_ogg(file.read()):
                raise InputError(
                    f"{label}: does not end with the last page of an Ogg stream, so the file is "
                    "cut off; copy or download it again (for a live recording, ffmpeg -i FILE -c "
                    "copy NEW adds the last page)"
                )
            return
        promised = _riff_bytes(file, head) or _matroska_bytes(head) or _caf_bytes(file, head, size)
    if size < max(MIN_SHARE * promised, (1 - _SLACK_SHARE) * promised - _SLACK_BYTES):
        raise InputError(
            f"{label}: has {size:,} of {promised:,} bytes, so the file is cut off; copy or "
            "download it again"
        )


def mp3_seconds(source: Path | bytes, label: str) -> float:
    """Return the length of an MP3, without encoder padding, from the frame count in its first
    frame.

    Returns:
        Length in seconds; 0 if there is no frame count, as with a constant bit rate.

    Raises:
        InputError: if the file cannot be opened.
    """
    with opened_bytes(source, label) as file:
        tag = file.read(10)
        file.seek(0)
        if len(tag) == 10 and tag[:3] == b"ID3":
            # The size of an ID3 tag has seven bits per byte.
            file.seek(10 + sum(byte << 7 * (3 - i) for i, byte in enumerate(tag[6:])))
        head = file.read(64)
    count = re.search(rb"(?:Xing|Info)...[\x01\x03\x05\x07\x09\x0b\x0d\x0f](....)", head, re.S)
    count = count or re.search(rb"VBRI.{10}(....)", head, re.S)
    if count is None or head[0] != 0xFF or head[2] >> 2 & 3 == 3:
        return 0.0
    version = head[1] >> 3 & 3
    rate = (44_100, 48_000, 32_000)[head[2] >> 2 & 3] >> (0 if version == 3 else 1 + (version == 0))
    frames = max(0, int.from_bytes(count[1], "big") - _MPEG_DELAY)
    return frames * (1152 if version == 3 else 576) / rate


def is_joined_ogg(source: Path | bytes, label: str) -> bool:
    """Whether an Ogg file has one stream after another, like the output of ``cat a.ogg b.ogg``.

    Raises:
        InputError: if the file cannot be opened.
    """
    with opened_bytes(source, label) as file:
        if file.read(4) != b"OggS":
            return False
        file.seek(0)
        begun, rest = False, b""
        while piece := file.read(_PIECE_BYTES):
            data = rest + piece
            # Multiplexed streams all begin before the second page of any of them.
            if not begun and (later := _OGG_LATER_PAGE.search(data)):
                begun, data = True, data[later.end() :]
            if begun and _OGG_FIRST_PAGE.search(data):
                return True
            rest = data[-5:]  # the marker of a page may be split between two pieces
    return False


def lacks_ogg_pages(source: Path | bytes, label: str) -> bool:
    """Whether pages are missing within an Ogg file, as in some recordings of network streams.

    Raises:
        InputError: if the file cannot be opened.
    """
    numbers: dict[bytes, int] = {}
    with opened_bytes(source, label) as file:
        if file.read(4) != b"OggS":
            return False
        file.seek(0)
        rest = b""
        while (piece := file.read(_PIECE_BYTES)) and len(numbers) <= _OGG_STREAMS:
            data, end = rest + piece, 0
            for page in _OGG_NUMBER.finditer(data):
                number, end = int.from_bytes(page[2], "little"), page.end()
                if number > numbers.get(page[1], number) + 1:
                    return True
                numbers[page[1]] = number
            rest = data[max(end, len(data) - 21) :]  # a page header may be split between two pieces
    return False


def _riff_bytes(file: BinaryIO, head: bytes) -> int:
    """Return the size in bytes that a header promises for a WAV up to the end of its samples, or
    for an AVI; 0 for other formats or if unknown."""
    if len(head) < 12 or head[:4] != b"RIFF" or head[8:12] not in (b"WAVE", b"AVI "):
        return 0
    end = 12
    for _ in range(_RIFF_CHUNKS if head[8:12] == b"WAVE" else 0):
        file.seek(end)
        chunk = file.read(8)
        if len(chunk) < 8:
            break
        length = struct.unpack("<I", chunk[4:])[0]
        end += 8 + length
        if chunk[:4] == b"data":
            if 0 < length < _PIPED_BYTES:
                return end
            break
        end += length % 2
    promised = struct.unpack("<I", head[4:8])[0] + 8
    return promised if promised < _PIPED_BYTES else 0


def _matroska_bytes(head: bytes) -> int:
    """Return the size in bytes that a Matroska or WebM header promises; 0 for other formats and
    live recordings."""
    if head[:4] != b"\x1a\x45\xdf\xa3":
        return 0
    about, start = _vint(head, 4)
    segment = start + about
    if head[segment : segment + 4] != b"\x18\x53\x80\x67":
        return 0
    size, start = _vint(head, segment + 4)
    return start + size if size else 0


def _vint(head: bytes, place: int) -> tuple[int, int]:
    """Read a size in Matroska's encoding; return the size (0 if unknown) and the position after
    it."""
    if place >= len(head) or not head[place]:
        return 0, place
    length = 9 - head[place].bit_length()
    value = int.from_bytes(head[place : place + length], "big") & ~(1 << 7 * length)
    unknown = (1 << 7 * length) - 1
    return 0 if value == unknown else value, place + length


def _caf_bytes(file: BinaryIO, head: bytes, size: int) -> int:
    """Return the size in bytes that a CAF file should have: the end of the last chunk that begins
    in it; 0 for other formats."""
    end = 8
    if head[:4] != b"caff":
        return 0
    for _ in range(_CAF_CHUNKS):
        file.seek(end)
        header = file.read(12)
        if end >= size or len(header) < 12:
            break
        length = struct.unpack(">q", header[4:])[0]
        if length < 0:  # this chunk extends to the end of the file
            break
        end += 12 + length
    return end


def _ends_ogg(tail: bytes) -> bool:
    """Whether the last page in these bytes is complete and ends its stream."""
    page = tail[tail.rfind(b"OggS") :]
    if len(page) < 27 or not page[5] & _OGG_END:
        return False
    table = page[27 : 27 + page[26]]
    return len(page) >= 27 + page[26] + sum(table)
