"""KnownMedia: stored media that clients can reuse by their uuid."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

from oscar_mm.media.source import NamedBytes
from oscar_mm.modality import Modality

MAX_UUID_CHARACTERS = 256
MAX_BYTES = 256 << 20
"""Maximum bytes of all stored media together."""
MAX_MEDIA = 1 << 16
"""Maximum number of stored media."""


class KnownMedium(NamedTuple):
    """The bytes of a media file, and its modality."""

    modality: Modality
    data: NamedBytes


class KnownMedia:
    """A least-recently-used store of media, by the ``cache_salt`` of their request and their uuid.

    A client needs both to use a medium. Sending a medium again with the same uuid replaces the
    stored one, so an answer is never about bytes other than those last sent.

    Args:
        max_bytes: maximum bytes of all media; beyond that, the least recently used are dropped.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._media: OrderedDict[tuple[str, str], KnownMedium] = OrderedDict()
        self._max_bytes, self._bytes, self._lock = max_bytes, 0, threading.Lock()

    def __len__(self) -> int:
        """Number of stored media."""
        return len(self._media)

    def add(self, salt: str, uuid: str, medium: KnownMedium) -> None:
        """Store a medium, unless it alone is larger than ``max_bytes``."""
        with self._lock:
            self._remove((salt, uuid))
            if len(medium.data) > self._max_bytes:
                return
            self._media[salt, uuid] = medium
            self._bytes += len(medium.data)
            while self._bytes > self._max_bytes or len(self._media) > MAX_MEDIA:
                self._remove(next(iter(self._media)))

    def get(self, salt: str, uuid: str) -> KnownMedium | None:
        """Return the medium of a salt and a uuid, and mark it as used; None if it is not stored."""
        with self._lock:
            if (medium := self._media.get((salt, uuid))) is not None:
                self._media.move_to_end((salt, uuid))
            return medium

    def _remove(self, key: tuple[str, str]) -> None:
        if (medium := self._media.pop(key, None)) is not None:
            self._bytes -= len(medium.data)
