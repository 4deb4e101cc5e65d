"""Realtime: the WebSockets of realtime sessions, within bounds."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import WebSocket
from starlette.responses import JSONResponse
from starlette.websockets import WebSocketDisconnect, WebSocketState

from oscar_mm.apps.serve.access_log import note_refusal
from oscar_mm.apps.serve.clients import client_of
from oscar_mm.apps.serve.realtime_session import RealtimeSession
from oscar_mm.apps.serve.refusals import Refusal, busy, stopping
from oscar_mm.chat.chat import Chat

if TYPE_CHECKING:
    from oscar_mm.apps.serve.service import Service

REALTIME = "/v1/realtime"
MAX_EVENT_BYTES = 1 << 22
"""Maximum size of an event of a client: about a minute of sound."""
_PROTOCOL = "realtime"
_SEND_S = 20.0
"""Maximum seconds in which a client must read an event."""
_EVENTS_PER_S, _BURST = 200, 1000
"""Number of events of a session that are handled in a second, and at once after a pause."""
_EVENT_BYTES = 6400
"""Bytes for which an event counts as one more: 0.1 s of sound, so that 20 s of it may come in a
second."""
_MAX_SLOWED = 1000
"""Number of events in a row that may come faster, and wait; then the session ends."""


class Realtime:
    """Realtime sessions of a server; use it only in the server's event loop.

    Args:
        service: service of the server.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._open = Counter[str]()
        """Number of sessions by the address of their clients."""
        self._threads = CapacityLimiter(service.limits.realtime + 1)

    async def serve(self, socket: WebSocket) -> None:
        """Accept a WebSocket and serve a session until it ends, or refuse it."""
        (address, _) = client = client_of(socket.client, "")
        model = socket.query_params.get("model")
        try:
            self._check(socket, model, address)
        except Refusal as error:
            await self._deny(socket, error)
            return
        self._open[address] += 1
        self._service.metrics.realtime.inc()
        with ExitStack() as place:
            place.callback(self._free_place, address)
            offered = socket.scope.get("subprotocols", [])
            await socket.accept(_PROTOCOL if _PROTOCOL in offered else None)
            chat = await run_sync(partial(self._new_chat, model))
            await self._run(socket, chat, model, client, place)

    def _free_place(self, address: str) -> None:
        self._open[address] -= 1
        self._open = +self._open
        self._service.metrics.realtime.dec()

    def _check(self, socket: WebSocket, model: str | None, address: str) -> None:
        """Refuse a session that may not begin.

        Raises:
            Refusal: if it is refused; the message says why.
        """
        self._service.authorize(socket)
        self._service.check_model(model)
        if self._service.places.stopping.done():
            raise stopping()
        if self._open[address] + 1 > self._service.limits.realtime - self._open.total():
            raise busy("there are too many realtime sessions", "realtime")

    async def _deny(self, socket: WebSocket, error: Refusal) -> None:
        note_refusal(socket.scope, str(error))
        self._service.metrics.requests.labels(str(error.status)).inc()
        if error.reason is not None:
            self._service.metrics.refusals.labels(error.reason).inc()
        response = JSONResponse(error.body, error.status, error.headers)
        await socket.send_denial_response(response)

    async def _run(
        self,
        socket: WebSocket,
        chat: Chat,
        model: str | None,
        client: tuple[str, ...],
        place: ExitStack,
    ) -> None:
        """Serve a session until it ends.

        Args:
            socket: accepted connection.
            chat: conversation of the session, which is closed at its end.
            model: name of the model that the client asked for.
            client: see ``client_of``.
            place: callbacks that free the session's place among the open ones. They move to the
                task that frees the memory, which calls them when it is done.
        """
        limits, sent = self._service.limits, 0

        async def send(event: dict[str, Any]) -> None:
            nonlocal sent
            text = json.dumps(event)
            sent += len(text)
            try:
                # Not wait_for, which can swallow a cancellation in Python 3.11.
                async with asyncio.timeout(_SEND_S):
                    await socket.send_text(text)
            except (TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
                session.leave()
                reading.cancel()

        async def read() -> tuple[int, str]:
            await session.begin()
            try:
                async with asyncio.timeout(limits.realtime_s):
                    return await self._read(socket, session, lambda: sent)
            except TimeoutError:
                return 1000, "the session was idle, or has lasted too long"

        session = RealtimeSession(self._service, chat, model, client, send, self._threads)
        reading = asyncio.ensure_future(read())
        try:
            ended = 1000, "the session has ended"
            with suppress(asyncio.CancelledError, WebSocketDisconnect):
                ended = await asyncio.shield(reading)
        finally:
            reading.cancel()
            session.leave()
            # Not awaited: the engine frees the memory between two steps, and a step that compiles
            # kernels takes long. Neither the connection nor the server's stop waits for it.
            closing = asyncio.ensure_future(_close(session, place.pop_all()))
            self._service.places.track_closing(closing)
        if socket.application_state is WebSocketState.CONNECTED:
            with suppress(WebSocketDisconnect, RuntimeError, OSError, TimeoutError):
                async with asyncio.timeout(_SEND_S):
                    await socket.close(*ended)

    def _new_chat(self, model: str | None) -> Chat:
        """Return a chat that shares no prefix with others."""
        pipe = self._service.conversations.pipe
        adapter = model if model in pipe.adapters else None
        return Chat(pipe, cache_salt=uuid4().hex, adapter=adapter)

    async def _read(
        self, socket: WebSocket, session: RealtimeSession, sent: Callable[[], int]
    ) -> tuple[int, str]:
        """Handle the events of a client until it disconnects, at a bounded rate, to which the size
        of replies counts too.

        Args:
            socket: connection of the client.
            session: the client's session.
            sent: function that returns the number of characters sent so far.

        Returns:
            Why the session ends: a code and a reason for the client.
        """
        loop, budget, before = asyncio.get_running_loop(), float(_BURST), 0.0
        slowed = 0
        while slowed < _MAX_SLOWED:
            async with asyncio.timeout(self._service.limits.realtime_idle_s):
                message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                return 1000, "the client has disconnected"
            data = message.get("text") or message.get("bytes") or ""
            now = loop.time()
            budget = min(_BURST, budget + _EVENTS_PER_S * (now - before))
            budget, before = budget - 1 - len(data) / _EVENT_BYTES, now
            slowed = slowed + 1 if budget < 0 else 0
            if slowed:  # Meanwhile nothing is received.
                await asyncio.sleep(-budget / _EVENTS_PER_S)
            before_reply = sent()
            await session.take(data)
            budget -= (sent() - before_reply) / _EVENT_BYTES
        return 1008, "too many events"


async def _close(session: RealtimeSession, place: ExitStack) -> None:
    """Free the memory of a session that has ended, then its place."""
    with place:
        await session.close()
