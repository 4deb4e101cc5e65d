"""Run compiled CPU kernels in parallel, on the number of threads that torch uses."""

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
"""Seconds after which a wait checks again, because an interrupt may have caused it to miss the
notification."""


def run_parallel(calls: Sequence[tuple[Any, ...]]) -> None:
    """Call functions with their arguments, in parallel if torch uses several threads; the calling
    thread takes part.

    Each call runs exactly once; on an exception, pending calls are dropped. No call is still
    running when the function returns.

    The executors of the standard library are not safe enough: an interrupt at the wrong time leaves
    one of their locks locked, and a thread that cannot be started leaves its call in the queue.
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
        # A function can be interrupted on entry, before its own try block.
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
    """A call that is made by at most one thread.

    Its state changes are atomic with respect to signals.

    Attributes:
        function, arguments: function to call, and its arguments.
        error: exception that the function raised in another thread, if any.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments
        self.error: BaseException | None = None
        self._owner: dict[None, int] = {}
        self._ended, self._signal = False, threading.Lock()
        self._signal.acquire()

    def is_mine(self) -> bool:
        """Claim the call for this thread; return whether no other thread claimed it first."""
        me = threading.get_ident()
        return self._owner.setdefault(None, me) == me

    def make(self) -> None:
        """Call the function on behalf of a waiting thread."""
        try:
            self.function(*self.arguments)
        except BaseException as error:
            self.error = error
        self._ended = True
        self._signal.release()

    def settle(self) -> None:
        """Wait until the call has ended, or prevent it from starting."""
        while not (self.is_mine() or self._ended):
            self._signal.acquire(timeout=_PATIENCE_S)


def _settle(calls: Sequence[_Call]) -> None:
    """Settle all calls, even on Ctrl-C, since their output arrays may be reused afterwards."""
    try:
        for call in calls:
            call.settle()
    except BaseException:
        _settle(calls)
        raise


class _Workers:
    """Worker threads, which end with the process."""

    def __init__(self) -> None:
        self._line: SimpleQueue[_Call] = SimpleQueue()
        self._count = 0

    def hand_over(self, calls: Sequence[_Call], threads: int) -> None:
        """Queue calls for up to ``threads`` workers, or fewer if no more can be started."""
        try:
            while self._count < threads:
                _thread.start_new_thread(_work, (self._line,))
                self._count += 1
        except RuntimeError:  # The user has too many threads, or Python is shutting down.
            pass
        for call in calls if self._count else ():
            self._line.put(call)


def _work(line: SimpleQueue[_Call]) -> None:
    while True:
        call = line.get()
        if call.is_mine():
            call.make()
        del call  # releases the arrays among its arguments


@lru_cache(maxsize=1)
def _workers(process: int) -> _Workers:
    """Return the workers of a process; a forked process does not inherit those of its parent."""
    return _Workers()
