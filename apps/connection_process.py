"""Connection process of a server: parses requests and writes answers for the application process.

``ApplicationServer`` starts it, with its options as JSON::

    python -m oscar_mm.apps.connection_process '{"channel": 5, "sockets": [3], ...}'
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from itertools import count
from types import FrameType
from typing import Any

import uvicorn

from oscar_mm.apps.channel import ABORT, READY, STOP, Channel, awaits_continue, payload_size
from oscar_mm.apps.connections import ConnectionLimits, server_config

_ACK_BYTES = 1 << 14
"""Bytes of an answer that are sent to its client between two ``acked`` messages."""
_Event = MutableMapping[str, Any]


class ApplicationError(Exception):
    """Error of the application in the application process; the message is its traceback."""


class Forwarder:
    """ASGI application that passes each request on to the application process.

    Attributes:
        channel: channel to the application process; set it before the first request.
    """

    def __init__(self) -> None:
        self.channel: Channel
        self._numbers = count(1)
        self._requests: dict[int, tuple[asyncio.Queue[tuple[str, Any]], Callable[[], None]]] = {}
        """Messages about each request, and a function that asks its client for the next event."""

    def received(self, request: int, kind: str, value: Any) -> None:
        """Take a message about a request."""
        if (found := self._requests.get(request)) is None:
            return
        messages, ask = found
        if kind == "receive":
            # At once: a client may speak while it reads nothing of the answer.
            ask()
        else:
            messages.put_nowait((kind, value))

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[_Event]],
        send: Callable[[_Event], Awaitable[None]],
    ) -> None:
        """Pass a request to the application process, and its answer to the client.

        Raises:
            ApplicationError: if the application failed.
        """
        number, unacked, lost = next(self._numbers), 0, False
        messages = asyncio.Queue[tuple[str, Any]]()
        receiving = set[asyncio.Task[None]]()

        async def forward_event() -> None:
            self.channel.put(number, "event", await receive())

        def ask() -> None:
            receiving.add(task := asyncio.ensure_future(forward_event()))
            task.add_done_callback(receiving.discard)

        self._requests[number] = messages, ask
        if not awaits_continue(scope):
            ask()  # Before "open" is queued, so that both are usually sent together.
        # The state belongs to this process's own lifespan.
        self.channel.put(number, "open", {k: v for k, v in scope.items() if k != "state"})
        try:
            while True:
                kind, value = await messages.get()
                if kind == "end":
                    if value is not None:
                        raise ApplicationError(value)
                    return
                elif not lost:
                    try:
                        await send(value)
                    except Exception as error:  # Such as uvicorn's for a closed WebSocket.
                        lost = True
                        self.channel.put(number, "lost", repr(error))
                    unacked += payload_size(value)
                    if unacked >= _ACK_BYTES:
                        self.channel.put(number, "acked", unacked)
                        unacked = 0
        except asyncio.CancelledError:
            self.channel.put(number, "cancel")
            raise
        finally:
            del self._requests[number]
            for task in receiving:
                task.cancel()


class _Server(uvicorn.Server):
    """Server that stops when the application process says so."""

    def __init__(self, forwarder: Forwarder, limits: ConnectionLimits) -> None:
        super().__init__(server_config(forwarder, limits, lifespan="off"))
        self._forwarder = forwarder

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ignore signals: the application process gets them, and then sends ``STOP``."""

    async def main_loop(self) -> None:
        """Report that connections are accepted, and run until the application process says stop."""
        self._forwarder.channel.put(0, READY)
        await super().main_loop()


async def _run(channel: int, sockets: list[int], limits: ConnectionLimits) -> None:
    forwarder = Forwarder()
    server = _Server(forwarder, limits)

    def received(request: int, kind: str, value: Any) -> None:
        if kind == STOP:
            server.should_exit = True
        elif kind == ABORT:
            for connection in list(server.server_state.connections):
                connection.transport.abort()
        else:
            forwarder.received(request, kind, value)

    # Nobody can answer once the application process has ended.
    _, forwarder.channel = await asyncio.get_running_loop().create_unix_connection(
        lambda: Channel(received, lambda: os._exit(1)), sock=socket.socket(fileno=channel)
    )
    await server.serve([socket.socket(fileno=number) for number in sockets])


def main() -> None:
    """Serve until the application process says stop or ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    options = json.loads(sys.argv[1])
    limits = ConnectionLimits(**options["limits"])
    asyncio.run(_run(options["channel"], options["sockets"], limits))


if __name__ == "__main__":
    main()
