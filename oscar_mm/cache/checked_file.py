"""A safetensors file with a checksum over every byte, written as a whole or not at all.

The file's metadata holds a SHA-256 of the whole file, computed with zeros in the checksum's own
place. Anything that reads safetensors can read the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oscar_mm.errors import InputError
from oscar_mm.files import whole_file

_NAME = "oscar_mm.sha256"
_BLANK = "0" * 64
# Unique: within any other text of the header, quotes are escaped.
_PLACE = f'"{_NAME}":"'.encode()
_MAX_HEADER = 1 << 24
"""Bytes; a text of a million tokens has room. What is parsed may take twenty times as much."""
_SHOWN = 200
"""Characters of what others' errors and files say."""


class Kind(NamedTuple):
    """Of a tensor: its dtype as safetensors calls it ("U8", "I64", "BF16") and its shape."""

    dtype: str
    shape: tuple[int, ...]


Accept = Callable[[dict[str, str], dict[str, Kind]], None]
Content = tuple[dict[str, torch.Tensor], dict[str, str]]


def write_checked(
    path: str | Path, tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str]
) -> None:
    """Write tensors and texts, readable by the owner only; an old file stays until all is on disk.

    Raises:
        InputError: the file cannot be written, or the texts are too long to be read again; nothing
            is left of it.
    """
    path = Path(path)
    try:
        with whole_file(path, private=True) as part:
            save_file(dict(tensors), part, {**texts, _NAME: _BLANK})
            with part.open("r+b") as file:
                if int.from_bytes(file.read(8), "little") > _MAX_HEADER:
                    raise InputError(
                        f"{path}: cannot be written: names and texts of a file may take "
                        f"{_MAX_HEADER:,} bytes"
                    )
                file.seek(0)
                digest, place = _digest(file, _header(file, path)[0])
                file.seek(place)
                file.write(digest.encode())
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be written: {_reason(error)}") from None


def read_checked(path: str | Path, accept: Accept) -> Content:
    """Tensors, on the CPU, and texts of a file that ``write_checked`` wrote.

    The checksum finds accidents, not forgers: anyone can compute it.

    Args:
        accept: looks at the texts and at the tensors' kinds and raises if they will not do: before
            more than the header is read.

    Raises:
        InputError: the file cannot be read, is none of ours, truncated or altered.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            header, parsed = _header(file, path)
            texts = _texts(header, parsed, path)
            kinds = _kinds(parsed, path)
            accept(texts, kinds)
            digest, _ = _digest(file, header)
        if digest != texts[_NAME]:
            raise InputError(f"{path}: was altered since it was saved (its checksum is wrong)")
        return load_file(path), texts
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read: {_reason(error)}") from None


@contextmanager
def _as_no_safetensors(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise InputError(f"{path}: is not a safetensors file") from None


def _header(file: BinaryIO, path: Path) -> tuple[bytes, dict[str, Any]]:
    """The header's bytes, and as JSON; the file's size fits what they say."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 2 <= length <= _MAX_HEADER:
        raise InputError(f"{path}: is not a safetensors file")
    header = file.read(length)
    if header[:1] != b"{":
        raise InputError(f"{path}: is not a safetensors file")
    if len(header) < length:
        raise InputError(f"{path}: is truncated: {size:,} bytes end within its header")
    with _as_no_safetensors(path):
        parsed = json.loads(header, object_pairs_hook=_unique)
        ends = [int(x["data_offsets"][1]) for name, x in parsed.items() if name[:2] != "__"]
    whole = 8 + length + max(ends, default=0)
    if size != whole:
        state = "is truncated" if size < whole else "goes on behind its end"
        raise InputError(f"{path}: {state}: {size:,} bytes, where its header says {whole:,}")
    return header, parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a name that is there twice, two parsers may see different entries."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _texts(header: bytes, parsed: dict[str, Any], path: Path) -> dict[str, str]:
    texts = parsed.get("__metadata__", {})
    usable = isinstance(texts, dict) and all(isinstance(x, str) for x in texts.values())
    if not usable or len(texts.get(_NAME, "")) != len(_BLANK) or header.count(_PLACE) != 1:
        raise InputError(f"{path}: is a safetensors file, but none that oscar_mm saved")
    return texts


def _kinds(parsed: dict[str, Any], path: Path) -> dict[str, Kind]:
    with _as_no_safetensors(path):
        return {
            name: Kind(entry["dtype"], tuple(entry["shape"]))
            for name, entry in parsed.items()
            if name != "__metadata__"
        }


def _digest(file: BinaryIO, header: bytes) -> tuple[str, int]:
    """SHA-256 of a file without its checksum, and the checksum's place in the file."""
    place = header.index(_PLACE) + len(_PLACE)
    blank = header[:place] + _BLANK.encode() + header[place + len(_BLANK) :]
    checksum = hashlib.sha256(len(header).to_bytes(8, "little") + blank)
    file.seek(8 + len(header))
    hashlib.file_digest(file, lambda: checksum)  # pyright: ignore[reportArgumentType] is a file
    return checksum.hexdigest(), 8 + place


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)[:_SHOWN]
