"""KeptResponses: stored responses that later requests can continue or fetch by id."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_RESPONSES = 1024
MAX_BYTES = 256 << 20
"""Maximum total size in bytes of the stored responses' requests, including base64 media."""


@dataclass(frozen=True)
class KeptResponse:
    """A stored response and the conversation that it ends.

    Attributes:
        body: body of the response.
        messages: the conversation as chat-completions messages, without instructions.
        size: total size in bytes of the conversation's requests.
    """

    body: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    size: int


class KeptResponses:
    """LRU store of responses, keyed by their unguessable ids."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._items: dict[str, dict[str, Any]] = {}
        self._lock, self._bytes = threading.Lock(), 0

    def add(self, response: KeptResponse) -> None:
        """Store a response, unless that response alone exceeds ``MAX_BYTES``."""
        with self._lock:
            self._kept[response.body["id"]] = response
            self._items |= {item["id"]: item for item in response.body["output"]}
            self._bytes += response.size
            while len(self._kept) > MAX_RESPONSES or self._bytes > MAX_BYTES:
                self._drop(next(iter(self._kept)))

    def get(self, key: str) -> KeptResponse | None:
        """Return the response with an id; None if it is not stored."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def item(self, key: str) -> dict[str, Any] | None:
        """Return the output item with an id; None if it is not stored."""
        with self._lock:
            return self._items.get(key)

    def remove(self, key: str) -> bool:
        """Remove a response, and return whether it was stored."""
        with self._lock:
            return self._drop(key)

    def _drop(self, key: str) -> bool:
        if (dropped := self._kept.pop(key, None)) is None:
            return False
        for item in dropped.body["output"]:
            del self._items[item["id"]]
        self._bytes -= dropped.size
        return True
