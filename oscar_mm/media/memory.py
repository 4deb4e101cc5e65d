"""DecodingMemory: make requests wait so that decoding stays within a memory limit."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_POLL_S = 0.1
"""Seconds between checks of whether a waiting request was cancelled."""
_TRIM_BYTES = 1 << 26
"""Total number of bytes that requests must have used before freed memory is returned to the
system."""
_TRIM_S = 1.0
"""Seconds between the end of the last request and the return of memory."""


class DecodingMemory:
    """Limits the memory that all requests together take for decoding, first come, first served.

    A request reserves all of its memory at once, so that no request waits for more memory while it
    keeps some from others.

    Attributes:
        used: number of bytes that requests currently have reserved.
    """

    def __init__(self) -> None:
        self.used = 0
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._since_trim = 0

    @contextmanager
    def taken(self, count: int, limit: int, check_wanted: Callable[[], None]) -> Iterator[None]:
        """Reserve ``count`` bytes within the block, after waiting until they are available.

        A request that needs more than ``limit`` by itself waits until no memory is reserved.

        Args:
            count: number of bytes for the request, which does not wait if this is 0.
            limit: maximum number of bytes for all requests together.
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
                # A second later, the caller will have released its media.
                trim = threading.Timer(_TRIM_S, _trim)
                trim.daemon = True
                trim.start()


def _trim() -> None:
    """Return freed memory, which glibc keeps in per-thread arenas, to the system."""
    with suppress(OSError, AttributeError):  # Only glibc has malloc_trim.
        ctypes.CDLL(None).malloc_trim(0)


decoding_memory = DecodingMemory()
"""The instance that all requests of this process share."""


def _begin_anew() -> None:
    decoding_memory.__init__()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)  # A child does not inherit requests.
