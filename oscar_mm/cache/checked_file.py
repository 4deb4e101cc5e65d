"""Safetensors files that are written atomically and have a checksum of all content.

The file's metadata contains a SHA-256 of its other metadata, and of the tensors' names, dtypes,
shapes and bytes. Any reader of safetensors can read the file.

Older files, which can still be read, contain a SHA-256 of the entire file instead, computed with
zeros in place of the checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from oscar_mm.errors import InputError
from oscar_mm.files import whole_file

_NAME = "oscar_mm.digest"
_OLD_NAME = "oscar_mm.sha256"
_BLANK = "0" * 64
# Both patterns below match only real keys, since quotes within a text are escaped.
_OLD_PLACE = f'"{_OLD_NAME}":"'.encode()
_END_OF_TENSOR = re.compile(rb'"data_offsets":\[\d+,(\d+)\]')
_MAX_HEADER = 1 << 24
"""Maximum header size in bytes; enough for a text of a million tokens. The parsed header may take
twenty times as much memory."""
_SHOWN = 200
"""Maximum number of characters shown from other libraries' errors."""


class Kind(NamedTuple):
    """Dtype of a tensor by its safetensors name ("U8", "I64", "BF16"), and its shape."""

    dtype: str
    shape: tuple[int, ...]


Accept = Callable[[dict[str, str], dict[str, Kind]], None]
Content = tuple[dict[str, torch.Tensor], dict[str, str]]


def write_checked(
    path: str | Path, tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str]
) -> None:
    """Write tensors and texts to a file that only its owner can read.

    An existing file is replaced only when the new file is complete.

    Raises:
        InputError: if the file cannot be written, or the texts are too long to be read again; then
            no partial file remains.
    """
    path = Path(path)
    try:
        with whole_file(path, private=True) as part:
            save_file(dict(tensors), part, {**texts, _NAME: _digest(tensors, texts)})
            with part.open("rb") as file:
                if int.from_bytes(file.read(8), "little") > _MAX_HEADER:
                    raise InputError(
                        f"{path}: cannot be written: its names and texts take more than "
                        f"{_MAX_HEADER:,} bytes"
                    )
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be written: {_reason(error)}") from None


def read_checked(path: str | Path, accept: Accept) -> Content:
    """Read a file written by ``write_checked`` and return its tensors, on the CPU, and its texts.

    The checksum detects accidental changes, not forgery: anyone can compute it.

    Args:
        path: file to read.
        accept: callback that gets the texts and the tensors' kinds when only the header has been
            read; it raises an error to reject the file.

    Raises:
        InputError: if the file cannot be read, was not written by oscar_mm, is truncated or has
            been altered.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            header = _header(file, path)
            with safe_open(path, "pt") as content:
                texts = content.metadata() or {}
                old = _NAME not in texts
                digest = texts.pop(_OLD_NAME if old else _NAME, "")
                if len(digest) != len(_BLANK) or (old and header.count(_OLD_PLACE) != 1):
                    raise InputError(f"{path} is a safetensors file, but oscar_mm did not save it")
                slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
                kinds = {
                    name: Kind(one.get_dtype(), tuple(one.get_shape()))
                    for name, one in slices.items()
                }
                accept(texts, kinds)
                tensors = {name: content.get_tensor(name) for name in kinds}
            found = _old_digest(file, header) if old else _digest(tensors, texts)
        if digest != found:
            raise InputError(f"{path} was altered after it was saved (checksum mismatch)")
        return tensors, texts
    except SafetensorError:
        raise _refusal(path, header) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {_reason(error)}") from None


def _header(file: BinaryIO, path: Path) -> bytes:
    """Return the raw header of a file; only its length is checked, since safetensors parses it."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 2 <= length <= _MAX_HEADER:
        raise InputError(f"{path} is not a safetensors file")
    header = file.read(length)
    if header[:1] != b"{":
        raise InputError(f"{path} is not a safetensors file")
    if len(header) < length:
        raise InputError(f"{path} is truncated: it ends within its header, after {size:,} bytes")
    return header


def _refusal(path: Path, header: bytes) -> InputError:
    """Return the error for a file that safetensors cannot read."""
    size, ends = path.stat().st_size, [int(end) for end in _END_OF_TENSOR.findall(header)]
    whole = 8 + len(header) + max(ends, default=0)
    if not ends or size == whole:
        return InputError(f"{path} is not a safetensors file")
    state = "is truncated" if size < whole else "has extra bytes at its end"
    return InputError(f"{path} {state}: {size:,} bytes, but its header says {whole:,}")


def _digest(tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str]) -> str:
    """Return a SHA-256 of the texts and of the tensors' names, dtypes, shapes and bytes."""
    kinds = {name: [str(tensor.dtype), [*tensor.shape]] for name, tensor in tensors.items()}
    checksum = hashlib.sha256(json.dumps([dict(texts), kinds], sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        # A tensor of one element is contiguous whatever its strides are.
        flat = tensor.as_strided((tensor.numel(),), (1,))
        checksum.update(flat.view(torch.uint8).numpy().data)
    return checksum.hexdigest()


def _old_digest(file: BinaryIO, header: bytes) -> str:
    """Return the SHA-256 of an entire file, computed with zeros in place of its checksum."""
    place = header.index(_OLD_PLACE) + len(_OLD_PLACE)
    blank = header[:place] + _BLANK.encode() + header[place + len(_BLANK) :]
    checksum = hashlib.sha256(len(header).to_bytes(8, "little") + blank)
    file.seek(8 + len(header))
    hashlib.file_digest(file, lambda: checksum)  # pyright: ignore[reportArgumentType] is a file
    return checksum.hexdigest()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)[:_SHOWN]
