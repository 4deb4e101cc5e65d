"""FairLock: a re-entrant lock that threads get in the order in which they ask for it."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """As ``threading.RLock``, but first come, first served.

    A thread that releases a ``threading.RLock`` and takes it again at once, as one that makes step
    after step does, nearly always gets it before those that wait.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    @property
    def is_owned(self) -> bool:
        """Whether the calling thread has the lock."""
        return self._owner == threading.get_ident()

    @property
    def is_contended(self) -> bool:
        """Whether a thread waits for the lock."""
        return bool(self._waiting)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; whether this thread has it now.

        Args:
            blocking: wait for it.
            timeout: most seconds to wait; -1 for no bound.
        """
        thread = threading.get_ident()
        if self._owner == thread:
            self._depth += 1
            return True
        # A finalizer, which does not block, may come here while its own thread has the guard.
        if not self._guard.acquire(blocking):
            return False
        try:
            if self._owner is None:
                self._owner, self._depth = thread, 1
                return True
            if not blocking:
                return False
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((thread, turn))
        finally:
            self._guard.release()
        try:
            if turn.acquire(timeout=timeout):
                return True
        except BaseException:
            if not self._leave(thread, turn):
                self.release()
            raise
        return not self._leave(thread, turn)

    def release(self) -> None:
        """Give up the lock, once for each time it was taken; the next thread has it then.

        Raises:
            RuntimeError: this thread does not have it.
        """
        if self._owner != threading.get_ident():
            raise RuntimeError("a thread can release only a lock that it has")
        if self._depth > 1:
            self._depth -= 1
            return
        with self._guard:
            if self._waiting:
                self._owner, turn = self._waiting.popleft()
                turn.release()
            else:
                self._owner = None

    def __enter__(self) -> bool:
        """Take the lock."""
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        """Give up the lock."""
        self.release()

    def _leave(self, thread: int, turn: threading.Lock) -> bool:
        """Wait no more; False if this thread has got the lock meanwhile."""
        with self._guard:
            try:
                self._waiting.remove((thread, turn))
            except ValueError:
                return False
            return True
