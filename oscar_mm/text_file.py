"""Files of plain text that a user names."""

from __future__ import annotations

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
