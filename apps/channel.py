"""Channel: messages between the two processes of a server.

The connection process (``oscar_mm.apps.connection_process``) parses requests and writes answers;
the application process (``ApplicationServer``) runs the application. A message consists of a
request's number, a kind and a value. The connection process sends the first five kinds, the
application process the others:

- ``open``: a request has arrived; the value is its ASGI scope.
- ``event``: the next ASGI event of a request, which ``receive`` asked for; the first one is sent
  unasked, unless the client ``awaits_continue``.
- ``acked``: size of the events of an answer (``payload_size``) that were sent to the client since
  the previous such message; so the application knows how much is on its way.
- ``lost``: the client can get no more events of an answer; the value says why.
- ``cancel``: the answer has taken too long to end while the server stops.
- ``receive``: the application waits for the next event of a request.
- ``send``: the value is an ASGI event of the answer.
- ``end``: the application has ended; the value is the traceback of its error, or None.

``READY``, ``STOP`` and ``ABORT`` concern no request; their number is 0.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, cast

READY: Final = "ready"
"""The connection process accepts connections."""
STOP: Final = "stop"
"""The connection process is to stop gracefully."""
ABORT: Final = "abort"
"""The connection process is to abort the connections that are still open."""
Kind = Literal[
    "open", "event", "acked", "lost", "cancel", "receive", "send", "end", "ready", "stop", "abort"
]
"""Kind of a message."""
_LENGTH_BYTES = 4


def awaits_continue(scope: Mapping[str, Any]) -> bool:
    """Return whether the client sends the body only after the application begins to read it
    (``Expect: 100-continue``), so that it need not send the body of a refused request."""
    return any(name == b"expect" for name, _ in scope["headers"])


def payload_size(event: Mapping[str, Any]) -> int:
    """Return the number of bytes that an ASGI event sends, or of characters if it is text."""
    return len(event.get("body") or event.get("bytes") or event.get("text") or "")


class Channel(asyncio.Protocol):
    """End of the channel in this process.

    Messages are pickled; this is safe because both processes run the same code as the same user.

    Messages of one turn of the event loop are sent together: after a decode step of many requests,
    one system call sends the pieces of several answers. A call for each piece would release the
    interpreter lock, and then wait until the engine's thread releases it.

    Args:
        received: function that takes the number, kind and value of each message that arrives.
        ended: function that is called when the other process has ended.
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
        # uvloop's transports are not instances of asyncio.WriteTransport.
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass on each message that has arrived completely."""
        self._buffer += data
        start = 0
        while len(self._buffer) >= start + _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            end = begin + int.from_bytes(self._buffer[start:begin])
            if len(self._buffer) < end:
                break
            start = end
            for message in pickle.loads(self._buffer[begin:end]):
                self._received(*message)
        del self._buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """Report that the other process has ended."""
        self._transport = None
        self._ended()

    def put(self, request: int, kind: Kind, value: Any = None) -> None:
        """Send a message, together with the others of this turn of the event loop.

        The message is dropped if the other process has ended.

        Args:
            request: number of the request; 0 if the message concerns none.
            kind: kind of the message; see this module.
            value: any value that pickle supports.
        """
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append((request, kind, value))

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        if self._transport is not None:
            data = pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
            self._transport.write(len(data).to_bytes(_LENGTH_BYTES) + data)
