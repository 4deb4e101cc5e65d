"""Service: reads, queues and answers requests."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from time import perf_counter
from typing import Any, cast

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from oscar_mm.apps.serve.conversations import CompletedAnswer, Conversations
from oscar_mm.apps.serve.metrics import AnswerTimes, Metrics
from oscar_mm.apps.serve.protocol import FieldError, Request, read_request
from oscar_mm.apps.serve.responses import (
    RETRY_S,
    ClientGone,
    Refusal,
    as_refusals,
    busy,
    chunk,
    completion,
)
from oscar_mm.errors import Busy
from oscar_mm.generation.generation import Generation
from oscar_mm.generation.reasoning import Reasoning
from oscar_mm.generation.sampling import Sampling

_READERS = 2
"""Threads that parse requests."""
_BODIES = 8
"""All requests before their answers begin may take as much as this many of the largest size."""
_MEMORY_POLL_S = 1.0
"""Seconds after which to look for memory that something else than an answer has freed."""
_CLOSING_S = 5.0
"""Seconds in which to close answers that the server has cut short."""
_JSON = json.JSONEncoder(ensure_ascii=False)
_TEXT = "\0"
"""Stands for the text in the constant part of an answer's events."""


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
        self.answers: set[_RunningAnswer] = set()
        self._looks = False
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
        """Inside, a thread makes the steps of the model, and answers take their pieces."""
        loop = asyncio.get_running_loop()

        def after_step() -> None:
            if not self._looks and self.answers:
                self._looks = True
                with suppress(RuntimeError):  # The loop is closed: nobody looks.
                    loop.call_soon_threadsafe(look)

        def look() -> None:
            self._looks = False
            for answer in tuple(self.answers):
                answer.look()

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
        answer = _RunningAnswer(self, request, gone, arrival)
        try:
            await answer.begin()
            if request.stream:
                # A streaming response itself notices that its client has left.
                answer.gone = asyncio.get_running_loop().create_future()
                return _EventStream(answer, _events(answer, header))
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


class _RunningAnswer:
    """An answer that the model writes; its pieces wait here until they are taken.

    A thread reads the request, up to the first piece, and another one completes the answer. In
    between there is none: the answer looks for its pieces after each step.

    Args:
        service: counts the answer, and gets its place back.
        request: the request.
        gone: done when the client has left.
        arrival: ``perf_counter()`` when the request came.
    """

    def __init__(
        self, service: Service, request: Request, gone: asyncio.Future[None], arrival: float
    ) -> None:
        self.service, self.request = service, request
        self.gone = gone
        self._completed: CompletedAnswer | None = None
        self._pieces: deque[str | CompletedAnswer] = deque()
        self._changed: asyncio.Future[None] | None = None
        """Done where there are pieces, the thread has ended or the answer is to end."""
        self._steps = service.conversations.answer_steps(request)
        self._generation: Generation | None = None
        """Set while no thread is needed."""
        self._thread: asyncio.Future[None] | None = None
        self._left = False
        self._end: asyncio.Task[None] | None = None
        self._times = AnswerTimes(service.metrics, arrival)
        service.metrics.running.inc()
        service.answers.add(self)
        for end in (gone, service.cut):
            end.add_done_callback(self._wake)

    @property
    def completed(self) -> CompletedAnswer:
        """The complete answer, once ``pieces`` is exhausted."""
        if self._completed is None:
            raise RuntimeError("the answer is not complete")
        return self._completed

    async def begin(self) -> None:
        """Read media, past and prompt; wait for memory that other answers use, and for pieces.

        Raises:
            Refusal: there is no answer; the message says why.
        """
        service = self.service
        deadline = perf_counter() + service.limits.room_s
        with as_refusals():
            while True:
                self._start_thread()
                try:
                    return await self._wait()
                except Busy:
                    self._steps = service.conversations.answer_steps(self.request)
                    left = deadline - perf_counter()
                    if left <= 0 or self._times.count:
                        raise
                    if not await run_sync(service.conversations.give_way):
                        await service.wait_for_memory(self.gone, left)

    async def pieces(self) -> AsyncIterator[str]:
        """Yield text, all that waits in one piece, then set ``completed``.

        Raises:
            Refusal: the answer ends here; the message says why.
        """
        with as_refusals():
            while self._completed is None:
                await self._wait()
                for piece in joined(self._pieces):
                    if isinstance(piece, CompletedAnswer):
                        self._completed = piece
                    else:
                        yield piece
        self._times.end(self.completed)

    def end(self) -> asyncio.Task[None]:
        """Close the answer and free its place, once the model has ended its step."""
        if self._end is None:
            self._left = True
            self._end = asyncio.ensure_future(self._close())
            self.service.track_closing(self._end)
        return self._end

    def look(self) -> None:
        """Take the pieces that have come, and complete an answer that has ended."""
        generation = self._generation
        if generation is None or self._left:
            return
        ended = generation.ended
        for piece in generation.take_pieces():
            self._add(piece)
        if ended:
            self._generation = None
            self._start_thread()
        if self._pieces and self.request.stream:
            self._wake()

    def _start_thread(self) -> None:
        self._thread = asyncio.ensure_future(self._write_in_thread())
        self._thread.add_done_callback(self._wake)

    async def _write_in_thread(self) -> None:
        self._generation = await run_sync(self._write, limiter=self.service.workers)
        self.look()

    def _write(self) -> Generation | None:
        """Go on with the answer, in a thread, to its first piece or its end, or until it is closed.

        Returns:
            what has pieces from now on; None at the end.
        """
        for step in self._steps:
            if self._left:
                break
            if isinstance(step, Generation):
                return step
            self._add(step)
        return None

    def _add(self, piece: str | CompletedAnswer) -> None:
        if isinstance(piece, str):
            if not piece:
                return
            self._times.note()
        self._pieces.append(piece)

    async def _wait(self) -> None:
        """Return when there are pieces, of an answer that is not streamed all.

        Raises:
            BaseException: of the thread, or a Refusal.
        """
        while not (self._pieces and self.request.stream):
            if self._thread is not None and self._thread.done() and self._generation is None:
                self._thread.result()
                return
            if self.service.cut.done():
                raise busy("the server is stopping")
            if self.gone.done():
                raise ClientGone
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed

    def _wake(self, _: object = None) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def _close(self) -> None:
        service = self.service
        service.answers.discard(self)
        try:
            if self._thread is not None:
                # Its error concerns nobody any more.
                await asyncio.gather(self._thread, return_exceptions=True)
            if self._completed is None:
                await run_sync(self._steps.close, limiter=service.workers)
        finally:
            service.cut.remove_done_callback(self._wake)
            service.metrics.running.dec()
            service.release()


def joined(pieces: deque[str | CompletedAnswer]) -> Iterator[str | CompletedAnswer]:
    """Take out pieces, those joined that follow each other in the reasoning or in the text."""
    taken = [pieces.popleft() for _ in range(len(pieces))]
    for kind, group in groupby(taken, type):
        if issubclass(kind, str):
            yield kind("".join(cast("Iterator[str]", group)))
        else:
            yield from group


class _EventStream(StreamingResponse):
    """Server-sent events of an answer; the answer ends with them, even if they never begin."""

    def __init__(self, answer: _RunningAnswer, events: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, then end the answer."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.end()


async def _events(answer: _RunningAnswer, header: dict[str, Any]) -> AsyncIterator[str]:
    try:
        yield _event(chunk(header, {"role": "assistant", "content": ""}))
        text = _event(chunk(header, {"content": _TEXT})).split(_JSON.encode(_TEXT))
        reasoning = _event(chunk(header, {"reasoning_content": _TEXT})).split(_JSON.encode(_TEXT))
        async for piece in answer.pieces():
            parts = reasoning if isinstance(piece, Reasoning) else text
            yield _JSON.encode(piece).join(parts)
        yield _event(chunk(header, {}, answer.completed.answer.finish_reason))
        if answer.request.usage:
            yield _event(chunk(header, None, usage=answer.completed.usage))
        await asyncio.shield(answer.end())
        yield "data: [DONE]\n\n"
    except Refusal as error:
        # The status is sent already: the answer has begun.
        answer.service.metrics.requests.labels(str(error.status)).inc()
        yield _event(error.body)


def _event(data: dict[str, Any]) -> str:
    return f"data: {_JSON.encode(data)}\n\n"


async def _disconnect(http: HttpRequest) -> None:
    """Return when the client has left; call this after the body has been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
