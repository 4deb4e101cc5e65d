"""Weight files of a checkpoint: which they are, and whether they are whole, without torch."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from oscar_mm.errors import InputError

PATTERN = "model*.safetensors"
"""Names of weight files."""
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"
_AGAIN = "delete it and download it again"


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint, which its index names if it has one.

    A file that the index names may be missing.

    Raises:
        InputError: if the index cannot be read.
    """
    index, whole = folder / _INDEX, folder / _WHOLE
    if whole.exists():  # transformers prefers it.
        return [whole]
    if not index.exists():
        return sorted(folder.glob(PATTERN))
    try:
        names = json.loads(index.read_text())["weight_map"].values()
        return sorted({folder / name for name in names})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"model {folder}: {_INDEX} is damaged; {_AGAIN}") from error


def check_files(files: list[Path]) -> None:
    """Check that weight files are there, and that each has all bytes that its header announces.

    Raises:
        InputError: if they are not; the message names the file.
    """
    for file in files:
        if not file.is_file():
            raise InputError(
                f"model {file.parent}: {file.name} is missing, but {_INDEX} names it; download it"
            )
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise InputError(f"model {file.parent}: {file.name} {_fault(file, error)}") from error


def _fault(file: Path, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or error})"
    with file.open("rb") as opened:
        start = opened.read(len(_POINTER))
    if start == _POINTER:
        return f"is a Git LFS pointer without the weights; run `git lfs pull`, or {_AGAIN}"
    if not start:
        return f"is empty; {_AGAIN}"
    # After 8 bytes with the header's length, the header is a JSON object.
    if start[8:9] not in (b"{", b""):
        return f"is damaged, since it is not a safetensors file; {_AGAIN}"
    return f"is damaged, perhaps truncated; {_AGAIN}"
