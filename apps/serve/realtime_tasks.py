"""RealtimeTasks: the tasks of a realtime session in order, and the events that its client gets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from oscar_mm.apps.serve.metrics import Metrics
from oscar_mm.apps.serve.realtime_events import ClientEvent
from oscar_mm.apps.serve.refusals import ClientGone, Refusal, as_refusals

Result = TypeVar("Result")
_MAX_QUEUED = 500
"""Number of queued actions from which on the server receives no more until some are done."""


class RealtimeTasks:
    """Tasks of one session, and the way to its client.

    Args:
        metrics: metrics that count refusals.
        send: function that sends a JSON value to the client.
        threads: limit on the threads of all sessions.

    Attributes:
        gone: future that is done when the client is gone.
    """

    def __init__(
        self,
        metrics: Metrics,
        send: Callable[[dict[str, Any]], Awaitable[None]],
        threads: CapacityLimiter,
    ) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._metrics, self._send, self._threads = metrics, send, threads
        self._queue: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._dequeued = asyncio.Event()
        self.gone.add_done_callback(lambda _: self._dequeued.set())
        self._running: set[asyncio.Task[None]] = set()
        self._worker: asyncio.Task[None] | None = None
        self._closes = False

    def begin(self) -> None:
        """Begin to work, until ``close``."""
        if self._worker is None:
            self._worker = self.run(self._run_queue())

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside the tasks that are done in order, and return its task."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def enqueue(
        self, action: Callable[[], Awaitable[None]], event: ClientEvent | None = None
    ) -> None:
        """Queue an action, which is done after all actions that were queued before.

        Args:
            action: function that does it; its errors are sent to the client.
            event: event that asks for it, for errors; None if none does.
        """
        event_id = None if event is None else event.event_id

        async def guarded() -> None:
            try:
                with as_refusals():
                    await action()
            except ClientGone:
                pass
            except Refusal as error:
                await self.refuse(error, event_id)

        self._queue.put_nowait(guarded)

    async def wait_for_capacity(self) -> None:
        """Wait while too many actions are queued."""
        while self._queue.qsize() >= _MAX_QUEUED and not self.gone.done():
            self._dequeued.clear()
            await self._dequeued.wait()

    async def _run_queue(self) -> None:
        while not self._closes:
            action = await self._queue.get()
            self._dequeued.set()
            await action()

    async def in_thread(self, function: Callable[[], Result]) -> Result:
        """Run a function in a thread of the sessions."""
        return await run_sync(function, limiter=self._threads)

    async def send_event(self, kind: str, **fields: Any) -> None:
        """Send an event, unless the client is gone."""
        if not self.gone.done():
            await self._send({"type": kind, "event_id": f"event_{uuid4().hex}", **fields})

    async def refuse(self, error: Refusal, event_id: str | None) -> None:
        """Tell the client what is wrong; the session goes on."""
        self.count(error)
        await self.send_event("error", error=error.body["error"] | {"event_id": event_id})

    def count(self, error: Refusal) -> None:
        """Count a refusal in the metrics."""
        self._metrics.requests.labels(str(error.status)).inc()
        if error.reason is not None:
            self._metrics.refusals.labels(error.reason).inc()

    def disconnect(self) -> None:
        """Send nothing more, since the client is gone."""
        if not self.gone.done():
            self.gone.set_result(None)

    async def drain(self) -> None:
        """Do all that is queued without telling the client, then ``close``.

        Raises:
            RuntimeError: if the work has ended before.
        """
        self.disconnect()
        self.begin()
        assert self._worker is not None
        while True:
            done = asyncio.get_running_loop().create_future()
            self._queue.put_nowait(partial(_note, done))
            await asyncio.wait((done, self._worker), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise RuntimeError("the work of the session has ended before")
            left = {task for task in self._running if not task.done()} - {self._worker}
            if not left and self._queue.empty():
                break
            await asyncio.gather(*left, return_exceptions=True)
        await self.close()

    async def close(self) -> None:
        """End the work, and wait for all else that runs, also what the last action begins."""
        self.disconnect()
        self._closes = True
        if self._worker is not None:
            self._worker.cancel()
        # Only those that are not done: with Python 3.12, ``gather`` of others does not yield to the
        # event loop, which would never remove them then.
        while left := [task for task in self._running if not task.done()]:
            await asyncio.gather(*left, return_exceptions=True)


async def _note(done: asyncio.Future[None]) -> None:
    done.set_result(None)
