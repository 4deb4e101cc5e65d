"""ApplicationServer: server whose connections are in a process of their own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Scope

from oscar_mm.apps.channel import ABORT, READY, STOP, Channel, awaits_continue, payload_size
from oscar_mm.apps.serve.event_stream import TRY_SEND
from oscar_mm.apps.serve.server import Server

_CONNECTION_PROCESS = "oscar_mm.apps.connection_process"
_START_S = 60.0
"""Maximum seconds until the connection process accepts connections."""
_MAX_IN_FLIGHT_BYTES = 1 << 16
"""Bytes of an answer that may be on their way to its client; while there are more, the application
waits before it sends another event."""


class ApplicationServer(Server):
    """Server whose connections are in another process (``apps/connection_process.py``).

    In a single process, the engine's thread would wait for the interpreter lock while requests are
    parsed and thousands of pieces a second are sent. The application, the model and the chats are
    in this process.

    Args:
        app: application to serve; ``run`` takes the sockets to listen on.
    """

    def __init__(self, app: FastAPI) -> None:
        super().__init__(app)
        self._app = cast("ASGIApp", self.config.app)
        self._exchanges: dict[int, _Exchange] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel
        self._is_stopping = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and then the connection process, which gets the sockets."""
        await super().startup([])
        self.started = False  # Until connections are accepted.
        loop = asyncio.get_running_loop()
        self._ready, self._ended = loop.create_future(), loop.create_future()
        ours, theirs = socket.socketpair()
        with theirs:
            listening = [one.fileno() for one in sockets or ()]
            options = {
                "channel": theirs.fileno(),
                "sockets": listening,
                "limits": asdict(self.limits),
            }
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _CONNECTION_PROCESS, json.dumps(options)],
                # Modules come from the search path of this process, not from the current folder.
                env=os.environ | {"PYTHONPATH": os.pathsep.join(x or os.curdir for x in sys.path)},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *listening],
                start_new_session=True,  # Only this process should get Ctrl-C.
            )
        _, self._channel = await loop.create_unix_connection(
            lambda: Channel(self._received, self._process_ended), sock=ours
        )
        ends = (self._ready, self._ended)
        await asyncio.wait(ends, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            self._process.kill()
            self.has_failed = self.should_exit = True
        self.started = True

    def _received(self, request: int, kind: str, value: Any) -> None:
        """Handle a message of the connection process."""
        if kind == READY:
            self._ready.set_result(None)
        elif kind == "open":
            exchange = self._exchanges[request] = _Exchange(request, value, self._channel)
            exchange.task = task = asyncio.ensure_future(self._answer(exchange))
            self.server_state.tasks.add(task)  # uvicorn waits for these tasks when it stops.
            task.add_done_callback(self.server_state.tasks.discard)
        elif (exchange := self._exchanges.get(request)) is not None:
            exchange.received(kind, value)

    async def _answer(self, exchange: _Exchange) -> None:
        """Run the application for a request, and report its end."""
        failure, scope = None, exchange.scope
        extensions = {**scope.get("extensions", {}), TRY_SEND: exchange.try_send}
        try:
            await self._app({**scope, "extensions": extensions}, exchange.receive, exchange.send)
        except Exception:
            failure = traceback.format_exc()
        finally:
            del self._exchanges[exchange.number]
            self._channel.put(exchange.number, "end", failure)

    def _process_ended(self) -> None:
        """Stop, since no client can be answered without the connection process."""
        self._ended.set_result(None)
        self.has_failed = not self._is_stopping
        self.should_exit = True
        for exchange in self._exchanges.values():
            exchange.disconnect()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the service, while the connection process waits for answers to be sent."""
        self._is_stopping = True
        self._channel.put(0, STOP)
        await super().shutdown(sockets)

    def _abort_connections(self) -> None:
        self._channel.put(0, ABORT)

    async def _wait_for_connections(self) -> None:
        assert self._process is not None
        await asyncio.wait([self._ended], timeout=self.limits.shutdown_s)
        self._process.kill()  # Changes nothing if it has ended.
        await run_in_threadpool(self._process.wait)


class _Exchange:
    """Request from the connection process, with ASGI's ``receive`` and ``send``.

    Args:
        number: number of the request.
        scope: its ASGI scope.
        channel: channel to the connection process.

    Attributes:
        task: task that runs the application.
    """

    def __init__(self, number: int, scope: Scope, channel: Channel) -> None:
        self.number, self.scope, self._channel = number, scope, channel
        self.task: asyncio.Task[None] | None = None
        self._events = asyncio.Queue[Message]()
        self._has_asked, self._in_flight, self._lost = not awaits_continue(scope), 0, ""
        self._changed = asyncio.Event()
        """Set by each message, since ``acked`` and ``lost`` end a wait of ``send``."""

    def received(self, kind: str, value: Any) -> None:
        """Handle a message about this request."""
        if kind == "event":
            self._events.put_nowait(value)
        elif kind == "acked":
            self._in_flight -= value
        elif kind == "lost":
            self._lost = value
        elif kind == "cancel" and self.task is not None:
            self.task.cancel()
        self._changed.set()

    def disconnect(self) -> None:
        """Tell the application that the client is gone, since the connection process has ended."""
        self.received("event", {"type": f"{self.scope['type']}.disconnect", "code": 1006})
        self.received("lost", "the process that holds the connection has ended")

    async def receive(self) -> Message:
        """Return the next event of the request."""
        if not self._has_asked:
            self._has_asked = True
            self._channel.put(self.number, "receive")
        event = await self._events.get()
        self._has_asked = False
        return event

    async def send(self, event: Message) -> None:
        """Send an event of the answer, once the client has taken most of the earlier ones.

        Raises:
            OSError: if the connection is closed.
        """
        while not self._can_send and not self._lost:
            self._changed.clear()
            await self._changed.wait()
        if self._lost:
            raise OSError(self._lost)
        self._put(event)

    def try_send(self, part: Callable[[], bytes]) -> bool:
        """Send a part of the body if it need not wait; see ``TRY_SEND``."""
        if self._lost or not self._can_send:
            return False
        self._put({"type": "http.response.body", "body": part(), "more_body": True})
        return True

    @property
    def _can_send(self) -> bool:
        """Whether the client has taken most of the events that were sent."""
        return self._in_flight <= _MAX_IN_FLIGHT_BYTES

    def _put(self, event: Message) -> None:
        self._in_flight += payload_size(event)
        self._channel.put(self.number, "send", event)
