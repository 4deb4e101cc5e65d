"""Server: the HTTP side of `oscar-mm serve`, on FastAPI and uvicorn."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import uvicorn
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from oscar_mm.apps.guard import Guard
from oscar_mm.apps.serve.conversations import Conversations
from oscar_mm.apps.serve.metrics import Metrics
from oscar_mm.apps.serve.responses import Refusal, answer_header, error_body, model_card
from oscar_mm.apps.serve.service import ServerLimits, Service

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

_AFTER_GRACE_S = 3
"""Seconds in which answers that the server has cut short send their last event."""


def create_app(pipe: Pipeline, name: str, limits: ServerLimits, host: str = "127.0.0.1") -> FastAPI:
    """Create the application for ``Server``; all chats are in its one process.

    Args:
        pipe: answers; its store has the memory of all conversations.
        name: the model's name for clients.
        limits: bounds on requests and answers.
        host: the address on which the server will listen.

    Returns:
        the application; its ``state.service`` is the ``Service``.
    """
    conversations = Conversations(pipe, limits.conversations)
    service = Service(conversations, Metrics(conversations), limits, name)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with service.steps():
            yield
            await service.close()

    app = FastAPI(title="oscar-mm", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    if limits.api_key is None:
        app.add_middleware(Guard, host=host)

    @app.exception_handler(Refusal)
    async def refuse(_: HttpRequest, error: Refusal) -> JSONResponse:
        service.metrics.requests.labels(str(error.status)).inc()
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def unknown(_: HttpRequest, error: HTTPException) -> JSONResponse:
        return JSONResponse(
            error_body(str(error.detail), "invalid_request_error"), error.status_code
        )

    @app.exception_handler(Exception)
    async def failed(_: HttpRequest, __: Exception) -> JSONResponse:
        service.metrics.requests.labels("500").inc()
        return JSONResponse(error_body("the server failed to answer this", "server_error"), 500)

    @app.post("/v1/chat/completions")
    async def complete(request: HttpRequest) -> Response:
        service.authorize(request)
        return await service.answer(request, answer_header(uuid4().hex, name))

    @app.get("/v1/models")
    async def models(request: HttpRequest) -> dict[str, Any]:
        service.authorize(request)
        return {"object": "list", "data": [model_card(name)]}

    @app.get("/v1/models/{requested:path}")
    async def model(request: HttpRequest, requested: str) -> dict[str, Any]:
        service.authorize(request)
        service.check_model(requested)
        return model_card(name)

    @app.get("/metrics")
    async def metrics(request: HttpRequest) -> Response:
        service.authorize(request)
        text = await run_in_threadpool(generate_latest, service.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/health")
    async def health() -> PlainTextResponse:
        return PlainTextResponse("ok")

    return app


class Server(uvicorn.Server):
    """Serves an application of ``create_app``; running answers get a grace time when it stops.

    Args:
        app: the application; ``run`` takes the sockets on which it listens.
    """

    def __init__(self, app: FastAPI) -> None:
        self.service: Service = app.state.service
        shutdown_s = math.ceil(self.service.limits.grace_s) + 2 * _AFTER_GRACE_S
        super().__init__(
            uvicorn.Config(
                app,
                # httptools, which uvicorn prefers, lets a request's head grow without end.
                http="h11",
                log_level="warning",
                timeout_graceful_shutdown=shutdown_s,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, and end the grace time of answers at the second."""
        if self.should_exit:
            self.service.hurry.set()
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the service beside uvicorn's own shutdown."""
        stopping = asyncio.ensure_future(self._stop())
        await super().shutdown(sockets)
        stopping.cancel()

    async def _stop(self) -> None:
        await self.service.stop()
        await asyncio.sleep(_AFTER_GRACE_S)
        for connection in list(self.server_state.connections):
            # This client does not read.
            connection.transport.abort()
