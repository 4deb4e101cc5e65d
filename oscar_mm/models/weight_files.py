"""Weight files of a checkpoint: which they are, and whether they are complete, without torch."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from oscar_mm.errors import InputError

NAMES = "model*.safetensors"
"""Pattern of the names of weight files."""
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"
"""First bytes of a Git LFS pointer, which is a small text file in place of the weights."""
_UNREADABLE = OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError
_AGAIN = "delete it and download it again"


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that transformers would load from a checkpoint's folder.

    They are ``model.safetensors`` alone if it exists, or else the files that the index names, some
    of which may be missing, or without an index all files of the pattern ``NAMES``.

    Raises:
        InputError: if the index cannot be read.
    """
    index, single = folder / _INDEX, folder / _SINGLE
    if single.exists():
        return [single]
    if not index.exists():
        return sorted(folder.glob(NAMES))
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        if not names or not all(name and Path(name).name == name for name in names):
            raise ValueError("it names no files of the folder")
        return sorted(folder / name for name in names)
    except _UNREADABLE as error:
        raise InputError(f"model {folder}: {_INDEX} is damaged; {_AGAIN}") from error


def check_files(files: list[Path]) -> None:
    """Check that weight files exist, and that each has all bytes that its header announces.

    Raises:
        InputError: if a file is missing or damaged; the message names it.
    """
    for file in files:
        try:
            if not file.is_file():
                raise InputError(
                    f"model {file.parent}: {file.name} is missing, but {_INDEX} names it; "
                    "download it"
                )
            with safe_open(file, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise InputError(f"model {file.parent}: {file.name} {_fault(file, error)}") from error


def _fault(file: Path, error: Exception) -> str:
    """Return what is wrong with a file that cannot be opened, and the remedy, for a message."""
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or error})"
    with file.open("rb") as opened:
        start = opened.read(len(_POINTER))
    if start == _POINTER:
        return f"is a Git LFS pointer without the weights; run `git lfs pull`, or {_AGAIN}"
    if not start:
        return f"is empty; {_AGAIN}"
    # A safetensors file begins with 8 bytes for the header's length and the header, a JSON object.
    if start[8:9] not in (b"{", b""):
        return f"is damaged, since it is not a safetensors file; {_AGAIN}"
    return f"is damaged, perhaps truncated; {_AGAIN}"
