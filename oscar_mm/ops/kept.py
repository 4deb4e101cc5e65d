"""What is kept on disk between processes: compiled kernels, and whether they can be trusted.

A folder of the user: ``$OSCAR_MM_CACHE``, or ``oscar_mm`` in the system's folder for caches. The
key of a file is the hash of all that went into it, so that nothing in it can be out of date; the
folder may be deleted at any time. Several processes may use it at once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from oscar_mm.whole_file import whole_file


def cache_folder() -> Path | None:
    """The folder; None if the user has no folder of their own."""
    chosen = os.environ.get("OSCAR_MM_CACHE")
    if chosen:
        return Path(chosen)
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    return Path(base) / "oscar_mm"


def key_of(content: Any) -> str:
    """Hash of what a file depends on, as JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load(path: Path, key: str) -> bytes | None:
    """What ``keep`` wrote under a key; None if there is no file, or it is not as written."""
    try:
        checksum, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return content if checksum == _checksum(key, content) else None


def keep(path: Path, key: str, content: bytes) -> None:
    """Write a file in one step: another process sees all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, private=True) as part:
            part.write_bytes(_checksum(key, content) + b"\n" + content)
    except OSError as error:
        _warn_not_kept(path.parent, error.strerror)


def _checksum(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).hexdigest().encode()


@functools.cache
def _warn_not_kept(folder: Path, reason: str | None) -> None:
    """Say it once, not with every kernel."""
    warnings.warn(
        f"compiled kernels cannot be kept in {folder} ({reason}) and will be compiled and checked "
        "again by every process; set OSCAR_MM_CACHE to a folder that can be written to",
        RuntimeWarning,
        stacklevel=2,
    )
