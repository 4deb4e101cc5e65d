"""run_parallel: calls of compiled loops, at once on as many threads as torch has."""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

import torch

_PATIENCE_S = 0.05
"""Seconds after which a wait looks again: an interrupt may have taken what it was told."""


def run_parallel(calls: Sequence[tuple[Any, ...]]) -> None:
    """Call functions with their arguments, at once if torch has several threads, this one among
    them. Each is called once, or not at all where this raises; none of them runs any more when this
    returns or raises.

    No executor of the standard library can do it: an interrupt at the wrong time leaves one of its
    locks locked, and a thread that cannot be started a call in its line.
    """
    threads = torch.get_num_threads()
    others = [_Call(*call) for call in calls[1:]] if threads > 1 else []
    try:
        if others:
            _workers(os.getpid()).hand_over(others, threads - 1)
        for function, *arguments in calls[: len(calls) - len(others)]:
            function(*arguments)
        for call in others:
            if call.is_mine():
                call.function(*call.arguments)
    finally:
        # A function can be interrupted as it is entered, before a try of its own.
        try:
            for call in others:
                call.settle()
        except BaseException:
            _settle(others)
            raise
    for call in others:
        if call.error is not None:
            raise call.error


class _Call:
    """A call that one thread makes, or none.

    No signal divides what the threads do with it.

    Attributes:
        function, arguments: what is called.
        error: what the function raised in another thread.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments
        self.error: BaseException | None = None
        self._owner: dict[None, int] = {}
        self._ended, self._told = False, threading.Lock()
        self._told.acquire()

    def is_mine(self) -> bool:
        """Whether this thread makes it: the first one that asks."""
        me = threading.get_ident()
        return self._owner.setdefault(None, me) == me

    def make(self) -> None:
        """Make it for a thread that waits."""
        try:
            self.function(*self.arguments)
        except BaseException as error:
            self.error = error
        self._ended = True
        self._told.release()

    def settle(self) -> None:
        """Wait until it has ended, or see to it that nobody begins."""
        while not (self.is_mine() or self._ended):
            self._told.acquire(timeout=_PATIENCE_S)


def _settle(calls: Sequence[_Call]) -> None:
    """Settle all, by Ctrl-C too: what the calls write to may be another's afterwards."""
    try:
        for call in calls:
            call.settle()
    except BaseException:
        _settle(calls)
        raise


class _Workers:
    """Threads that make calls; they end with the process."""

    def __init__(self) -> None:
        self._line: SimpleQueue[_Call] = SimpleQueue()
        self._count = 0

    def hand_over(self, calls: Sequence[_Call], threads: int) -> None:
        """Have so many threads make the calls that nobody else does; fewer where no more can be
        started."""
        try:
            while self._count < threads:
                _thread.start_new_thread(_work, (self._line,))
                self._count += 1
        except RuntimeError:  # Too many of this user, or Python is ending.
            pass
        for call in calls if self._count else ():
            self._line.put(call)


def _work(line: SimpleQueue[_Call]) -> None:
    while True:
        call = line.get()
        if call.is_mine():
            call.make()
        del call  # and the arrays among its arguments


@lru_cache(maxsize=1)
def _workers(process: int) -> _Workers:
    """Those of a process: a fork has none of its parent's."""
    return _Workers()
