"""Thread coordination: FairLock in order of arrival, LeaderFollowers with one leader for all.

A thread pool decodes and processes media, several at a time, with results in order.
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
    """Thread that waits for a lock.

    Attributes:
        thread: id of the thread.
        turn: released when the thread gets the lock.
        brief: whether the thread needs the lock only briefly.
    """

    thread: int
    turn: threading.Lock
    brief: bool


class FairLock:
    """Reentrant lock, like ``threading.RLock``, granted in order of arrival.

    A thread that releases a ``threading.RLock`` and takes it again at once, such as one that runs
    step after step, nearly always gets it before the threads that wait.

    A thread with long work can yield to those that need the lock ``briefly``.
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
        """Whether any thread waits for the lock."""
        return bool(self._waiting)

    @property
    def is_wanted_briefly(self) -> bool:
        """Whether any thread waits that needs the lock only briefly."""
        return any(waiting.brief for waiting in tuple(self._waiting))

    def acquire(self, blocking: bool = True, timeout: float = -1, *, brief: bool = False) -> bool:
        """Take the lock; return whether this thread has it now.

        Args:
            blocking: whether to wait for it.
            timeout: maximum seconds to wait; -1 for no limit.
            brief: whether the lock is needed only briefly, see ``briefly``.
        """
        thread = threading.get_ident()
        if self._owner == thread:
            self._depth += 1
            return True
        # A finalizer, which does not block, may run while its own thread has the guard.
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
        """Take the lock for a short block that runs no model.

        Threads that call ``let_in`` yield the lock to this one during their work.
        """
        self.acquire(brief=True)
        try:
            yield
        finally:
            self.release()

    def let_in(self) -> None:
        """Yield the lock to every brief waiter, then take it again ahead of all other threads.

        No effect if this thread has taken the lock more than once.
        """
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
                self.acquire()  # The caller will release it.
            raise

    def release(self) -> None:
        """Release the lock once; after the last release the next waiting thread has it.

        Raises:
            RuntimeError: if this thread does not have the lock.
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
        """Release the lock."""
        self.release()

    @staticmethod
    def _place(brief: bool) -> _Waiting:
        """Create the calling thread's entry for the queue of waiting threads."""
        waiting = _Waiting(threading.get_ident(), threading.Lock(), brief)
        waiting.turn.acquire()
        return waiting

    def _leave(self, waiting: _Waiting) -> bool:
        """Leave the queue; False if the thread has got the lock meanwhile."""
        with self._guard:
            try:
                self._waiting.remove(waiting)
            except ValueError:
                return False
            return True


class _Follower(NamedTuple):
    """Thread that waits for a leader's steps.

    Attributes:
        thread: id of the thread.
        done: returns whether the thread has what it waits for.
        turn: set to let the thread check again.
    """

    thread: int
    done: Callable[[], bool]
    turn: threading.Event

    @property
    def is_ready(self) -> bool:
        """Whether the thread need not wait any more; called from other threads."""
        try:
            return self.done()
        except Exception:  # The waiting thread calls ``done`` again and gets the error itself.
            return True


class LeaderFollowers:
    """Chooses the thread that runs the next step, and wakes the threads whose wait is over.

    A thread runs ``while not done(): if lead(done): try: step finally: step_down()``, and calls
    ``promote`` when it leaves for whatever reason: as long as threads wait, there is a leader or a
    thread that was woken to become one. Spurious wake-ups contend for the GIL, so a step wakes only
    threads for which something has changed.

    Args:
        lock: lock of the leader. Its owner does not wait, since the leader waits for it.

    Attributes:
        watchers: called after each step, and by ``wake``.
    """

    def __init__(self, lock: FairLock) -> None:
        self._lock, self._leads = lock, False
        # Reentrant: a finalizer may run while this thread holds it.
        self._guard = threading.RLock()
        self._followers: list[_Follower] = []
        self._leaders = set[int]()
        """Threads that are allowed to lead; if empty, any thread may."""
        self.watchers: list[Callable[[], None]] = []

    @contextmanager
    def sole_leader(self) -> Iterator[None]:
        """Make this thread the only one allowed to lead within the block.

        Exceptions are threads that have the lock, and other threads in such a block.
        """
        thread = threading.get_ident()
        self._leaders.add(thread)
        try:
            yield
        finally:
            self._leaders.discard(thread)
            self.promote()

    def lead(self, done: Callable[[], bool]) -> bool:
        """Wait while another thread leads; return whether this thread must run the next step.

        Returns False once ``done()``, which may be called from any thread.
        """
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
        """End the leadership after a step, and wake threads."""
        with self._guard:
            self._leads = False
        self.wake()

    def wake(self) -> None:
        """Wake the threads whose wait is over, and call the watchers."""
        self.wake_followers()
        for watcher in tuple(self.watchers):
            watcher()

    def wake_followers(self) -> None:
        """Wake the threads whose wait is over, without calling watchers, which may take a while."""
        with self._guard:
            for follower in self._followers:
                if not follower.turn.is_set() and follower.is_ready:
                    follower.turn.set()

    def promote(self) -> None:
        """Wake the next waiting thread to become the leader, if there is none."""
        with self._guard:
            for follower in self._followers:
                if not follower.turn.is_set() and self._may_lead(follower.thread):
                    follower.turn.set()
                    return

    def _may_lead(self, thread: int) -> bool:
        return not self._leads and (not self._leaders or thread in self._leaders)


@cache
def thread_count() -> int:
    """Number of worker threads for all requests of this process: one per core."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only.
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(cores, _MAX_THREADS)


@cache
def _threads() -> ThreadPoolExecutor:
    count, usual = thread_count(), torch.get_num_threads()
    pool, started = ThreadPoolExecutor(count, "oscar-media"), threading.Barrier(count)

    def begin() -> None:
        _this_thread.is_of_pool = True
        torch.get_num_threads()  # Otherwise lazy initialization resets it later.
        torch.set_num_threads(1)
        started.wait()

    wait([pool.submit(begin) for _ in range(count)])
    # set_num_threads applies to the thread itself, and is the default of later threads.
    torch.set_num_threads(usual)
    return pool


def _pool() -> ThreadPoolExecutor:
    """Return the thread pool of this process; torch uses one core in each of its threads."""
    with _beginning:
        return _threads()


def _begin_anew() -> None:
    global _beginning
    _beginning = threading.Lock()
    _threads.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)  # Threads do not survive a fork.


def parallel_map(call: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield the results of ``call`` for all items in order, computed ahead by the thread pool.

    At most twice ``thread_count`` results are kept ready. The first error in the order of the items
    is raised once the running calls are done; no other call is started.

    Args:
        call: function of an item; calls of this function within the pool run in their own thread.
        items: arguments of the calls; a single item is processed in the calling thread.
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
    """Submit one task per item to the shared pool and return the futures.

    Args:
        call: function of an item, which must not use the pool itself.
        items: arguments of the calls.
    """
    return [_pool().submit(call, item) for item in items]
