"""DecodingMemory: bytes that decoding takes in this process, for which requests wait in turn."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_POLL_S = 0.1
"""Seconds after which a request that waits looks whether it is still wanted."""
_TRIM_BYTES = 1 << 26
"""Bytes of all requests since the last time from which on freed memory goes back to the system."""
_TRIM_S = 1.0
"""Seconds after the last request until it does."""


class DecodingMemory:
    """Counts the bytes that requests take for their media, and lets them wait for each other.

    The first to ask is the first to have its bytes. A request takes all of its bytes at once, so
    that none waits for more while others wait for what it has.

    Attributes:
        used: bytes that requests have now.
    """

    def __init__(self) -> None:
        self.used = 0
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._since_trim = 0

    @contextmanager
    def taken(self, count: int, most: int, check_wanted: Callable[[], None]) -> Iterator[None]:
        """Inside, the request has so many bytes. It waits until all have at most ``most`` together;
        one that alone takes more waits until no other has any.

        Args:
            count: bytes; with 0 it does not wait.
            most: bytes of all requests.
            check_wanted: raises where nobody wants the request any more, which leaves its place.
        """
        if not count:
            yield
            return
        self._wait(count, most, check_wanted)
        try:
            yield
        finally:
            self._give_back(count)

    def _wait(self, count: int, most: int, check_wanted: Callable[[], None]) -> None:
        mine = object()
        with self._changed:
            self._waiting.append(mine)
            try:
                while self._waiting[0] is not mine or (self.used and self.used + count > most):
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
                # By then the caller has let go of its media.
                trim = threading.Timer(_TRIM_S, _trim)
                trim.daemon = True
                trim.start()


def _trim() -> None:
    """Give memory that was freed back to the system: glibc keeps it for each thread."""
    with suppress(OSError, AttributeError):  # Another C library has no such function.
        ctypes.CDLL(None).malloc_trim(0)


decoding_memory = DecodingMemory()
"""That of this process."""


def _begin_anew() -> None:
    decoding_memory.__init__()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)  # Requests of other threads are not there.
