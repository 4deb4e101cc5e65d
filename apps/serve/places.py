"""Places: those of answers that run at once, and the queue for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cached_property
from typing import Any

from anyio import CapacityLimiter

from oscar_mm.apps.serve.metrics import Metrics
from oscar_mm.apps.serve.responses import RETRY_S, ClientGone, Refusal, busy

_MEMORY_POLL_S = 1.0
"""Seconds after which to look for memory that something else than an answer has freed."""


class Places:
    """Places of answers that run at once, and the queue for them.

    Args:
        running: number of places.
        waiting: most requests in the queue; more get status 429.
        metrics: counts both.

    Attributes:
        workers: bound on the threads that read requests and complete answers.
        watchers: called after each step of the model.
        closing: tasks that close answers.
    """

    def __init__(self, running: int, waiting: int, metrics: Metrics) -> None:
        self.metrics = metrics
        self.workers = CapacityLimiter(running + 1)
        self.watchers: set[Callable[[], None]] = set()
        self.closing: set[asyncio.Task[None]] = set()
        self._free, self._most_waiting = asyncio.Semaphore(running), waiting
        self._waiting = 0
        self._memory_freed: asyncio.Future[None] | None = None

    @cached_property
    def stopping(self) -> asyncio.Future[None]:
        """Done when the server takes no more requests."""
        return asyncio.get_running_loop().create_future()

    @cached_property
    def cut(self) -> asyncio.Future[None]:
        """Done when the server cuts running answers short."""
        return asyncio.get_running_loop().create_future()

    async def take(self, gone: asyncio.Future[None]) -> None:
        """Wait in the queue for a place.

        Args:
            gone: done when the client has left.

        Raises:
            Refusal: the queue is full, the client has left, or the server stops.
        """
        if self._free.locked() and self._waiting >= self._most_waiting:
            message = "too many requests are waiting: try again"
            raise Refusal(429, message, "rate_limit_error", retry_after=RETRY_S)
        self._waiting += 1
        self.metrics.waiting.inc()
        place = asyncio.ensure_future(self._free.acquire())
        try:
            await self._wait_for(place, gone)
        except BaseException:
            if place.done():
                self._free.release()
            place.cancel()
            raise
        finally:
            self._waiting -= 1
            self.metrics.waiting.dec()

    async def wait_for_memory(self, gone: asyncio.Future[None], seconds: float) -> None:
        """Wait until an answer has ended, for at most ``seconds``.

        Raises:
            Refusal: the client has left, or the server stops.
        """
        if self._memory_freed is None:
            self._memory_freed = asyncio.get_running_loop().create_future()
        timeout = min(seconds, _MEMORY_POLL_S)
        await self._wait_for(self._memory_freed, gone, timeout)

    def close(self, answer: asyncio.Task[None]) -> None:
        """Keep a reference to a task that closes an answer until it is done."""
        self.closing.add(answer)
        answer.add_done_callback(self.closing.discard)

    def release(self) -> None:
        """Free a place, and tell requests that wait for the memory of its answer."""
        self._free.release()
        if self._memory_freed is not None:
            self._memory_freed.set_result(None)
            self._memory_freed = None

    async def _wait_for(
        self, awaited: asyncio.Future[Any], gone: asyncio.Future[None], seconds: float | None = None
    ) -> None:
        """Wait for a future, for at most ``seconds``.

        Raises:
            Refusal: the client has left, or the server stops.
        """
        ends = (awaited, gone, self.stopping)
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientGone
        if self.stopping.done():
            raise busy("the server is stopping")
