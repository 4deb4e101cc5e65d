"""What is kept on disk between processes: compiled kernels, and whether they can be trusted.

A folder of the user: ``$OSCAR_MM_CACHE``, or ``oscar_mm`` in the system's folder for caches. The
key of a file is the hash of all that went into it, so that nothing in it can be out of date; the
folder may be deleted at any time. Several processes may use it at once.

What is in there runs on the GPU. So folder and files are used only if they belong to the user and
nobody else can write to them.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import stat
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
    """What ``keep`` wrote under a key; None if there is no file, it is not as written, or others
    could have written it."""
    try:
        checksum, _, content = _private_bytes(path).partition(b"\n")
    except OSError:
        return None
    return content if checksum == _checksum(key, content) else None


def keep(path: Path, key: str, content: bytes) -> None:
    """Write a file in one step: another process sees all of it or nothing."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(path.parent.stat())
        with whole_file(path, private=True) as part:
            part.write_bytes(_checksum(key, content) + b"\n" + content)
    except OSError as error:
        _warn_not_kept(path.parent, error.strerror)


def _private_bytes(path: Path) -> bytes:
    """Of a file in a folder; PermissionError unless both are the user's alone."""
    if os.name != "posix":
        return path.read_bytes()
    # The folder that was looked at is the one that is read from, whoever moves links meanwhile.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check_private(os.fstat(folder))
        file = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        _check_private(os.fstat(file))
        with open(file, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(file)


def _check_private(about: os.stat_result) -> None:
    """Raise PermissionError unless a file or folder is the user's and no one else's to write to."""
    if os.name != "posix":
        return
    if about.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "others can write to it: empty it and chmod go-w")


def _checksum(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).hexdigest().encode()


@functools.cache
def _warn_not_kept(folder: Path, reason: str | None) -> None:
    """Say it once, not with every kernel."""
    warnings.warn(
        f"compiled kernels cannot be kept in {folder} ({reason}) and will be compiled and checked "
        "again by every process; set OSCAR_MM_CACHE to a folder of your own",
        RuntimeWarning,
        stacklevel=2,
    )
