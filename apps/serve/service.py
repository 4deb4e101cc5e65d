"""Service: reads, queues and answers requests."""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from oscar_mm.apps.serve.conversations import Conversations
from oscar_mm.apps.serve.metrics import Metrics
from oscar_mm.apps.serve.protocol import FieldError, Request, read_request
from oscar_mm.apps.serve.responses import (
    RETRY_S,
    ClientGone,
    Refusal,
    as_refusals,
    busy,
    completion,
)
from oscar_mm.apps.serve.running_answer import EventStream, RunningAnswer
from oscar_mm.generation.sampling import Sampling

_READERS = 2
"""Threads that parse requests."""
_BODIES = 8
"""All requests before their answers begin may take as much as this many of the largest size."""
_MEMORY_POLL_S = 1.0
"""Seconds after which to look for memory that something else than an answer has freed."""
_SENDING_S = 0.005
"""Seconds in which the pieces of a step should be sent."""
_CLOSING_S = 5.0
"""Seconds in which to close answers that the server has cut short."""


@dataclass(frozen=True)
class ServerLimits:
    """Bounds on requests and answers.

    Attributes:
        api_key: bearer token that clients must send; None for no key.
        max_request_bytes: largest body of a request, media in base64 included.
        max_new_tokens: longest answer, in tokens; also the default.
        running: most answers at once, which decode together.
        waiting: most requests in the queue; more get status 429.
        conversations: most chats that later requests can continue.
        body_s: seconds in which the body of a request must come.
        room_s: seconds that a request waits for memory that other answers use.
        grace_s: seconds in which answers must end when the server stops.
    """

    api_key: str | None = None
    max_request_bytes: int = 64 << 20
    max_new_tokens: int = 1024
    running: int = 64
    waiting: int = 64
    conversations: int = 64
    body_s: float = 60.0
    room_s: float = 30.0
    grace_s: float = 10.0


class Service:
    """Reads, queues and answers requests.

    Args:
        conversations: answers requests.
        metrics: counts them.
        limits: bounds on requests and answers.
        name: the model's name for clients.

    Attributes:
        hurry: ends the grace time of answers when it is set.
        workers: bound on the threads that read requests and complete answers.
        answers: that are being written.
    """

    def __init__(
        self, conversations: Conversations, metrics: Metrics, limits: ServerLimits, name: str
    ) -> None:
        self.conversations, self.metrics = conversations, metrics
        self.limits, self.name = limits, name
        self.hurry = asyncio.Event()
        self._places = asyncio.Semaphore(limits.running)
        self._waiting = self._body_bytes = 0
        self._readers = CapacityLimiter(_READERS)
        self.workers = CapacityLimiter(limits.running + 1)
        self._closing: set[asyncio.Task[None]] = set()
        self.answers: set[RunningAnswer] = set()
        self._memory_freed: asyncio.Future[None] | None = None

    @cached_property
    def stopping(self) -> asyncio.Future[None]:
        """Done when the server takes no more requests."""
        return asyncio.get_running_loop().create_future()

    @cached_property
    def cut(self) -> asyncio.Future[None]:
        """Done when the server cuts running answers short."""
        return asyncio.get_running_loop().create_future()

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Inside, a thread makes the steps of the model, and answers send their pieces after each.

        The next step waits until they are sent, but not for long: of two threads that share an
        interpreter the one that sends would wait for the other one at each piece.
        """
        loop, sent = asyncio.get_running_loop(), threading.Event()

        def after_step() -> None:
            if not self.answers:
                return
            sent.clear()
            with suppress(RuntimeError):  # The loop is closed: nobody looks.
                loop.call_soon_threadsafe(look)
                sent.wait(_SENDING_S)

        def look() -> None:
            for answer in tuple(self.answers):
                answer.look()
            loop.call_soon(sent.set)  # After all tasks that now go on.

        with self.conversations.pipe.engine.stepping_thread(after_step):
            yield

    def authorize(self, http: HttpRequest) -> None:
        """Raise Refusal if the request lacks the key."""
        if self.limits.api_key is None:
            return
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.limits.api_key.encode()):
            raise Refusal(401, "a valid API key is needed", "authentication_error")

    def check_model(self, name: str | None) -> None:
        """Raise Refusal, in vLLM's words, if the request is for another model."""
        if name and name != self.name:
            message = f"The model `{name[:200]}` does not exist."
            raise Refusal(404, message, "NotFoundError", 404, "model")

    async def answer(self, http: HttpRequest, header: dict[str, Any]) -> Response:
        """Read a request, wait for a place, then answer at once or piece by piece."""
        arrival = perf_counter()
        with self._room_for_body() as add:
            request = await self._request(await self._body(http, add))
            gone = asyncio.ensure_future(_disconnect(http))
            try:
                await self._take_place(gone)
            except BaseException:
                gone.cancel()
                raise
        answer = RunningAnswer(self, request, gone, arrival)
        try:
            await answer.begin()
            if request.stream:
                # A streaming response itself notices that its client has left.
                answer.gone = asyncio.get_running_loop().create_future()
                return EventStream(answer, header)
            async for _ in answer.pieces():
                pass
        except BaseException:
            answer.end()
            raise
        finally:
            gone.cancel()
        await asyncio.shield(answer.end())
        completed = answer.completed
        return JSONResponse(completion(header, completed.answer, completed.usage))

    async def stop(self) -> None:
        """Take no more requests, and cut running answers short after their grace time."""
        self.stopping.set_result(None)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.hurry.wait(), self.limits.grace_s)
        self.cut.set_result(None)

    async def close(self) -> None:
        """Close all chats, unless the model does not release them in time."""
        closing = [*self._closing, asyncio.ensure_future(run_sync(self.conversations.close))]
        await asyncio.wait(closing, timeout=_CLOSING_S)

    async def wait_for_memory(self, gone: asyncio.Future[None], seconds: float) -> None:
        """Wait until an answer has ended, for at most ``seconds``.

        Raises:
            Refusal: the client has left, or the server stops.
        """
        if self._memory_freed is None:
            self._memory_freed = asyncio.get_running_loop().create_future()
        timeout = min(seconds, _MEMORY_POLL_S)
        await self._wait_for(self._memory_freed, gone, timeout)

    def track_closing(self, task: asyncio.Task[None]) -> None:
        """Keep a reference to a task that closes an answer until it is done."""
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def release(self) -> None:
        """Free an answer's place, and tell requests that wait for its memory."""
        self._places.release()
        if self._memory_freed is not None:
            self._memory_freed.set_result(None)
            self._memory_freed = None

    @contextmanager
    def _room_for_body(self) -> Iterator[Callable[[int], None]]:
        """Count the bytes of a body while its request waits.

        Yields:
            a function that counts more bytes, and raises Refusal if all requests have too many.
        """
        own = 0

        def add(count: int) -> None:
            nonlocal own
            own += count
            self._body_bytes += count
            if self._body_bytes > _BODIES * self.limits.max_request_bytes:
                raise busy("the server holds too many large requests")

        try:
            yield add
        finally:
            self._body_bytes -= own

    async def _body(self, http: HttpRequest, add: Callable[[int], None]) -> bytes:
        """Read the body, but not to its end if it is too large or too slow."""
        limit, seconds = self.limits.max_request_bytes, self.limits.body_s

        async def collect() -> bytes:
            parts, size = [], 0
            async for part in http.stream():
                add(len(part))
                parts.append(part)
                if (size := size + len(part)) > limit:
                    raise Refusal(413, f"the request is larger than the limit of {limit:,} bytes")
            return b"".join(parts)

        reading = asyncio.ensure_future(collect())
        try:
            await asyncio.wait(
                (reading, self.stopping), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if reading.done():
                return reading.result()
            if self.stopping.done():
                raise busy("the server is stopping")
            raise Refusal(408, f"the request did not come within {seconds:g} s")
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            reading.cancel()

    async def _request(self, body: bytes) -> Request:
        """Parse and check a request."""
        with as_refusals():
            request = await run_sync(self._parse, body, limiter=self._readers)
        self.check_model(request.model)
        return request

    def _parse(self, body: bytes) -> Request:
        pipe, most = self.conversations.pipe, self.limits.max_new_tokens
        remote_bytes = self.limits.max_request_bytes if pipe.allow_remote else 0
        request = read_request(body, pipe.limits, remote_bytes)
        for message in request.messages():
            pipe.check_text(f"messages[{message.place}].content", message.text, may_be_empty=True)
        if request.sampling.setdefault("max_new_tokens", most) > most:
            raise FieldError(f"this server writes at most {most} tokens", request.length_field)
        Sampling(**request.sampling)
        return request

    async def _take_place(self, gone: asyncio.Future[None]) -> None:
        """Wait in the queue for one of the places of running answers."""
        if self._places.locked() and self._waiting >= self.limits.waiting:
            message = "too many requests are waiting: try again"
            raise Refusal(429, message, "rate_limit_error", retry_after=RETRY_S)
        self._waiting += 1
        self.metrics.waiting.inc()
        place = asyncio.ensure_future(self._places.acquire())
        try:
            await self._wait_for(place, gone)
        except BaseException:
            if place.done():
                self._places.release()
            place.cancel()
            raise
        finally:
            self._waiting -= 1
            self.metrics.waiting.dec()

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


async def _disconnect(http: HttpRequest) -> None:
    """Return when the client has left; call this after the body has been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
