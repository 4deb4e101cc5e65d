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
from oscar_mm.apps.serve.kept_sessions import KeptSession
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
_KEEP_VALUES = {None: None, "true": True, "false": False}
"""Values of the query's field ``keep``."""
_RESUME_S = 10.0
"""Maximum seconds that a client waits until the earlier connection of its session has ended."""


class _Connection:
    """Connection of a session that another connection can resume.

    Args:
        address: address of the client, see ``client_of``.
        model: name of the session's model.

    Attributes:
        released: future that is done once the session can be resumed.
        reason: why the connection ends.
    """

    def __init__(self, address: str, model: str) -> None:
        self.address, self.model = address, model
        self.released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reason = "the session has ended"
        self._is_disconnected = False
        self._reading: asyncio.Future[Any] | None = None

    def attach(self, reading: asyncio.Future[Any]) -> None:
        """Set the task that handles the events of the client; ``disconnect`` cancels it."""
        self._reading = reading
        if self._is_disconnected:
            reading.cancel()

    def disconnect(self) -> None:
        """End the connection, because another one resumes the session."""
        self.reason, self._is_disconnected = "another connection has resumed the session", True
        if self._reading is not None:
            self._reading.cancel()


class Realtime:
    """Realtime sessions of a server; use it only in the server's event loop.

    Args:
        service: service of the server.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._kept = service, service.conversations.sessions
        self._open = Counter[str]()
        """Number of sessions by the address of their clients."""
        self._connections = dict[str, _Connection]()
        """Connections of sessions that are to be kept, by the ids of the sessions."""
        self._expiries = dict[str, asyncio.TimerHandle]()
        """Timers that close kept sessions, by the ids of the sessions."""
        self._threads = CapacityLimiter(service.limits.realtime + 1)

    async def serve(self, socket: WebSocket) -> None:
        """Accept a WebSocket and serve a session until it ends, or refuse it."""
        (address, _) = client = client_of(socket.client, "")
        model = socket.query_params.get("model")
        try:
            self._check(socket, model)
            keeps = self._keep_requested(socket)
            kept = await self._take_over(socket, model, address)
            # Nothing is awaited from here to the count below, so no other client is counted in
            # between.
            self._check_capacity(address)
            if kept is not None:
                self._claim(kept)
        except Refusal as error:
            await self._deny(socket, error)
            return
        self._open[address] += 1
        self._service.metrics.realtime.inc()
        with ExitStack() as cleanup:
            cleanup.callback(self._count_closed, address)
            if kept is not None:  # Now, so that others that resume the session wait for this one.
                self._register(kept.id, _Connection(address, kept.settings["model"]), cleanup)
            await self._serve(socket, kept, client, cleanup, keeps=keeps)

    async def _serve(
        self,
        socket: WebSocket,
        kept: KeptSession | None,
        client: tuple[str, ...],
        cleanup: ExitStack,
        *,
        keeps: bool,
    ) -> None:
        """Accept a WebSocket, and serve a session until it ends.

        Args:
            socket: connection.
            kept: session that it resumes; None for a new one.
            client: see ``client_of``.
            cleanup: callbacks that remove the session from the open ones. They move to the task
                that frees the memory, which calls them when it is done.
            keeps: whether the client can return to the session.
        """
        offered, model = socket.scope.get("subprotocols", []), socket.query_params.get("model")
        state: KeptSession | Chat | None = kept
        try:
            await socket.accept(_PROTOCOL if _PROTOCOL in offered else None)
            if state is None:
                state = await run_sync(partial(self._new_chat, model))
        except BaseException:
            if kept is not None:  # The client may return once more.
                returned = asyncio.ensure_future(self._put_back(kept, cleanup.pop_all()))
                self._service.queue.track_closing(returned)
            raise
        await self._run(socket, state, client, cleanup, keeps=keeps)

    def _count_closed(self, address: str) -> None:
        self._open[address] -= 1
        self._open = +self._open
        self._service.metrics.realtime.dec()

    def _check(self, socket: WebSocket, model: str | None) -> None:
        """Refuse a client that may have no session.

        Raises:
            Refusal: if it is refused; the message says why.
        """
        self._service.authorize(socket)
        self._service.check_model(model)
        if self._service.queue.stopping.done():
            raise stopping()

    def _check_capacity(self, address: str, leaving: str | None = None) -> None:
        """Refuse a session if too many are open.

        Args:
            address: address of the client that asks for a session.
            leaving: address of the client whose connection ends if the session begins.

        Raises:
            Refusal: if too many are open.
        """
        others = self._open - Counter([] if leaving is None else [leaving])
        if others[address] + 1 > self._service.limits.realtime - others.total():
            raise busy("there are too many realtime sessions", "realtime")

    def _keep_requested(self, socket: WebSocket) -> bool:
        """Return whether the client can return to its session, as its query asks.

        Raises:
            Refusal: if the query is wrong.
        """
        query = socket.query_params
        if (keep := query.get("keep")) not in _KEEP_VALUES:
            raise Refusal(400, "keep: must be true or false", field="keep")
        given = _KEEP_VALUES[keep]
        return "session" in query if given is None else given

    async def _take_over(
        self, socket: WebSocket, model: str | None, address: str
    ) -> KeptSession | None:
        """Find the session that a client returns to, and end the connection that it still has.

        That connection stays open if the client is refused: it asks for another model, or too many
        sessions are open.

        Returns:
            the session, which is still stored; None for a new one.

        Raises:
            Refusal: if there is no such session, it has another model, too many sessions are open,
                or its earlier connection does not end.
        """
        if (key := socket.query_params.get("session")) is None:
            return None
        while (connection := self._connections.get(key)) is not None:
            self._check_same_model(model, connection.model)
            self._check_capacity(address, leaving=connection.address)
            connection.disconnect()
            await asyncio.wait((connection.released,), timeout=_RESUME_S)
            if not connection.released.done():
                raise busy("the last answer of the session has not ended", "realtime")
        if (kept := self._kept.find(key)) is None:
            raise _unknown_session()
        self._check_same_model(model, kept.settings["model"])
        return kept

    def _check_same_model(self, asked: str | None, model: str) -> None:
        """Refuse to resume a session with another model than its own."""
        if asked and self._service.answering(asked) != model:
            raise Refusal(400, "model: cannot change within a session", field="model")

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
        state: KeptSession | Chat,
        client: tuple[str, ...],
        cleanup: ExitStack,
        *,
        keeps: bool,
    ) -> None:
        """Serve a session until it ends; see ``_serve``."""
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
                session.disconnect()
                reading.cancel()

        async def read() -> tuple[int, str]:
            try:
                async with asyncio.timeout(limits.realtime_s):
                    await session.begin()
                    return await self._read(socket, session, lambda: sent)
            except TimeoutError:
                return 1000, "the session was idle, or has lasted too long"

        model = socket.query_params.get("model")
        how = self._service, state, model, client, send, self._threads
        session = RealtimeSession(*how, keeps=keeps)
        reading = asyncio.ensure_future(read())
        connection = self._connections.get(session.id) or _Connection(client[0], session.model)
        connection.attach(reading)
        if keeps and session.id not in self._connections:
            self._register(session.id, connection, cleanup)
        ended: tuple[int, str] | None = None
        try:
            with suppress(asyncio.CancelledError, WebSocketDisconnect):
                ended = await asyncio.shield(reading)
        finally:
            reading.cancel()
            session.disconnect()
            # Not awaited: the engine frees the memory between two steps, and a step that compiles
            # kernels takes long. Neither the connection nor the server's stop waits for it.
            closing = asyncio.ensure_future(self._end(session, cleanup.pop_all(), keeps=keeps))
            self._service.queue.track_closing(closing)
        if socket.application_state is WebSocketState.CONNECTED:
            with suppress(WebSocketDisconnect, RuntimeError, OSError, TimeoutError):
                async with asyncio.timeout(_SEND_S):
                    await socket.close(*(ended or (1000, connection.reason)))

    def _claim(self, kept: KeptSession) -> None:
        """Remove a session from the store for its client.

        Raises:
            Refusal: if it has given way to others meanwhile.
        """
        if not self._kept.take(kept):
            raise _unknown_session()
        if (expiry := self._expiries.pop(kept.id, None)) is not None:
            expiry.cancel()

    def _register(self, key: str, connection: _Connection, cleanup: ExitStack) -> None:
        """Register the connection of a session until ``cleanup`` is closed."""
        self._connections[key] = connection
        cleanup.callback(self._unregister, key)

    def _unregister(self, key: str) -> None:
        self._connections.pop(key).released.set_result(None)

    async def _end(self, session: RealtimeSession, cleanup: ExitStack, *, keeps: bool) -> None:
        """Keep a session whose connection has ended, or free its memory; then close ``cleanup``."""
        with cleanup:
            kept = None
            if keeps and not self._service.queue.stopping.done():
                with suppress(RuntimeError):
                    kept = await session.keep()
            if kept is None:
                await session.close()
            else:
                await self._keep(kept)

    async def _put_back(self, kept: KeptSession, cleanup: ExitStack) -> None:
        """Store a session again that could not be resumed; then close ``cleanup``."""
        with cleanup:
            await self._keep(kept)

    async def _keep(self, kept: KeptSession) -> None:
        """Store a session, until its client returns or the time is over."""
        await run_sync(self._kept.add, kept)
        if self._kept.find(kept.id) is kept:
            loop, seconds = asyncio.get_running_loop(), self._service.limits.realtime_kept_s
            self._expiries[kept.id] = loop.call_later(seconds, self._expire, kept.id)
        for key in [*self._expiries]:
            if self._kept.find(key) is None:  # It has given way to others.
                self._expiries.pop(key).cancel()

    def _expire(self, key: str) -> None:
        del self._expiries[key]
        if (kept := self._kept.find(key)) is not None:
            closing = asyncio.ensure_future(run_sync(self._kept.expire, kept))
            self._service.queue.track_closing(closing)

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
            await session.receive(data)
            budget -= (sent() - before_reply) / _EVENT_BYTES
        return 1008, "too many events"


def _unknown_session() -> Refusal:
    return Refusal(
        404,
        "session: there is none with this id; it was not kept, it has expired or given way to "
        "others, or the server was restarted: begin a new one",
        code="session_not_found",
        field="session",
    )
