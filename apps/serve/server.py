"""Server: the HTTP side of `oscar-mm serve`, on FastAPI."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from oscar_mm.apps.serve.conversations import Conversations
from oscar_mm.apps.serve.metrics import Metrics
from oscar_mm.apps.serve.protocol import Request, chunk, completion, failure, heading, read_request
from oscar_mm.chat.session import Chat
from oscar_mm.decoding.answer import Answer, AnswerStream
from oscar_mm.errors import InputError, NoRoom

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline


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
    """

    api_key: str | None = None
    max_request_bytes: int = 64 << 20
    max_new_tokens: int = 1024
    running: int = 4
    waiting: int = 64
    conversations: int = 64


class Refused(Exception):
    """A request that gets no answer: status, message, OpenAI's type of error and its code."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        return failure(str(self), self.kind, self.code)


def create_app(pipe: Pipeline, name: str, bounds: Bounds) -> FastAPI:
    """The application for an ASGI server; one process, as the chats live in it.

    Args:
        pipe: answers; its store holds all conversations.
        name: of the model, for clients.
        bounds: what is taken on.
    """
    conversations = Conversations(pipe, bounds.conversations)
    service = _Service(conversations, Metrics(conversations), bounds)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        conversations.close()

    app = FastAPI(title="oscar-mm", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.exception_handler(Refused)
    async def refused(_: HttpRequest, error: Refused) -> JSONResponse:
        service.metrics.requests.labels(str(error.status)).inc()
        headers = {"Retry-After": "1"} if error.status == 429 else None
        return JSONResponse(error.body, error.status, headers)

    @app.exception_handler(HTTPException)
    async def unknown(_: HttpRequest, error: HTTPException) -> JSONResponse:
        return JSONResponse(failure(str(error.detail), "invalid_request_error"), error.status_code)

    @app.post("/v1/chat/completions")
    async def complete(request: HttpRequest) -> Response:
        service.authorize(request)
        asked = await service.read(request)
        return await service.answer(request, asked, heading(uuid4().hex, name))

    @app.get("/v1/models")
    async def models(request: HttpRequest) -> dict[str, Any]:
        service.authorize(request)
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "oscar_mm"}]}

    @app.get("/metrics")
    async def metrics(request: HttpRequest) -> Response:
        service.authorize(request)
        text = await run_in_threadpool(generate_latest, service.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/health")
    async def health() -> PlainTextResponse:
        return PlainTextResponse("ok")

    return app


class _Service:
    """Reads, queues and answers requests."""

    def __init__(self, conversations: Conversations, metrics: Metrics, bounds: Bounds) -> None:
        self.conversations, self.metrics, self.bounds = conversations, metrics, bounds
        self._running = asyncio.Semaphore(bounds.running)
        self._waiting = 0

    def authorize(self, request: HttpRequest) -> None:
        """Raise Refused if a key is needed and this is not it."""
        if self.bounds.api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.bounds.api_key.encode()):
            raise Refused(401, "a valid API key is needed", "authentication_error")

    async def read(self, request: HttpRequest) -> Request:
        """The checked request; a body that is too large is not read to its end."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.bounds.max_request_bytes:
                limit = self.bounds.max_request_bytes
                raise Refused(413, f"the request is larger than the limit of {limit:,} bytes")
        try:
            asked = read_request(json.loads(body), self.conversations.pipe.limits)
        except (InputError, ValueError, RecursionError) as error:
            raise Refused(400, str(error)) from None
        most = self.bounds.max_new_tokens
        wanted = asked.sampling.setdefault("max_new_tokens", most)
        if isinstance(wanted, int) and wanted > most:
            raise Refused(400, f"max_tokens={wanted}: this server writes at most {most}")
        return asked

    async def answer(self, http: HttpRequest, asked: Request, about: dict[str, Any]) -> Response:
        """Wait for a place, then answer, whole or piece by piece."""
        if self._waiting >= self.bounds.waiting:
            raise Refused(429, "too many requests are waiting: try again", "rate_limit_error")
        self._waiting += 1
        self.metrics.waiting.inc()
        try:
            await self._running.acquire()
        finally:
            self._waiting -= 1
            self.metrics.waiting.dec()
        writing = _Writing(self, asked)
        try:
            await writing.begin()
            if asked.stream:
                events = _events(writing, about)
                return StreamingResponse(events, media_type="text/event-stream")
            async for _ in writing.pieces():
                if await http.is_disconnected():
                    break
            answer = writing.answer
        except BaseException:
            await writing.end()
            raise
        await writing.end()
        if answer is None:
            return Response(status_code=499)
        return JSONResponse(completion(about, answer.text, answer.finish_reason, writing.usage()))

    def release(self) -> None:
        """A place is free."""
        self._running.release()


class _Writing:
    """One answer as it is written; every step of the model is made in a thread of the pool."""

    def __init__(self, service: _Service, asked: Request) -> None:
        self._service, self._asked = service, asked
        self._metrics = service.metrics
        self._stream: AnswerStream | None = None
        self._chat: Chat | None = None
        self._held, self._ended = 0, False
        self._start = time.perf_counter()
        self.answer: Answer | None = None
        self._metrics.running.inc()

    async def begin(self) -> None:
        """Read media and past; the model reads the new prompt with the first piece."""
        begin = self._service.conversations.begin
        self._stream, self._chat, self._held = await self._guarded(begin, self._asked)

    async def pieces(self) -> AsyncIterator[str]:
        """Pieces of text; ``answer`` is there at the end."""
        first = True
        while (piece := await self._guarded(next, self._stream, None)) is not None:
            if first:
                self._metrics.first_token.observe(time.perf_counter() - self._start)
                first = False
            yield piece
        self.answer = self._stream.result

    def usage(self) -> dict[str, Any]:
        """Tokens of the whole conversation, and what it holds."""
        answer, turn = self.answer, self._chat.turns[-1]
        prompt, written = turn.start + answer.prompt_tokens, len(answer.token_ids)
        memory = answer.memory
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {
                "cached_tokens": self._held,
                "audio_tokens": memory.tokens["audio"],
            },
            "kv_bytes": memory.kv_bytes,
            "kv_ratio": round(memory.ratio, 4),
            "kv_bytes_by_modality": dict(memory.by_modality),
        }

    async def end(self) -> None:
        """Keep the chat, or what a client left, and give up the place; a second time nothing."""
        if self._ended:
            return
        self._ended = True
        try:
            with suppress(Exception):
                await asyncio.shield(run_in_threadpool(self._finish))
        finally:
            self._metrics.running.dec()
            self._service.release()

    def _finish(self) -> None:
        if self._chat is None:
            return
        if self.answer is None:
            self._stream.close()
            self._chat.close()
            return
        metrics = self._metrics
        metrics.requests.labels("200").inc()
        metrics.whole.observe(time.perf_counter() - self._start)
        turn = self._chat.turns[-1]
        metrics.tokens.labels("cached").inc(self._held)
        metrics.tokens.labels("prompt").inc(turn.start - self._held + self.answer.prompt_tokens)
        metrics.tokens.labels("completion").inc(len(self.answer.token_ids))
        self._service.conversations.keep(self._asked, self._chat)

    async def _guarded(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Run in a thread; an error of the request is a refusal."""
        try:
            return await run_in_threadpool(call, *arguments)
        except NoRoom as error:
            raise Refused(400, str(error), code="context_length_exceeded") from None
        except InputError as error:
            raise Refused(400, str(error)) from None
        except Exception as error:
            kind = type(error).__name__
            raise Refused(500, f"{kind}: {error}", "server_error") from error


async def _events(writing: _Writing, about: dict[str, Any]) -> AsyncIterator[str]:
    """Server-sent events of an answer."""
    asked = writing._asked
    try:
        yield _event(chunk(about, {"role": "assistant", "content": ""}))
        async for piece in writing.pieces():
            yield _event(chunk(about, {"content": piece}))
        yield _event(chunk(about, {}, writing.answer.finish_reason))
        if asked.usage:
            yield _event(chunk(about, None, usage=writing.usage()))
        await writing.end()
        yield "data: [DONE]\n\n"
    except Refused as error:
        # Too late for a status: the answer has begun.
        yield _event(error.body)
    finally:
        await writing.end()


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
