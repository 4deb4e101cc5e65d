"""Channel: messages between the process that holds a server's connections and the one that answers.

A message is a request's number, its kind and a value. The first five kinds are sent by the process
that holds the connections, the last three by the one that answers:

- ``open``: a request has come; the value is its ASGI scope.
- ``event``: the next ASGI event of a request, which ``receive`` asked for.
- ``taken``: the client has been sent so many bytes of an answer.
- ``lost``: events of an answer cannot be sent any more; the value says why.
- ``cancel``: the answer has taken too long to end while the server stops.
- ``receive``: the application waits for the next event of a request.
- ``send``: ASGI event of an answer.
- ``end``: the application has ended; the value is the traceback of its error, or None.

``READY``, ``STOP`` and ``ABORT`` concern no request.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any, cast

READY, STOP, ABORT = "ready", "stop", "abort"
"""Connections are accepted; stop gracefully; and end the connections that are left."""
_LENGTH_BYTES = 4


class Channel(asyncio.Protocol):
    """End of a channel in this process. Both processes run the same code of the same user.

    Messages of one turn of the event loop are sent together: after a decode step of many requests,
    one system call sends all their pieces. Each call would release the interpreter, and wait for
    the engine's thread to release it again.

    Args:
        received: function that takes the number, kind and value of each message that arrives.
        ended: function that is called when the other process is gone.
    """

    def __init__(
        self, received: Callable[[int, str, Any], None], ended: Callable[[], None]
    ) -> None:
        self._received, self._ended = received, ended
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = bytearray()
        self._messages: list[tuple[int, str, Any]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport."""
        # uvloop's is no instance of this class.
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass on the messages that have arrived completely."""
        self._buffer += data
        start = 0
        while len(self._buffer) >= start + _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            end = begin + int.from_bytes(self._buffer[start:begin])
            if len(self._buffer) < end:
                break
            start = end
            for message in pickle.loads(memoryview(self._buffer)[begin:end].tobytes()):
                self._received(*message)
        del self._buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell that the other process is gone."""
        self._transport = None
        self._ended()

    def put(self, request: int, kind: str, value: Any = None) -> None:
        """Send a message with the others of this turn of the event loop; it is lost if the other
        process is gone."""
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append((request, kind, value))

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        if self._transport is not None:
            data = pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
            self._transport.write(len(data).to_bytes(_LENGTH_BYTES) + data)
