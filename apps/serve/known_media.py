"""KnownMedia: stored media that clients can reuse by uuid."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

from oscar_mm.media.source import NamedBytes
from oscar_mm.modality import Modality

MAX_UUID_CHARACTERS = 256
MAX_BYTES = 256 << 20
"""Maximum total bytes of all stored media."""
MAX_MEDIA = 1 << 16
"""Maximum number of stored media items."""


class KnownMedium(NamedTuple):
    """A stored media file: its modality and its bytes."""

    modality: Modality
    data: NamedBytes


class KnownMedia:
    """LRU store of media, keyed by the ``cache_salt`` of the request and the uuid of the item.

    A client needs both to reuse a media item. Sending another item with the same salt and uuid
    replaces the stored item, so an answer always uses the bytes that were sent last.

    Args:
        max_bytes: maximum total bytes; beyond it, the least recently used media are dropped.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._media: OrderedDict[tuple[str, str], KnownMedium] = OrderedDict()
        self._max_bytes, self._bytes, self._lock = max_bytes, 0, threading.Lock()

    def __len__(self) -> int:
        """Return the number of stored media items."""
        return len(self._media)

    def add(self, salt: str, uuid: str, medium: KnownMedium) -> None:
        """Store a media item, unless that item alone is larger than ``max_bytes``."""
        with self._lock:
            self._remove((salt, uuid))
            if len(medium.data) > self._max_bytes:
                return
            self._media[salt, uuid] = medium
            self._bytes += len(medium.data)
            while self._bytes > self._max_bytes or len(self._media) > MAX_MEDIA:
                self._remove(next(iter(self._media)))

    def get(self, salt: str, uuid: str) -> KnownMedium | None:
        """Return the item stored for a salt and uuid, marking it as used; None if there is none."""
        with self._lock:
            if (medium := self._media.get((salt, uuid))) is not None:
                self._media.move_to_end((salt, uuid))
            return medium

    def _remove(self, key: tuple[str, str]) -> None:
        if (medium := self._media.pop(key, None)) is not None:
            self._bytes -= len(medium.data)
