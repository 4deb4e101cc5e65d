"""Threads take turns: FairLock in the order in which they ask, LeaderFollowers one for all.

A pool of threads decodes and processes media, several at a time, with results in order.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
_MAX_THREADS = 16
_this_thread = threading.local()
_beginning = threading.Lock()


class _Waiting(NamedTuple):
    """A thread that waits for a lock.

    Attributes:
        thread: its id.
        turn: released when the thread has the lock.
        brief: whether it needs the lock for a moment only.
    """

    thread: int
    turn: threading.Lock
    brief: bool


class FairLock:
    """A reentrant lock, as ``threading.RLock``, that is given first to those who asked first.

    A thread that releases a ``threading.RLock`` and takes it again at once, as one that makes step
    after step does, nearly always gets it before those that wait.

    A thread with long work lets those in between that need the lock ``briefly``.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[_Waiting] = deque()

    @property
    def is_owned(self) -> bool:
        """Whether the calling thread has the lock."""
        return self._owner == threading.get_ident()

    @property
    def is_contended(self) -> bool:
        """Whether a thread waits for the lock."""
        return bool(self._waiting)

    @property
    def is_wanted_briefly(self) -> bool:
        """Whether a thread waits that needs the lock for a moment only."""
        return any(waiting.brief for waiting in tuple(self._waiting))

    def acquire(self, blocking: bool = True, timeout: float = -1, *, brief: bool = False) -> bool:
        """Take the lock; whether this thread has it now.

        Args:
            blocking: wait for it.
            timeout: most seconds to wait; -1 for no bound.
            brief: as of ``briefly``.
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
            mine = self._place(brief)
            self._waiting.append(mine)
        finally:
            self._guard.release()
        try:
            if mine.turn.acquire(timeout=timeout):
                return True
        except BaseException:
            if not self._leave(mine):
                self.release()
            raise
        return not self._leave(mine)

    @contextmanager
    def briefly(self) -> Iterator[None]:
        """Inside, this thread has the lock, for a moment: it runs no model. It need not wait for
        the end of what calls ``let_in``."""
        self.acquire(brief=True)
        try:
            yield
        finally:
            self.release()

    def let_in(self) -> None:
        """Let the threads that wait for a moment have the lock, one after the other, and take it
        again before all others. Does nothing where this thread has taken it several times."""
        if self._owner != threading.get_ident() or self._depth > 1:
            return
        with self._guard:
            brief = [waiting for waiting in self._waiting if waiting.brief]
            if not brief:
                return
            others = [waiting for waiting in self._waiting if not waiting.brief]
            mine = self._place(brief=False)
            first, *brief = brief
            self._waiting = deque([*brief, mine, *others])
            self._owner = first.thread
            first.turn.release()
        try:
            mine.turn.acquire()
        except BaseException:
            if self._leave(mine):
                self.acquire()  # The caller releases it.
            raise

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
                following = self._waiting.popleft()
                self._owner = following.thread
                following.turn.release()
            else:
                self._owner = None

    def __enter__(self) -> bool:
        """Take the lock."""
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        """Give up the lock."""
        self.release()

    @staticmethod
    def _place(brief: bool) -> _Waiting:
        """One of this thread among those that wait."""
        waiting = _Waiting(threading.get_ident(), threading.Lock(), brief)
        waiting.turn.acquire()
        return waiting

    def _leave(self, waiting: _Waiting) -> bool:
        """Wait no more; False if the thread has got the lock meanwhile."""
        with self._guard:
            try:
                self._waiting.remove(waiting)
            except ValueError:
                return False
            return True


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
        watchers: called after each step, and by ``wake``.
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
        """Let the threads go on that have what they wait for, and call the watchers."""
        self.wake_followers()
        for watcher in tuple(self.watchers):
            watcher()

    def wake_followers(self) -> None:
        """Let the threads go on that have what they wait for; watchers may take a while."""
        with self._guard:
            for follower in self._followers:
                if not follower.turn.is_set() and follower.is_ready:
                    follower.turn.set()

    def promote(self) -> None:
        """Let the next thread that waits lead, if nobody does."""
        with self._guard:
            for follower in self._followers:
                if not follower.turn.is_set() and self._may_lead(follower.thread):
                    follower.turn.set()
                    return

    def _may_lead(self, thread: int) -> bool:
        return not self._leads and (not self._leaders or thread in self._leaders)


@cache
def thread_count() -> int:
    """How many threads work at a time, for all requests of this process: one for each core."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(cores, _MAX_THREADS)


@cache
def _threads() -> ThreadPoolExecutor:
    count, usual = thread_count(), torch.get_num_threads()
    pool, started = ThreadPoolExecutor(count, "oscar-media"), threading.Barrier(count)

    def begin() -> None:
        _this_thread.is_of_pool = True
        torch.get_num_threads()  # A thread that has not asked yet takes the default later.
        torch.set_num_threads(1)
        started.wait()

    wait([pool.submit(begin) for _ in range(count)])
    # What a thread sets is its own number of cores, and the default of threads to come.
    torch.set_num_threads(usual)
    return pool


def _pool() -> ThreadPoolExecutor:
    """The threads of this process; torch uses one core in each."""
    with _beginning:
        return _threads()


def _begin_anew() -> None:
    global _beginning
    _beginning = threading.Lock()
    _threads.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)  # A forked process has no threads.


def parallel_map(call: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Results of ``call`` for each item, in the order of the items; threads work ahead.

    Not more than twice ``thread_count`` results wait to be taken. The first error in the order of
    the items is raised as soon as the calls that run are done; no other call begins.

    Args:
        call: may use these threads too, and works in its own then.
        items: arguments of the calls; a single one is worked out in the calling thread.
    """
    listed = list(items)
    if len(listed) < 2 or getattr(_this_thread, "is_of_pool", False):
        yield from map(call, listed)
        return
    ahead: deque[Future[R]] = deque()
    try:
        for item in listed:
            if len(ahead) == 2 * thread_count():
                yield ahead.popleft().result()
            ahead.append(_pool().submit(call, item))
        while ahead:
            yield ahead.popleft().result()
    finally:
        wait([future for future in ahead if not future.cancel()])


def submit_all(call: Callable[[T], R], items: Iterable[T]) -> list[Future[R]]:
    """Calls that threads work out meanwhile, one for each item.

    Args:
        call: must not use these threads itself.
        items: arguments of the calls.
    """
    return [_pool().submit(call, item) for item in items]
