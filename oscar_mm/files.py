"""Read text files that users name, and write files completely or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from oscar_mm.errors import InputError


def read_text(path: Path, argument: str = "--text") -> str:
    """Return the text of a UTF-8 file.

    Args:
        path: the file.
        argument: name of the argument in error messages.

    Raises:
        InputError: if the file does not exist, is not UTF-8, or is empty.
    """
    if not path.is_file():
        what = "is a folder; pass a text file" if path.is_dir() else "no such file"
        raise InputError(f"{argument} {path}: {what}")
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{argument} {path}: is not valid UTF-8 text") from None
    except OSError as error:
        raise InputError(f"{argument} {path}: {error.strerror or error}") from error
    if not text.strip():
        raise InputError(f"{argument} {path}: is empty")
    return text


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Convert an OSError raised in a block that writes a file to an error that names the file.

    Raises:
        InputError: if the block raises an ``OSError``, for example because the disk is full.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None


@contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield the path of an empty new file that replaces ``path`` at the end of the block.

    The new file is in the same folder and is flushed to disk before it replaces the old one, so
    ``path`` is always a complete file. If the block raises an error, the old file is kept and the
    new one is removed.

    Args:
        path: file to write or replace, in an existing folder. Links are followed.
        private: whether only the owner may read the file; otherwise the process's umask decides.

    Raises:
        OSError: if the file cannot be written, or ``path`` exists and is not a regular file, such
            as /dev/null.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        why = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(why, os.strerror(why), str(path))
    part = path.parent / f".{path.name[:50]}.{secrets.token_hex(8)}.part"
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666))
    try:
        yield part
        with part.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # Some systems cannot open folders.
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
