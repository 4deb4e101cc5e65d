"""Connections: a bounded number, whose clients say in time what they want."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


@dataclass(eq=False)
class ConnectionBounds:
    """Bounds on the connections of a server, in its event loop.

    Attributes:
        most: connections; one more closes the one that has waited longest for its client.
        head_s: seconds in which the head of a request must come, from the beginning of the
            connection or the end of the answer before.
    """

    most: int
    head_s: float
    _waiting: dict[Connection, None] = field(default_factory=dict, init=False, repr=False)
    """Connections whose client has not sent a whole request, the first to wait first."""

    def add(self, connection: Connection) -> None:
        """Note that a connection waits for its client."""
        self._waiting.setdefault(connection)

    def discard(self, connection: Connection) -> None:
        """Note that a connection does not wait for its client any more."""
        self._waiting.pop(connection, None)

    def make_room(self) -> None:
        """Close the connection that has waited longest for its client."""
        if self._waiting:
            longest = next(iter(self._waiting))
            self.discard(longest)
            longest.transport.abort()


class Connection(H11Protocol):
    """A connection that ends where no request comes; uvicorn alone waits without end.

    Args:
        bounds: of all connections of the server.
        arguments: of uvicorn.
    """

    def __init__(self, bounds: ConnectionBounds, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._bounds = bounds
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] as uvicorn has it
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._follow()
        if len(self.connections) > self._bounds.most:
            self._bounds.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        self._bounds.discard(self)
        self._end_deadline()

    def handle_events(self) -> None:
        """Take what the client has sent."""
        super().handle_events()
        self._follow()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._follow()

    def _follow(self) -> None:
        """Wait for the head of a request, or for its body, or not at all."""
        cycle = self.cycle
        answers = cycle is not None and not cycle.response_complete
        if answers:
            # The application waits for the body, and not for long.
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
