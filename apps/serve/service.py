"""Service: reads requests, lets them wait, and answers them."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from oscar_mm.apps.serve.conversations import Conversations, Written
from oscar_mm.apps.serve.metrics import Metrics
from oscar_mm.apps.serve.protocol import FieldError, Request, read_request
from oscar_mm.apps.serve.responses import RETRY_S, Gone, Refused, busy, chunk, completion, refusals
from oscar_mm.decoding.reasoning import Reasoning
from oscar_mm.decoding.sampling import Sampling
from oscar_mm.errors import Busy

_READERS = 2
"""Requests that are parsed at once, each in a thread."""
_BODIES = 8
"""Bodies of the largest size that there is room for, of all requests that do not run yet."""
_LOOKED_AGAIN_S = 1.0
"""For memory that was freed by others than answers of this server."""
_ENDING_S = 5.0
"""In which answers that were cut short are given up."""


@dataclass(frozen=True)
class Bounds:
    """What the server takes on.

    Attributes:
        api_key: that clients must send as a bearer token; None for no key.
        max_request_bytes: of the body of a request, media in base64 included.
        max_new_tokens: of an answer; also where the client does not say.
        running: answers that are written at once, token by token in turns.
        waiting: requests in the queue; more get status 429.
        conversations: most that are kept.
        body_s: seconds in which the body of a request has to come.
        room_s: seconds that a request waits for memory that others hold.
        grace_s: seconds that answers have to end in when the server stops.
    """

    api_key: str | None = None
    max_request_bytes: int = 64 << 20
    max_new_tokens: int = 1024
    running: int = 4
    waiting: int = 64
    conversations: int = 64
    body_s: float = 60.0
    room_s: float = 30.0
    grace_s: float = 10.0


class Service:
    """Reads, queues and answers requests.

    Args:
        conversations: answer.
        metrics: count.
        bounds: what is taken on.
        name: of the model, for clients.

    Attributes:
        hurried: set to end the grace time of answers.
    """

    def __init__(
        self, conversations: Conversations, metrics: Metrics, bounds: Bounds, name: str
    ) -> None:
        self.conversations, self.metrics = conversations, metrics
        self.bounds, self.name = bounds, name
        self.hurried = asyncio.Event()
        self._places = asyncio.Semaphore(bounds.running)
        self._waiting = self._body_bytes = 0
        self._readers = CapacityLimiter(_READERS)
        self.workers = CapacityLimiter(bounds.running + 1)
        self._closing: set[asyncio.Task[None]] = set()
        self._freed: asyncio.Future[None] | None = None

    @cached_property
    def stopping(self) -> asyncio.Future[None]:
        """Done when nothing more is taken on."""
        return asyncio.get_running_loop().create_future()

    @cached_property
    def cut(self) -> asyncio.Future[None]:
        """Done when running answers are ended."""
        return asyncio.get_running_loop().create_future()

    def authorize(self, http: HttpRequest) -> None:
        """Raise Refused if a key is needed and this is not it."""
        if self.bounds.api_key is None:
            return
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.bounds.api_key.encode()):
            raise Refused(401, "a valid API key is needed", "authentication_error")

    def check_model(self, name: str | None) -> None:
        """Raise Refused, as vLLM words it, if another model is asked for."""
        if name and name != self.name:
            message = f"The model `{name[:200]}` does not exist."
            raise Refused(404, message, "NotFoundError", 404, "model")

    async def answer(self, http: HttpRequest, about: dict[str, Any]) -> Response:
        """Read a request, wait for a place, then answer, whole or piece by piece."""
        with self._room_for_body() as add:
            asked = await self._parsed(await self._body(http, add))
            gone = asyncio.ensure_future(_left(http))
            try:
                await self._place(gone)
            except BaseException:
                gone.cancel()
                raise
        writing = _Writing(self, asked, gone)
        try:
            first = await writing.begin()
            if asked.stream:
                # Whoever sends a stream looks himself whether its client is there.
                writing.gone = asyncio.get_running_loop().create_future()
                return _EventStream(writing, _events(writing, first, about))
            async for _ in writing.pieces(first):
                pass
        except BaseException:
            writing.end()
            raise
        finally:
            gone.cancel()
        await asyncio.shield(writing.end())
        written = writing.written
        return JSONResponse(completion(about, written.answer, written.usage))

    async def stop(self) -> None:
        """Take on nothing more; answers that run have their grace, then they are cut short."""
        self.stopping.set_result(None)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.hurried.wait(), self.bounds.grace_s)
        self.cut.set_result(None)

    async def close(self) -> None:
        """Give up all chats, unless the model does not let go of them in time."""
        closing = [*self._closing, asyncio.ensure_future(run_sync(self.conversations.close))]
        await asyncio.wait(closing, timeout=_ENDING_S)

    async def memory_is_freed(self, gone: asyncio.Future[None], seconds: float) -> None:
        """Wait until an answer has ended, no longer than some seconds.

        Raises:
            Refused: the client has left, or the server stops.
        """
        if self._freed is None:
            self._freed = asyncio.get_running_loop().create_future()
        waited = min(seconds, _LOOKED_AGAIN_S)
        await self._unless_over(self._freed, gone, waited)

    def closes(self, task: asyncio.Task[None]) -> None:
        """Keep a task that gives up an answer until it is done."""
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def release(self) -> None:
        """A place is free, and memory."""
        self._places.release()
        if self._freed is not None:
            self._freed.set_result(None)
            self._freed = None

    @contextmanager
    def _room_for_body(self) -> Iterator[Callable[[int], None]]:
        """Count the bytes of a body until its request runs.

        Yields:
            counts so many more; raises Refused if there are too many of all requests together.
        """
        own = 0

        def add(count: int) -> None:
            nonlocal own
            own += count
            self._body_bytes += count
            if self._body_bytes > _BODIES * self.bounds.max_request_bytes:
                raise busy("the server holds too many large requests")

        try:
            yield add
        finally:
            self._body_bytes -= own

    async def _body(self, http: HttpRequest, add: Callable[[int], None]) -> bytes:
        """The body; one that is too large, or too slow, is not read to its end."""
        limit, seconds = self.bounds.max_request_bytes, self.bounds.body_s

        async def collected() -> bytes:
            parts, size = [], 0
            async for part in http.stream():
                add(len(part))
                parts.append(part)
                if (size := size + len(part)) > limit:
                    raise Refused(413, f"the request is larger than the limit of {limit:,} bytes")
            return b"".join(parts)

        reading = asyncio.ensure_future(collected())
        try:
            await asyncio.wait(
                (reading, self.stopping), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if reading.done():
                return reading.result()
            if self.stopping.done():
                raise busy("the server is stopping")
            raise Refused(408, f"the request did not come within {seconds:g} s")
        except ClientDisconnect:
            raise Gone from None
        finally:
            reading.cancel()

    async def _parsed(self, body: bytes) -> Request:
        """The checked request."""
        with refusals():
            asked = await run_sync(self._parse, body, limiter=self._readers)
        self.check_model(asked.model)
        return asked

    def _parse(self, body: bytes) -> Request:
        pipe, most = self.conversations.pipe, self.bounds.max_new_tokens
        asked = read_request(body, pipe.limits)
        for said in asked.messages():
            pipe.check_text(f"messages[{said.place}].content", said.text, may_be_empty=True)
        if asked.sampling.setdefault("max_new_tokens", most) > most:
            raise FieldError(f"this server writes at most {most} tokens", asked.bound)
        Sampling(**asked.sampling)
        return asked

    async def _place(self, gone: asyncio.Future[None]) -> None:
        """Wait until fewer answers run than may; who leaves the queue leaves its place in it."""
        if self._places.locked() and self._waiting >= self.bounds.waiting:
            message = "too many requests are waiting: try again"
            raise Refused(429, message, "rate_limit_error", retry_after=RETRY_S)
        self._waiting += 1
        self.metrics.waiting.inc()
        place = asyncio.ensure_future(self._places.acquire())
        try:
            await self._unless_over(place, gone)
        except BaseException:
            if place.done():
                self._places.release()
            place.cancel()
            raise
        finally:
            self._waiting -= 1
            self.metrics.waiting.dec()

    async def _unless_over(
        self, awaited: asyncio.Future[Any], gone: asyncio.Future[None], seconds: float | None = None
    ) -> None:
        """Wait for something, at most some seconds.

        Raises:
            Refused: the client has left, or the server stops.
        """
        ends = (awaited, gone, self.stopping)
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise Gone
        if self.stopping.done():
            raise busy("the server is stopping")


class _Writing:
    """One answer as it is written; every step of the model is made in a thread.

    Args:
        service: counts it, and gets its place back.
        asked: the request.
        gone: done when the client has left.

    Attributes:
        gone: see above.
    """

    def __init__(self, service: Service, asked: Request, gone: asyncio.Future[None]) -> None:
        self.service, self.asked = service, asked
        self._written: Written | None = None
        self.gone = gone
        self._steps = service.conversations.answering(asked)
        self._step: asyncio.Future[str | Written] | None = None
        self._end: asyncio.Task[None] | None = None
        self._start = perf_counter()
        service.metrics.running.inc()

    @property
    def written(self) -> Written:
        """The answer, when its pieces are exhausted."""
        if self._written is None:
            raise RuntimeError("the answer is not complete")
        return self._written

    async def begin(self) -> str | Written:
        """Read media, past and prompt, if need be when others have freed their memory.

        Returns:
            the first piece.

        Raises:
            Refused: no answer, and why.
        """
        service = self.service
        deadline = perf_counter() + service.bounds.room_s
        with refusals():
            while True:
                try:
                    while (first := await self._next()) == "":
                        pass
                except Busy:
                    if (left := deadline - perf_counter()) <= 0:
                        raise
                    self._steps = service.conversations.answering(self.asked)
                    if not await run_sync(service.conversations.give_way):
                        await service.memory_is_freed(self.gone, left)
                else:
                    service.metrics.first_token.observe(perf_counter() - self._start)
                    return first

    async def pieces(self, first: str | Written) -> AsyncIterator[str]:
        """Pieces of text; ``written`` is there at the end.

        Raises:
            Refused: the answer ends here, and why.
        """
        piece = first
        with refusals():
            while not isinstance(piece, Written):
                yield piece
                piece = await self._next()
        self._written = piece
        metrics = self.service.metrics
        metrics.requests.labels("200").inc()
        metrics.whole.observe(perf_counter() - self._start)
        metrics.tokens.labels("cached").inc(piece.cached_tokens)
        metrics.tokens.labels("prompt").inc(piece.prompt_tokens - piece.cached_tokens)
        metrics.tokens.labels("completion").inc(len(piece.answer.token_ids))

    def end(self) -> asyncio.Task[None]:
        """Give up what is not kept, and the place, as soon as the model lets go of it."""
        if self._end is None:
            self._end = asyncio.ensure_future(self._give_up())
            self.service.closes(self._end)
        return self._end

    async def _next(self) -> str | Written:
        step = asyncio.ensure_future(run_sync(next, self._steps, limiter=self.service.workers))
        self._step = step
        ends: tuple[asyncio.Future[Any], ...] = (step, self.service.cut, self.gone)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if step.done():
            return step.result()
        raise busy("the server is stopping") if self.service.cut.done() else Gone()

    async def _give_up(self) -> None:
        service = self.service
        try:
            if self._step is not None:
                # Whatever comes of it, nobody is told.
                await asyncio.gather(self._step, return_exceptions=True)
            with suppress(Exception):
                await run_sync(self._steps.close, limiter=service.workers)
        finally:
            service.metrics.running.dec()
            service.release()


class _EventStream(StreamingResponse):
    """Server-sent events of an answer, which ends with them, even if they never begin."""

    def __init__(self, writing: _Writing, events: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._writing = writing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._writing.end()


async def _events(
    writing: _Writing, first: str | Written, about: dict[str, Any]
) -> AsyncIterator[str]:
    try:
        yield _event(chunk(about, {"role": "assistant", "content": ""}))
        async for piece in writing.pieces(first):
            name = "reasoning_content" if isinstance(piece, Reasoning) else "content"
            yield _event(chunk(about, {name: piece}))
        yield _event(chunk(about, {}, writing.written.answer.finish_reason))
        if writing.asked.usage:
            yield _event(chunk(about, None, usage=writing.written.usage))
        await asyncio.shield(writing.end())
        yield "data: [DONE]\n\n"
    except Refused as error:
        # Too late for a status: the answer has begun.
        writing.service.metrics.requests.labels(str(error.status)).inc()
        yield _event(error.body)


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def _left(http: HttpRequest) -> None:
    """Done when the client of a request, whose body was read, has left."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
