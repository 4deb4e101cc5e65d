"""KnownMedia: media that clients have named by a uuid and need not send again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

from oscar_mm.media.source import NamedBytes
from oscar_mm.modality import Modality

MAX_UUID_CHARACTERS = 256
MAX_BYTES = 256 << 20
"""Most bytes of all media that are kept."""
MAX_MEDIA = 1 << 16
"""Most media that are kept."""


class KnownMedium(NamedTuple):
    """The bytes of a file, and what it is."""

    modality: Modality
    data: NamedBytes


class KnownMedia:
    """The media that were named lately, by the salt of their request and their uuid.

    Nobody gets a medium who does not know both. A medium that is sent again with its uuid replaces
    the one that was kept, so that an answer is never about other bytes than were sent.

    Args:
        max_bytes: of all media; the least recently used ones go.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._media: OrderedDict[tuple[str, str], KnownMedium] = OrderedDict()
        self._max_bytes, self._bytes, self._lock = max_bytes, 0, threading.Lock()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._media)

    def add(self, salt: str, uuid: str, medium: KnownMedium) -> None:
        """Keep a medium, unless it is larger than all of them may be."""
        with self._lock:
            self._remove((salt, uuid))
            if len(medium.data) > self._max_bytes:
                return
            self._media[salt, uuid] = medium
            self._bytes += len(medium.data)
            while self._bytes > self._max_bytes or len(self._media) > MAX_MEDIA:
                self._remove(next(iter(self._media)))

    def get(self, salt: str, uuid: str) -> KnownMedium | None:
        """The medium of a salt and a uuid, which stays for longer then; None if it is not kept."""
        with self._lock:
            if (medium := self._media.get((salt, uuid))) is not None:
                self._media.move_to_end((salt, uuid))
            return medium

    def _remove(self, key: tuple[str, str]) -> None:
        if (medium := self._media.pop(key, None)) is not None:
            self._bytes -= len(medium.data)
