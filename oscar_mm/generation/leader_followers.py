"""LeaderFollowers: threads of which one works for all, while the others wait for what they need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from oscar_mm.cache.fair_lock import FairLock


class _Follower(NamedTuple):
    """A thread that waits.

    Attributes:
        thread: its id.
        done: tells whether it has what it waits for.
        turn: set when the thread is to look for itself.
    """

    thread: int
    done: Callable[[], bool]
    turn: threading.Event

    @property
    def is_ready(self) -> bool:
        """Whether the thread need not wait any more; asked by another thread."""
        try:
            return self.done()
        except Exception:  # It is raised again where the thread itself asks.
            return True


class LeaderFollowers:
    """Chooses the thread that makes the next step, and wakes the ones that need not wait for it.

    A thread goes ``while not done(): if lead(done): try: step finally: step_down()``, and calls
    ``promote`` when it leaves, whatever made it leave: as long as threads wait there is a leader,
    or one that was woken to become it. Who is woken for nothing takes the interpreter from who
    works, so a step wakes only those for whom something has changed.

    Args:
        lock: that the leader works under. Its owner does not wait, as the leader waits for it.

    Attributes:
        watchers: called after each step, and wherever threads are woken.
    """

    def __init__(self, lock: FairLock) -> None:
        self._lock, self._leads = lock, False
        # A finalizer may take it within itself.
        self._guard = threading.RLock()
        self._followers: list[_Follower] = []
        self._leaders = set[int]()
        """Threads of which one leads; any thread where there are none."""
        self.watchers: list[Callable[[], None]] = []

    @contextmanager
    def sole_leader(self) -> Iterator[None]:
        """Inside, this thread leads, and no other one outside of the lock but such as this one."""
        thread = threading.get_ident()
        self._leaders.add(thread)
        try:
            yield
        finally:
            self._leaders.discard(thread)
            self.promote()

    def lead(self, done: Callable[[], bool]) -> bool:
        """Whether this thread is to make the next step; waits while another one does, unless
        ``done``, which is asked by any thread."""
        thread = threading.get_ident()
        while True:
            follower = _Follower(thread, done, threading.Event())
            try:
                with self._guard:
                    if done():
                        return False
                    if self._may_lead(thread) or self._lock.is_owned:
                        self._leads = True
                        return True
                    self._followers.append(follower)
                    self.promote()
                follower.turn.wait()
            finally:
                with self._guard, suppress(ValueError):
                    self._followers.remove(follower)

    def step_down(self) -> None:
        """Lead no more, after a step."""
        with self._guard:
            self._leads = False
        self.wake()

    def wake(self) -> None:
        """Let the threads go on that have what they wait for."""
        with self._guard:
            for follower in self._followers:
                if not follower.turn.is_set() and follower.is_ready:
                    follower.turn.set()
        for watcher in tuple(self.watchers):
            watcher()

    def promote(self) -> None:
        """Let the next thread that waits lead, if nobody does."""
        with self._guard:
            for follower in self._followers:
                if not follower.turn.is_set() and self._may_lead(follower.thread):
                    follower.turn.set()
                    return

    def _may_lead(self, thread: int) -> bool:
        return not self._leads and (not self._leaders or thread in self._leaders)
