"""DecodingMemory: memory for decoding in this process, for which requests queue."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_POLL_S = 0.1
"""Seconds between two checks of a waiting request for cancellation."""
_TRIM_BYTES = 1 << 26
"""Freed memory is returned to the system after requests have used this many bytes in total."""
_TRIM_S = 1.0
"""Seconds from the end of the last request until memory is returned."""


class DecodingMemory:
    """Limit on the memory that all requests together take for decoding, first come, first served.

    A request takes all of its bytes at once, so that no request waits for more memory while others
    wait for what it already has.

    Attributes:
        used: bytes that requests have taken at present.
    """

    def __init__(self) -> None:
        self.used = 0
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._since_trim = 0

    @contextmanager
    def taken(self, count: int, limit: int, check_wanted: Callable[[], None]) -> Iterator[None]:
        """Reserve ``count`` bytes within the block, after waiting until they are available.

        A request that needs more than ``limit`` by itself waits until no other has any bytes.

        Args:
            count: bytes of the request; with 0 it does not wait.
            limit: maximum bytes of all requests together.
            check_wanted: function that raises if the request was cancelled, which ends the wait.
        """
        if not count:
            yield
            return
        self._wait(count, limit, check_wanted)
        try:
            yield
        finally:
            self._give_back(count)

    def _wait(self, count: int, limit: int, check_wanted: Callable[[], None]) -> None:
        mine = object()
        with self._changed:
            self._waiting.append(mine)
            try:
                while self._waiting[0] is not mine or (self.used and self.used + count > limit):
                    check_wanted()
                    self._changed.wait(_POLL_S)
                self.used += count
            finally:
                self._waiting.remove(mine)
                self._changed.notify_all()

    def _give_back(self, count: int) -> None:
        with self._changed:
            self.used -= count
            self._since_trim += count
            self._changed.notify_all()
            if not self.used and self._since_trim >= _TRIM_BYTES:
                self._since_trim = 0
                # A second later the caller has released its media.
                trim = threading.Timer(_TRIM_S, _trim)
                trim.daemon = True
                trim.start()


def _trim() -> None:
    """Return freed memory, which glibc keeps in an arena per thread, to the system."""
    with suppress(OSError, AttributeError):  # Only glibc has malloc_trim.
        ctypes.CDLL(None).malloc_trim(0)


decoding_memory = DecodingMemory()
"""The instance that all requests of this process share."""


def _begin_anew() -> None:
    decoding_memory.__init__()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)  # A child has none of the parent's requests.
