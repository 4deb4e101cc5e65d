"""Server connections with a maximum number and a deadline for receiving requests."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
from wsproto.events import Event, Message, Ping, Pong

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of a stream of events, without which nginx would send the events together, at the end."""
_LINGER_S = 5.0
"""Maximum seconds in which a client can read what was sent to it before the end."""
_PARTS_PER_S, _PARTS_BURST = 400, 1000
"""Number of pings, pongs and parts of messages that a WebSocket may send in a second, and at once
after a pause."""
_PART_BYTES = 1024
"""Bytes of a message for which one more part may come."""
_SLICE_BYTES = 8192
"""Bytes that are parsed at once, so that a flood is noticed before others wait for it."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a server on its clients.

    Attributes:
        connections: maximum number of connections, see ``ConnectionBounds``.
        head_s: maximum seconds to receive the head of a request.
        message_bytes: maximum size of a WebSocket message.
        shutdown_s: maximum seconds to let answers finish when the server stops.
        trusted_proxies: addresses and networks of proxies whose X-Forwarded-For header names the
            client.
    """

    connections: int
    head_s: float
    message_bytes: int
    shutdown_s: int
    trusted_proxies: tuple[str, ...] = ()


def server_config(app: Any, limits: ConnectionLimits, **more: Any) -> uvicorn.Config:
    """Return the settings of a server with these limits.

    Args:
        app: ASGI application.
        limits: limits on its clients.
        more: further arguments of ``uvicorn.Config``.
    """
    return uvicorn.Config(
        app,
        # h11, because httptools, uvicorn's default, does not limit a request's head.
        http=partial(Connection, ConnectionBounds(limits.connections, limits.head_s)),  # pyright: ignore[reportArgumentType] is called
        ws=Socket,
        ws_max_size=limits.message_bytes,
        # A small message could become a large one.
        ws_per_message_deflate=False,
        proxy_headers=bool(limits.trusted_proxies),
        forwarded_allow_ips=list(limits.trusted_proxies),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=limits.shutdown_s,
        **more,
    )


@dataclass(eq=False)
class ConnectionBounds:
    """Limits on a server's connections; use it only in the server's event loop.

    Attributes:
        maximum: maximum number of connections. Each new connection beyond this number closes the
            connection that has been waiting longest for its client.
        head_s: maximum seconds to receive the head of a request, counted from the start of the
            connection or the end of the previous response.
    """

    maximum: int
    head_s: float
    _waiting: dict[Connection, None] = field(default_factory=dict, init=False, repr=False)
    """Connections that are waiting for a complete request, longest wait first."""

    def add(self, connection: Connection) -> None:
        """Record that a connection is waiting for its client."""
        self._waiting.setdefault(connection)

    def discard(self, connection: Connection) -> None:
        """Record that a connection is no longer waiting for its client."""
        self._waiting.pop(connection, None)

    def close_oldest(self) -> None:
        """Close the connection that has been waiting longest for its client."""
        if self._waiting:
            longest = next(iter(self._waiting))
            self.discard(longest)
            longest.transport.abort()


class Connection(H11Protocol):
    """Connection that is closed if no request arrives in time; uvicorn's own would wait forever.

    Args:
        bounds: limits on all connections of the server.
        arguments: arguments passed by uvicorn.
    """

    def __init__(self, bounds: ConnectionBounds, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._bounds = bounds
        self._deadline: asyncio.TimerHandle | None = None
        self._is_upgraded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] as uvicorn has it
        """Start the deadline for the first request of a new connection."""
        super().connection_made(transport)
        self._follow()
        if len(self.connections) > self._bounds.maximum:
            self._bounds.close_oldest()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadline of the closed connection, and remove it from the waiting list."""
        super().connection_lost(exc)
        self._bounds.discard(self)
        self._end_deadline()

    def handle_events(self) -> None:
        """Process received data, then update the deadline."""
        super().handle_events()
        self._follow()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection to the WebSocket protocol, whose application has its own bounds."""
        self._is_upgraded = True
        self._bounds.discard(self)
        self._end_deadline()
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        """Start the deadline for the next request after a complete response."""
        super().on_response_complete()
        self._follow()

    def _follow(self) -> None:
        """Update the deadline and the waiting list for the state: head, body or response."""
        if self._is_upgraded:
            return
        cycle = self.cycle
        answers = cycle is not None and not cycle.response_complete
        if answers:
            # The head has arrived; the application has its own timeout for the body.
            self._end_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._bounds.head_s, self.transport.close)
        if answers and not cycle.more_body:
            self._bounds.discard(self)
        else:
            self._bounds.add(self)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Socket(WSProtocol):
    """WebSocket whose application learns at once that a client is gone, which does not wait for a
    client that reads nothing once its application has ended, and which ends a flood of frames that
    are no messages, as the application cannot see them."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._parts, self._since = float(_PARTS_BURST), self.loop.time()
        """Parts that may come, and when they were counted."""
        events = self.conn.events
        self.conn.events = lambda: self._bounded(events())

    def data_received(self, data: bytes) -> None:
        """Parse received data, slice by slice, until the connection ends."""
        for start in range(0, len(data), _SLICE_BYTES):
            if self.transport.is_closing():
                return
            super().data_received(data[start : start + _SLICE_BYTES])

    def _bounded(self, events: Iterable[Event]) -> Generator[Event, None, None]:
        """Yield events; if there are too many that are no messages, end the connection."""
        for event in events:
            if isinstance(event, Message):
                self._parts += len(event.data) / _PART_BYTES
            is_part = isinstance(event, Message) and not event.message_finished
            if (is_part or isinstance(event, Ping | Pong)) and not self._may_take_part():
                self.transport.abort()
                return
            yield event

    def _may_take_part(self) -> bool:
        """Count a frame that is no message; return whether it may come."""
        now = self.loop.time()
        refilled = self._parts + _PARTS_PER_S * (now - self._since)
        self._parts, self._since = min(_PARTS_BURST, refilled) - 1, now
        return self._parts >= 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop messages that were received but not taken, since nobody waits for answers."""
        events = [self.queue.get_nowait() for _ in range(self.queue.qsize())]
        for event in events:
            if event["type"] == "websocket.connect":  # The application takes it first in any case.
                self.queue.put_nowait(event)
        super().connection_lost(exc)

    async def run_asgi(self) -> None:
        """Run the application, then end the connection."""
        await super().run_asgi()
        self.loop.call_later(_LINGER_S, self.transport.abort)
