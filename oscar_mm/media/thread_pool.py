"""Threads that decode and process media, several at a time, with results in order."""

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

_MOST_THREADS = 16
_this_thread = threading.local()
_beginning = threading.Lock()


@cache
def thread_count() -> int:
    """How many threads work at a time, for all requests of this process: one for each core."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(cores, _MOST_THREADS)


@cache
def _threads() -> ThreadPoolExecutor:
    count, usual = thread_count(), torch.get_num_threads()
    pool, begun = ThreadPoolExecutor(count, "oscar-media"), threading.Barrier(count)

    def begin() -> None:
        _this_thread.is_of_pool = True
        torch.get_num_threads()  # A thread that has not asked yet takes the default later.
        torch.set_num_threads(1)
        begun.wait()

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


def in_threads(call: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
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


def begun(call: Callable[[T], R], items: Iterable[T]) -> list[Future[R]]:
    """Calls that threads work out meanwhile, one for each item.

    Args:
        call: must not use these threads itself.
        items: arguments of the calls.
    """
    return [_pool().submit(call, item) for item in items]
