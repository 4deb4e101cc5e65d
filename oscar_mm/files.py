"""Files as a whole: plain text that a user names, and files written completely or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from oscar_mm.errors import InputError


def read_text(path: Path, argument: str = "--text") -> str:
    """The text of a file.

    Args:
        path: of the file, UTF-8.
        argument: for errors.

    Raises:
        InputError: no such file, no text, or an empty one.
    """
    if not path.is_file():
        what = "is a folder; give a file of text" if path.is_dir() else "no such file"
        raise InputError(f"{argument} {path}: {what}")
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{argument} {path}: is no text in UTF-8") from None
    except OSError as error:
        raise InputError(f"{argument} {path}: {error.strerror or error}") from error
    if not text.strip():
        raise InputError(f"{argument} {path}: is empty")
    return text


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """A block that writes a file: what the system says against it names the file.

    Raises:
        InputError: in place of an ``OSError``, such as that of a full disk.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None


@contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[Path]:
    """An empty file in the same folder, to write to; at the block's end it takes the place.

    By then it is on the disk: whatever happens, ``path`` is the old file or the new one, and after
    an error in the block the old one, with nothing else left behind.

    Args:
        path: what to write or replace; its folder exists. Of a link, what it leads to.
        private: the owner alone may read it; else who may is up to the process's umask.

    Raises:
        OSError: it cannot be written, or is there and no file, like /dev/null.
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
    with suppress(OSError):  # a folder cannot be opened everywhere
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
