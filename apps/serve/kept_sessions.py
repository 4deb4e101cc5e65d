"""KeptSessions: realtime sessions without a connection, to which their clients may return by id."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from oscar_mm.apps.serve.kept_responses import MAX_BYTES

if TYPE_CHECKING:
    from oscar_mm.apps.serve.realtime_items import RealtimeItems
    from oscar_mm.tool_parsers.offer import ToolOffer


@dataclass(frozen=True, eq=False)
class KeptSession:
    """State of a session between two connections.

    Attributes:
        items: its items, and the chat that has read them.
        settings: its settings in the API's fields, with its unguessable id.
        tools: tools that its answers may call.
        address: address of its latest client, see ``client_of``.
        is_pinned: whether its cache has a part of the next question, and so cannot move to disk.
    """

    items: RealtimeItems
    settings: dict[str, Any]
    tools: ToolOffer | None
    address: str
    is_pinned: bool = False

    @property
    def id(self) -> str:
        """The id of the session."""
        return self.settings["id"]

    @cached_property
    def size(self) -> int:
        """Number of bytes of its settings and items, without the cache."""
        return len(json.dumps(self.settings)) + self.items.size

    def close(self) -> None:
        """Free the chat."""
        self.items.close()


class KeptSessions:
    """Store of sessions by id, of at most ``MAX_BYTES`` together; any thread may use it.

    If there are too many, the client that has most of them loses its oldest one.

    Args:
        limit: maximum number of sessions.
    """

    def __init__(self, limit: int) -> None:
        self._kept: dict[str, KeptSession] = {}
        self._limit, self._lock, self._closed = limit, threading.Lock(), False

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._kept)

    def add(self, session: KeptSession) -> None:
        """Store a session, and close those that exceed the bounds, perhaps the session itself."""
        dropped = list[KeptSession]()
        with self._lock:
            self._kept[session.id] = session
            while (surplus := self._surplus()) is not None:
                dropped.append(self._kept.pop(surplus.id))
        for one in dropped:
            one.close()

    def _surplus(self) -> KeptSession | None:
        """Return the oldest session of the client with the most bytes, or with the most sessions if
        their bytes fit; None if all fit."""
        by_bytes = sum(one.size for one in self._kept.values()) > MAX_BYTES
        if not (by_bytes or self._closed or len(self._kept) > self._limit):
            return None
        shares = Counter[str]()
        for one in self._kept.values():
            shares[one.address] += one.size if by_bytes else 1
        most = max(shares, key=lambda address: shares[address], default=None)
        return next((one for one in self._kept.values() if one.address == most), None)

    def find(self, key: str) -> KeptSession | None:
        """Return the session with an id, which stays stored; None if there is none."""
        return self._kept.get(key)

    def take(self, session: KeptSession) -> bool:
        """Remove a session, and return whether it was stored; the caller resumes or closes it."""
        with self._lock:
            if self._kept.get(session.id) is not session:
                return False
            del self._kept[session.id]
            return True

    def expire(self, session: KeptSession) -> None:
        """Close a session unless its client has returned meanwhile."""
        if self.take(session):
            session.close()

    def give_way(self, *, spills: bool) -> bool:
        """Close the oldest session whose memory nothing else can free.

        Args:
            spills: whether chats are moved to disk when memory runs short.

        Returns:
            whether there was one.
        """
        stuck = (one for one in [*self._kept.values()] if not spills or one.is_pinned)
        if (oldest := next(stuck, None)) is None:
            return False
        self.expire(oldest)
        return True

    def close(self) -> None:
        """Close all sessions, also those that are added later."""
        with self._lock:
            self._closed = True
            sessions, self._kept = self._kept, {}
        for one in sessions.values():
            one.close()
