"""Thread pool for decoding and processing several media at a time, with results in order."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
_MAX_THREADS = 16
_this_thread = threading.local()
_beginning = threading.Lock()


@cache
def thread_count() -> int:
    """Return the number of worker threads for all requests of this process: one per core."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only.
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(cores, _MAX_THREADS)


@cache
def _threads() -> ThreadPoolExecutor:
    count, usual = thread_count(), torch.get_num_threads()
    pool, started = ThreadPoolExecutor(count, "oscar-media"), threading.Barrier(count)

    def begin() -> None:
        _this_thread.is_of_pool = True
        torch.get_num_threads()  # Otherwise lazy initialization would reset the number later.
        torch.set_num_threads(1)
        started.wait()

    wait([pool.submit(begin) for _ in range(count)])
    # set_num_threads applies to the calling thread, and sets the default for later threads.
    torch.set_num_threads(usual)
    return pool


def _pool() -> ThreadPoolExecutor:
    """Return the thread pool of this process; torch uses one core in each of the pool's threads."""
    with _beginning:
        return _threads()


def _begin_anew() -> None:
    global _beginning
    _beginning = threading.Lock()
    _threads.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)  # Threads do not survive a fork.


def parallel_map(call: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield the results of ``call`` for all items in order; the thread pool computes them ahead.

    At most 2 * ``thread_count`` results are kept ready. The first error, in the order of the items,
    is raised once the running calls have ended; no further calls are started.

    Args:
        call: function to call with an item; if it calls ``parallel_map`` itself, those calls run in
            its own thread.
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
        call: function to call with an item, which must not use the pool itself.
        items: arguments of the calls.
    """
    return [_pool().submit(call, item) for item in items]
