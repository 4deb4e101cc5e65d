"""What a visitor may send: which files, how many, how large, from where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oscar_mm.errors import InputError
from oscar_mm.media.limits import MediaLimits
from oscar_mm.media.source import KIND, SUFFIXES

LIMITS = MediaLimits(
    max_request_pixels=400_000_000,
    max_file_bytes=32 * 2**20,
    max_video_seconds=120,
    max_video_frames=128,
    max_video_pixels=64_000_000,
    max_audio_seconds=300,
)
MAX_FILES = 24
"""Of one message."""
MAX_CHAT_BYTES = 2**30
"""Of one file that is uploaded at all: a saved conversation may be longer than any medium."""
MAX_STORED_BYTES = 4 * 2**30
"""Of all files that are on the server."""
MAX_NEW_TOKENS = 1024
"""Of one answer, without a thinking model's reasoning."""
MAX_CHARACTERS = 4000
"""Of one message, or of the system prompt."""


def by_kind(files: Sequence[str | Path], folders: Sequence[Path]) -> dict[str, list[Path]]:
    """Files of a message as arguments of ``Chat.stream``.

    Args:
        files: their paths.
        folders: the only ones that are read: uploads, and the examples that are shipped.

    Raises:
        InputError: too many, not a medium, or from elsewhere.
    """
    if len(files) > MAX_FILES:
        raise InputError(f"{len(files)} files are more than the {MAX_FILES} of one message")
    kinds: dict[str, list[Path]] = {kind: [] for kind in SUFFIXES}
    for file in files:
        path = uploaded(file, folders)
        kind = KIND.get(path.suffix.lower())
        if kind is None:
            raise InputError(f"{path.name}: is no image, video or recording that is known here")
        if path.stat().st_size > LIMITS.max_file_bytes:
            mebibytes = LIMITS.max_file_bytes // 2**20
            raise InputError(f"{path.name}: is larger than the {mebibytes} MiB of one file")
        kinds[kind].append(path)
    return kinds


def uploaded(file: str | Path, folders: Sequence[Path]) -> Path:
    """The file's path, links followed.

    Raises:
        InputError: it is in none of the folders, or not there.
    """
    path = Path(file).resolve()
    if not any(path.is_relative_to(folder.resolve()) for folder in folders):
        raise InputError(f"{path.name}: was not uploaded here")
    if not path.is_file():
        raise InputError(f"{path.name}: is not here any more; upload it again")
    return path


def checked_text(name: str, text: str) -> str:
    """The text, without spaces around it.

    Raises:
        InputError: it is too long.
    """
    if len(text) > MAX_CHARACTERS:
        raise InputError(
            f"{name}: {len(text):,} characters are more than the {MAX_CHARACTERS:,} allowed here"
        )
    return text.strip()
