"""The key that clients of a server send, from a file or the environment."""

import os
from pathlib import Path

from oscar_mm.errors import InputError

KEY_VARIABLE = "OSCAR_MM_API_KEY"
_KEY_BYTES = 4096
"""Largest file of a key."""


def api_key(file: Path | None) -> str | None:
    """Read the key from a file or the environment; the process list would show an option.

    Raises:
        InputError: the file cannot be read, or holds no key.
    """
    name = KEY_VARIABLE if file is None else str(file)
    if file is None:
        key = os.environ.get(KEY_VARIABLE)
        if key is None:
            return None
    else:
        try:
            with file.open("rb") as opened:
                key = opened.read(_KEY_BYTES + 1).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--api-key-file {name}: cannot be read ({error})") from None
    key = key.strip()
    if not key or len(key) > _KEY_BYTES or any(character.isspace() for character in key):
        raise InputError(f"{name}: must hold one key, without spaces, and nothing else")
    return key
