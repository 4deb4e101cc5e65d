"""Check what visitors enter: number, size and kind of files, texts, and settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscar_mm.errors import InputError
from oscar_mm.media.kinds import SUFFIXES, kind_of
from oscar_mm.media.limits import MediaLimits
from oscar_mm.policy import KVPolicy

LIMITS = MediaLimits(
    max_request_pixels=400_000_000,
    max_file_bytes=32 * 2**20,
    max_video_seconds=120,
    max_video_frames=128,
    max_video_pixels=64_000_000,
    max_audio_seconds=300,
)
MAX_FILES = 24
"""Maximum number of files in a message."""
MAX_CHAT_BYTES = 2**30
"""Maximum bytes of an upload; the largest uploads are saved conversations, not media files."""
MAX_STORED_BYTES = 4 * 2**30
"""Maximum total bytes of all files on the server."""
MAX_NEW_TOKENS = 1024
"""Maximum tokens of an answer, not counting a thinking model's reasoning."""
MAX_CHARACTERS = 100_000
"""Maximum characters of a message or system prompt; the model's context may allow fewer."""
AS_PRESET = "preset"
"""Choice that keeps the bit widths of the preset."""
WIDTHS = ("2", "3/2", "4/2", "4", "16")
"""Bit widths that the page offers, as keys/values; one number if they are the same."""


def files_by_kind(files: Sequence[str | Path], folders: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files of a message by kind, as arguments for ``Chat.stream``.

    Args:
        files: paths of the files.
        folders: folders from which files may be read: uploads and examples.

    Raises:
        InputError: if there are too many files, or a file is not a media file or not in
            ``folders``.
    """
    if len(files) > MAX_FILES:
        raise InputError(f"{len(files)} files are more than the {MAX_FILES} allowed in one message")
    kinds: dict[str, list[Path]] = {kind: [] for kind in SUFFIXES}
    for file in files:
        path = upload_path(file, folders)
        if path.stat().st_size > LIMITS.max_file_bytes:
            mebibytes = LIMITS.max_file_bytes // 2**20
            raise InputError(f"{path.name} is larger than the {mebibytes} MiB allowed for one file")
        kind = kind_of(path)
        if kind is None:
            raise InputError(
                f"{path.name} is not an image, video or recording in a supported format"
            )
        kinds[kind].append(path)
    return kinds


def upload_path(file: str | Path, folders: Sequence[Path]) -> Path:
    """Return the resolved path of an uploaded file.

    Raises:
        InputError: if the file is not in any of the folders, or does not exist.
    """
    path = Path(file).resolve()
    if not any(path.is_relative_to(folder.resolve()) for folder in folders):
        raise InputError(f"{path.name} was not uploaded here: upload the file first")
    if not path.is_file():
        raise InputError(f"{path.name} is no longer available: upload the file again")
    return path


def bounded_text(name: str, text: str) -> str:
    """Return a text without surrounding white space, after checking its length.

    Raises:
        InputError: if the text is too long.
    """
    if len(text) > MAX_CHARACTERS:
        raise InputError(
            f"{name}: {len(text):,} characters are more than the {MAX_CHARACTERS:,} allowed here"
        )
    return text.strip()


def place_files(text: str, names: Sequence[str]) -> list[str | int]:
    """Split a message at the names of its files in brackets: "Before: [a.png] after: [b.png]".

    Args:
        text: text of the message.
        names: names of the files; of several files with a name, the first one is placed first.

    Returns:
        Texts and indexes of files, in order. Files that the text does not name come first.
    """
    left = dict(enumerate(names))
    parts: list[str | int] = []
    placed = "|".join(re.escape(f"[{name}]") for name in names)
    for piece in re.split(f"({placed})", text) if placed else [text]:
        index = next((index for index, name in left.items() if piece == f"[{name}]"), None)
        if index is None:
            parts.append(piece)
        else:
            del left[index]
            parts.append(index)
    found: list[str | int] = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] = f"{found[-1]}{part}"
        else:
            found.append(part)
    stripped = (part.strip() if isinstance(part, str) else part for part in found)
    return [*left, *(part for part in stripped if part != "")]


def stored_bytes(folder: Path) -> int:
    """Return the total size in bytes of the files in a folder tree, ignoring files that vanish."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


@dataclass(frozen=True)
class SessionSettings:
    """A visitor's settings for a conversation.

    Attributes:
        policy: policy for keys and values.
        preset: name of the preset on which the policy is based.
        system: system prompt, or None.
        compare: whether to compare with a 16-bit cache.
    """

    policy: KVPolicy
    preset: str
    system: str | None = None
    compare: bool = False

    @classmethod
    def of_fields(
        cls, preset: str, bits: Mapping[str, str], window: float, system: str | None, compare: bool
    ) -> SessionSettings:
        """Convert the values of the page's fields to settings, after checking the values.

        Args:
            preset: name of a preset.
            bits: one of WIDTHS, or AS_PRESET, for each modality.
            window: number of latest tokens to store in 16-bit precision.
            system: system prompt; empty or None for none.
            compare: whether to compare with a 16-bit cache.

        Raises:
            InputError: if a value is not allowed.
        """
        widths = {name: _bits(text) for name, text in bits.items() if text != AS_PRESET}
        policy = KVPolicy.preset(preset, bits=widths, window=as_int(window))
        text = bounded_text("system prompt", system or "")
        return cls(policy, preset, text or None, bool(compare))

    @property
    def name(self) -> str:
        """Display name of the policy; an asterisk marks a changed preset."""
        return self.preset if self.policy == KVPolicy.preset(self.preset) else f"{self.preset}*"


def as_int(value: Any) -> Any:
    """Convert an integral float, such as a slider's 32.0, to int; return other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bits(text: str) -> tuple[int, int]:
    if text not in WIDTHS:
        raise InputError(f"bits {text!r}: must be one of {', '.join(WIDTHS)} or {AS_PRESET!r}")
    first, *second = map(int, text.split("/"))
    return first, second[0] if second else first
