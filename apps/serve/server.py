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
from oscar_mm.apps.serve.responses import Refused, failure, heading, model_card
from oscar_mm.apps.serve.service import Bounds, Service

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

_AFTER_GRACE_S = 3
"""In which answers that were cut short have sent their last event."""


def create_app(pipe: Pipeline, name: str, bounds: Bounds, host: str = "127.0.0.1") -> FastAPI:
    """The application for ``Server``; one process, as the chats live in it.

    Args:
        pipe: answers; its store holds all conversations.
        name: of the model, for clients.
        bounds: what is taken on.
        host: where the server will listen.

    Returns:
        the application; its ``state.service`` is the ``Service``.
    """
    conversations = Conversations(pipe, bounds.conversations)
    service = Service(conversations, Metrics(conversations), bounds, name)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(title="oscar-mm", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    if bounds.api_key is None:
        app.add_middleware(Guard, host=host)

    @app.exception_handler(Refused)
    async def refused(_: HttpRequest, error: Refused) -> JSONResponse:
        service.metrics.requests.labels(str(error.status)).inc()
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def unknown(_: HttpRequest, error: HTTPException) -> JSONResponse:
        return JSONResponse(failure(str(error.detail), "invalid_request_error"), error.status_code)

    @app.exception_handler(Exception)
    async def failed(_: HttpRequest, __: Exception) -> JSONResponse:
        service.metrics.requests.labels("500").inc()
        return JSONResponse(failure("the server failed to answer this", "server_error"), 500)

    @app.post("/v1/chat/completions")
    async def complete(request: HttpRequest) -> Response:
        service.authorize(request)
        return await service.answer(request, heading(uuid4().hex, name))

    @app.get("/v1/models")
    async def models(request: HttpRequest) -> dict[str, Any]:
        service.authorize(request)
        return {"object": "list", "data": [model_card(name)]}

    @app.get("/v1/models/{asked:path}")
    async def model(request: HttpRequest, asked: str) -> dict[str, Any]:
        service.authorize(request)
        service.check_model(asked)
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
    """Serves an application of ``create_app``; stopped, it lets answers end in their grace time.

    Args:
        app: the application; ``run`` takes the sockets to listen on.
    """

    def __init__(self, app: FastAPI) -> None:
        self.service: Service = app.state.service
        ended_s = math.ceil(self.service.bounds.grace_s) + 2 * _AFTER_GRACE_S
        super().__init__(
            uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=ended_s)
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn; a second signal ends the grace time, and still every answer is ended."""
        if self.should_exit:
            self.service.hurried.set()
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn: called when a signal or ``should_exit`` ends the server."""
        stopping = asyncio.ensure_future(self._stop())
        await super().shutdown(sockets)
        stopping.cancel()

    async def _stop(self) -> None:
        await self.service.stop()
        await asyncio.sleep(_AFTER_GRACE_S)
        for connection in list(self.server_state.connections):
            # Its client does not read.
            connection.transport.abort()
