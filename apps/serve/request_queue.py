"""RequestQueue: slots for running answers, and the queue of requests that wait for slots."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from oscar_mm.apps.serve.fair_queue import FairQueue, Slot, Waiter
from oscar_mm.apps.serve.metrics import Metrics
from oscar_mm.apps.serve.piece_sender import Watcher
from oscar_mm.apps.serve.refusals import RETRY_S, ClientGone, Refusal, stopping

_MAX_RETRY_S = 60
"""Maximum seconds after which a client should retry; OpenAI's clients ignore longer times."""
_MEMORY_POLL_S = 1.0
"""Seconds between checks for memory freed by something other than the end of an answer."""


class RequestQueue:
    """Slots for running answers, and the queue of requests that wait for slots.

    Args:
        running: number of slots.
        waiting: maximum number of requests in the queue; beyond it, one gets status 429.
        metrics: metrics that count waiting and refused requests.
        timeout_s: maximum seconds that a request waits for slots; None for no limit.

    Attributes:
        workers: threads that submit requests to the engine and complete answers.
        watchers: functions to call after steps of the model, see ``PieceSender``.
        first_piece_watchers: watchers of streams that have no piece yet, to call after each step.
        closing: tasks that are closing answers and realtime sessions.
    """

    def __init__(
        self, running: int, waiting: int, metrics: Metrics, timeout_s: float | None = None
    ) -> None:
        self.metrics = metrics
        self.workers = ThreadPoolExecutor(running + 1, "answers")
        self.watchers: set[Watcher] = set()
        self.first_piece_watchers: set[Watcher] = set()
        self.closing: set[asyncio.Task[None]] = set()
        self._queue, self._max_waiting, self._timeout_s = FairQueue(running), waiting, timeout_s
        self._memory_freed: asyncio.Future[None] | None = None

    @cached_property
    def stopping(self) -> asyncio.Future[None]:
        """Future that is done once the server accepts no more requests."""
        return asyncio.get_running_loop().create_future()

    @cached_property
    def cut(self) -> asyncio.Future[None]:
        """Future that is done once the server cuts running answers short."""
        return asyncio.get_running_loop().create_future()

    async def take(
        self, client: tuple[str, ...], gone: asyncio.Future[None], count: int = 1
    ) -> list[Slot]:
        """Wait in the queue for free slots, and take them.

        Args:
            client: names that identify the client; see ``FairQueue``.
            gone: future that is done when the client has disconnected.
            count: number of slots to take, at most the total number of slots.

        Raises:
            Refusal: if the queue is full, the request would wait or has waited too long, the client
                disconnects, or the server stops.
        """
        loop = asyncio.get_running_loop()
        start, turn = loop.time(), loop.create_future()
        waiter = self._queue.add(client, count, turn)
        try:
            self._hand_out()
            if not turn.done():
                self._refuse_one(waiter)
            await self._wait_for(turn, gone, self._timeout_s)
            if not turn.done():
                raise self._refusal(waiter, "timeout")
            slots: list[Slot] = turn.result()
        except BaseException:
            self._leave(waiter)
            raise
        self.metrics.queue_seconds.observe(loop.time() - start)
        return slots

    def _refuse_one(self, waiter: Waiter) -> None:
        """Refuse a request that has just begun to wait if it would wait too long; if the queue is
        too long, refuse it or another one in its place."""
        seconds = self._queue.seconds(self._queue.needed(waiter) - 1)
        if self._timeout_s is not None and seconds is not None and seconds > self._timeout_s:
            raise self._refusal(waiter, "slow")
        if len(self._queue) > self._max_waiting:
            surplus = self._queue.surplus(waiter)
            refusal = self._refusal(surplus, "full" if surplus is waiter else "displaced")
            self._queue.remove(surplus)
            surplus.turn.set_exception(refusal)

    def _refusal(self, waiter: Waiter, reason: str) -> Refusal:
        """Return the refusal of a waiting request, with the time after which to retry."""
        seconds = self._queue.seconds(self._queue.needed(waiter))
        retry = RETRY_S if seconds is None else min(max(1, math.ceil(seconds)), _MAX_RETRY_S)
        message = "too many requests are waiting: try again"
        return Refusal(429, message, "rate_limit_error", retry_after=retry, reason=reason)

    def _leave(self, waiter: Waiter) -> None:
        """Remove a request from the queue, or give back the slots that it has got."""
        turn: asyncio.Future[list[Slot]] = waiter.turn
        self._queue.remove(waiter)
        # Asking for the exception also keeps asyncio from logging it.
        if turn.done() and turn.exception() is None:
            for slot in turn.result():
                self._queue.give_back(slot)
        self._hand_out()

    def _hand_out(self) -> None:
        """Give free slots to the requests whose turn it is."""
        for waiter, slots in self._queue.admit(asyncio.get_running_loop().time()):
            waiter.turn.set_result(slots)
        self.metrics.waiting.set(len(self._queue))
        self.metrics.waiting_clients.set(self._queue.clients)

    async def wait_for_memory(self, gone: asyncio.Future[None], seconds: float) -> None:
        """Wait until an answer ends, or until it is time to check for memory, at most ``seconds``.

        Raises:
            Refusal: if the client disconnects, or the server stops.
        """
        if self._memory_freed is None:
            self._memory_freed = asyncio.get_running_loop().create_future()
        timeout = min(seconds, _MEMORY_POLL_S)
        await self._wait_for(self._memory_freed, gone, timeout)

    def track_closing(self, task: asyncio.Task[None]) -> None:
        """Keep a reference to a task that closes an answer or a realtime session until the task is
        done."""
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)

    def release(self, slot: Slot) -> None:
        """Free the slot of an ended answer, and wake the requests that wait for its memory."""
        self._queue.end(slot, asyncio.get_running_loop().time())
        self._hand_out()
        if self._memory_freed is not None:
            self._memory_freed.set_result(None)
            self._memory_freed = None

    async def _wait_for(
        self, awaited: asyncio.Future[Any], gone: asyncio.Future[None], seconds: float | None = None
    ) -> None:
        """Wait for a future, at most ``seconds``.

        Raises:
            Refusal: if the client disconnects, or the server stops.
        """
        ends = (awaited, gone, self.stopping)
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientGone
        if self.stopping.done():
            raise stopping()
