"""Server: routes and HTTP server of `oscar-mm serve`, based on FastAPI and uvicorn."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import time
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, WebSocket
from fastapi import Request as HttpRequest
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from oscar_mm import __version__
from oscar_mm.apps.connections import ConnectionLimits, server_config
from oscar_mm.apps.guard import Guard, OneLength
from oscar_mm.apps.serve.access_log import REQUEST_ID, AccessLog, note_refusal
from oscar_mm.apps.serve.conversations import Conversations
from oscar_mm.apps.serve.docs_page import docs_page
from oscar_mm.apps.serve.messages_body import COUNT_TOKENS
from oscar_mm.apps.serve.messages_body import PATH as MESSAGES
from oscar_mm.apps.serve.messages_body import error_body as message_error
from oscar_mm.apps.serve.metrics import Metrics
from oscar_mm.apps.serve.realtime import MAX_EVENT_BYTES, REALTIME, Realtime
from oscar_mm.apps.serve.refusals import (
    Refusal,
    error_body,
    model_card,
)
from oscar_mm.apps.serve.responses_body import unknown_response
from oscar_mm.apps.serve.service import ServerLimits, Service
from oscar_mm.apps.serve.speech_body import SPEECH
from oscar_mm.apps.serve.transcriptions_body import TRANSCRIPTIONS, TRANSLATIONS

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

_AFTER_GRACE_S = 3
"""Seconds that answers cut short by the server have to send their last events."""


def create_app(
    pipe: Pipeline,
    name: str,
    limits: ServerLimits,
    host: str = "127.0.0.1",
    *,
    other_names: Sequence[str] = (),
    origins: tuple[str, ...] = (),
) -> FastAPI:
    """Create the application for ``Server``.

    The application must run in a single process, because all chats are in its memory.

    Args:
        pipe: pipeline that generates the answers; its store contains all conversations.
        name: model name for clients; they ask for adapters of the pipeline by their own names.
        limits: limits on requests and answers.
        host: the address on which the server will listen.
        other_names: further names by which clients may request the model.
        origins: origins of the web pages that may use the server; see ``read_origins``.

    Returns:
        the application; its ``state.service`` is the ``Service``.
    """
    conversations = Conversations(pipe, limits.conversations)
    names = name, *other_names, *pipe.adapters
    service = Service(conversations, Metrics(conversations), limits, names)
    realtime = Realtime(service)
    started, parents = int(time()), dict.fromkeys(pipe.adapters, name)
    cards = {one: model_card(one, started, pipe.max_context, parents.get(one)) for one in names}

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with service.steps():
            yield
            await service.close()

    # FastAPI's own docs page would load scripts from another host; no openapi_url disables it.
    app = FastAPI(title="oscar-mm", lifespan=lifespan, openapi_url=None)
    app.state.service = service
    if limits.api_key is None:
        uploads = (TRANSCRIPTIONS, TRANSLATIONS)
        app.add_middleware(Guard, host=host, uploads=uploads, origins=origins)
    app.add_middleware(OneLength)
    if origins:
        # The outermost middleware, so that web pages can read why a request was refused.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=[REQUEST_ID, "Retry-After"],
        )

    @app.exception_handler(Refusal)
    async def refuse(http: HttpRequest, error: Refusal) -> JSONResponse:
        note_refusal(http.scope, str(error))
        service.metrics.requests.labels(str(error.status)).inc()
        if error.reason is not None:
            service.metrics.refusals.labels(error.reason).inc()
        is_message = http.url.path.startswith(MESSAGES)
        body = message_error(error.status, str(error)) if is_message else error.body
        return JSONResponse(body, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def unknown(http: HttpRequest, error: HTTPException) -> JSONResponse:
        note_refusal(http.scope, str(error.detail))
        body = error_body(str(error.detail), "invalid_request_error")
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: HttpRequest, __: Exception) -> JSONResponse:
        service.metrics.requests.labels("500").inc()
        return JSONResponse(
            error_body("the server failed to answer this request", "server_error"), 500
        )

    @app.post("/v1/chat/completions")
    async def complete(request: HttpRequest) -> Response:
        """Answer a conversation (OpenAI's chat completions)."""
        service.authorize(request)
        return await service.complete(request)

    @app.post("/v1/completions")
    async def complete_text(request: HttpRequest) -> Response:
        """Continue prompts (OpenAI's completions)."""
        service.authorize(request)
        return await service.complete_text(request)

    @app.post("/tokenize")
    async def tokenize(request: HttpRequest) -> Response:
        """Return the token ids of a prompt or a conversation."""
        service.authorize(request)
        return await service.tokenize(request)

    @app.post("/detokenize")
    async def detokenize(request: HttpRequest) -> Response:
        """Return the text of a list of token ids."""
        service.authorize(request)
        return await service.detokenize(request)

    @app.post("/v1/responses")
    async def respond(request: HttpRequest) -> Response:
        """Answer a conversation (OpenAI's Responses API)."""
        service.authorize(request)
        return await service.respond(request)

    @app.post(MESSAGES)
    async def message(request: HttpRequest) -> Response:
        """Answer a conversation (Anthropic's Messages API)."""
        service.authorize(request)
        return await service.message(request)

    @app.post(COUNT_TOKENS)
    async def count_message(request: HttpRequest) -> Response:
        """Count the tokens of a conversation (Anthropic's Messages API)."""
        service.authorize(request)
        return await service.count_message(request)

    @app.post(SPEECH)
    async def speak(request: HttpRequest) -> Response:
        """Read a text aloud (OpenAI's audio API)."""
        service.authorize(request)
        return await service.speak(request)

    @app.post(TRANSCRIPTIONS)
    async def transcribe(request: HttpRequest) -> Response:
        """Transcribe a recording (OpenAI's audio API)."""
        service.authorize(request)
        return await service.transcribe(request)

    @app.post(TRANSLATIONS)
    async def translate(request: HttpRequest) -> Response:
        """Translate a recording into English text (OpenAI's audio API)."""
        service.authorize(request)
        return await service.transcribe(request, translate=True)

    @app.websocket(REALTIME)
    async def converse(socket: WebSocket) -> None:
        """Hold a spoken conversation (OpenAI's Realtime API)."""
        await realtime.serve(socket)

    @app.get("/v1/responses/{response}")
    async def kept(request: HttpRequest, response: str) -> dict[str, Any]:
        """Return a stored response."""
        service.authorize(request)
        if (found := service.responses.get(response)) is None:
            raise unknown_response(response)
        return found.body

    @app.delete("/v1/responses/{response}")
    async def forget(request: HttpRequest, response: str) -> dict[str, Any]:
        """Delete a stored response."""
        service.authorize(request)
        if not service.responses.remove(response):
            raise unknown_response(response)
        return {"id": response, "object": "response", "deleted": True}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of the server."""
        return {"version": __version__}

    @app.get("/v1/models")
    async def models(request: HttpRequest) -> dict[str, Any]:
        """List the model under each of its names, and its adapters."""
        service.authorize(request)
        return {"object": "list", "data": [*cards.values()]}

    @app.get("/v1/models/{requested:path}")
    async def model(request: HttpRequest, requested: str) -> dict[str, Any]:
        """Return the entry for one of the model's names."""
        service.authorize(request)
        service.check_model(requested)
        return cards[requested]

    @app.get("/metrics")
    async def metrics(request: HttpRequest) -> Response:
        """Return metrics for Prometheus."""
        service.authorize(request)
        text = await run_in_threadpool(generate_latest, service.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/docs")
    async def docs() -> HTMLResponse:
        """Show this page."""
        return HTMLResponse(docs_page(app.routes, service.names))

    @app.get("/health")
    async def health() -> PlainTextResponse:
        """Return "ok" while the server is running."""
        return PlainTextResponse("ok")

    return app


class Server(uvicorn.Server):
    """Server of a ``create_app`` application; gives running answers a grace period when it stops.

    Args:
        app: application to serve; ``run`` takes the sockets to listen on.

    Attributes:
        limits: limits on the clients.
        has_failed: whether it stopped because clients cannot reach it any more.
    """

    def __init__(self, app: FastAPI) -> None:
        self.service: Service = app.state.service
        self.has_failed = False
        limits = self.service.limits
        self.limits = ConnectionLimits(
            connections=limits.running + limits.waiting + limits.idle,
            head_s=limits.head_s,
            message_bytes=MAX_EVENT_BYTES,
            shutdown_s=math.ceil(limits.grace_s) + 2 * _AFTER_GRACE_S,
            trusted_proxies=limits.trusted_proxies,
        )
        super().__init__(server_config(AccessLog(app), self.limits))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal; end the grace period of running answers at the second."""
        if self.should_exit:
            self.service.hurry.set()
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the service in parallel with uvicorn's own shutdown."""
        stopping = asyncio.ensure_future(self._stop())
        await super().shutdown(sockets)
        await self._wait_for_connections()
        stopping.cancel()

    async def _stop(self) -> None:
        await self.service.stop()
        await asyncio.sleep(_AFTER_GRACE_S)
        # The clients of these connections do not read their answers.
        self._abort_connections()

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _wait_for_connections(self) -> None:
        """Wait for connections outside of this process, for which uvicorn does not wait."""
