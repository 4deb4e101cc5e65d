"""PieceSender: sends the new pieces of answers after steps, within a share of the time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Set
from contextlib import suppress
from time import perf_counter, thread_time

_SHARE = 0.15
"""Maximum processor time of sending, as a share of the elapsed time; beyond it, pieces of several
steps are sent together. While pieces are sent, the engine thread waits for the interpreter."""
_MAX_BURST_S = 0.02
"""Maximum seconds of sending at a time, however long nothing was sent before."""
_MAX_PAUSE_S = 0.1
"""Maximum seconds without sending after sending took longer than was allowed."""
_LATE_S = 0.02
"""Seconds after which sending goes on even if no further step follows."""

Watcher = Callable[[], bool]
"""Function that collects the new pieces of one answer, and sends them if it is streamed; returns
whether it has woken a task that sends them instead."""


class PieceSender:
    """Sends the new pieces of answers after steps, within a share of the elapsed time.

    Streams take turns: after a step, pieces are sent to as many streams as the share allows, and to
    the next ones after the next step. If all streams got their pieces after the same step, the
    engine thread would not get the interpreter in time for the step after that, and the device
    would wait. First pieces never wait for later ones of other answers.

    Create it in the event loop.

    Args:
        watchers: watchers of the running answers; the set may change.
        first_piece_watchers: those of streams that have no piece yet, which are called after every
            step.
    """

    def __init__(self, watchers: Set[Watcher], first_piece_watchers: Set[Watcher]) -> None:
        self._loop = asyncio.get_running_loop()
        self._watchers, self._first_piece_watchers = watchers, first_piece_watchers
        self._steps = self._round_steps = 0
        """Number of steps, and of those before the current round."""
        self._round = deque[Watcher]()
        """Watchers whose turn in the current round is yet to come."""
        self._allowed_s, self._since = _MAX_BURST_S, perf_counter()
        """Seconds of the processor for which pieces may be sent, as of the time ``_since``."""
        self._late: asyncio.TimerHandle | None = None

    def after_step(self) -> None:
        """Send pieces soon; safe from any thread."""
        self._steps += 1
        if self._watchers:
            with suppress(RuntimeError):  # The event loop is closed.
                self._loop.call_soon_threadsafe(self._send)

    def close(self) -> None:
        """Send nothing more without a step."""
        if self._late is not None:
            self._late.cancel()

    def _send(self) -> None:
        now = perf_counter()
        earned = _SHARE * (now - self._since)
        self._allowed_s, self._since = min(self._allowed_s + earned, _MAX_BURST_S), now
        for watcher in tuple(self._first_piece_watchers):
            watcher()
        begin = thread_time()  # It excludes waits for the interpreter, which the engine thread has.
        woken = []
        if not self._round:
            self._round.extend(self._watchers - self._first_piece_watchers)
            self._round_steps = self._steps
        while self._round and thread_time() - begin < self._allowed_s:
            watcher = self._round.popleft()
            if watcher in self._watchers:
                woken.append(watcher())
        self._spend(begin)
        if any(woken):
            self._loop.call_soon(self._spend, thread_time())  # After the tasks that were woken.
        self.close()
        # Pieces that came after a stream's turn are sent in a round that begins after all steps.
        if self._watchers and (self._round or self._round_steps < self._steps):
            self._late = self._loop.call_later(_LATE_S, self._send)

    def _spend(self, begin: float) -> None:
        """Count the time since ``begin``, a value of ``thread_time``, as time of sending."""
        left = self._allowed_s - (thread_time() - begin)
        self._allowed_s = max(left, -_SHARE * _MAX_PAUSE_S)
