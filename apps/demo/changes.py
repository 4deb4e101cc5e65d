"""Changes: tells pages that another page has changed the conversation which they show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

WATCH_SCRIPT = """(visitor) => {
  const follow = () => document.getElementById('follow').click();
  const port = window.SharedWorker && new SharedWorker('changes.js').port;
  const tell = (isSeen) => port?.postMessage({visitor, isSeen});
  if (port) port.onmessage = follow;
  document.addEventListener('visibilitychange', () => {
    tell(!document.hidden);
    if (!port && !document.hidden) follow();
  });
  addEventListener('pagehide', () => tell(false));
  tell(!document.hidden);
  if (!port) follow();
}"""
"""Script that shows what other pages change in the conversation of this page, given the page's
session hash. A hidden page catches up when it is shown again. In browsers without shared workers,
a page in sight shows changes only then, too."""
WORKER_SCRIPT = """
const pages = new Map();
let source = null;
const listen = () => {
  source?.close();
  source = null;
  if (!pages.size) return;
  const visitors = [...pages.keys()].map((one) => ['visitor', one]);
  source = new EventSource(`changes?${new URLSearchParams(visitors)}`);
  source.onopen = () => pages.forEach((port) => port.postMessage(''));
  source.onmessage = ({data}) => pages.get(data)?.postMessage('');
};
onconnect = ({ports: [port]}) => {
  port.onmessage = ({data: {visitor, isSeen}}) => {
    if (isSeen) pages.set(visitor, port);
    else pages.delete(visitor);
    listen();
  };
};
"""
"""Script of the worker that all pages of a browser share. It has one connection for those in sight,
because browsers allow only six to one server, and each page uses up to three others."""
_KEEP_ALIVE_S = 15.0
"""Seconds between comments, by which a connection that the client has left is noticed."""
_PAUSE_S = 0.2
"""Minimum seconds between two events, so that one event stands for several changes."""


class Changes:
    """Streams of events, one for each browser; other threads may call ``tell`` and ``close``.

    Args:
        limit: maximum number of streams; one more ends the oldest, whose browser connects again.
    """

    def __init__(self, limit: int) -> None:
        self._streams: dict[_Stream, None] = {}
        self._limit, self._closed = limit, False

    async def stream(self, keys: Sequence[str]) -> AsyncGenerator[str, None]:
        """Yield server-sent events: a page's session hash after each change, and comments in
        between.

        Args:
            keys: session hashes of the browser's pages.
        """
        stream = _Stream(frozenset(keys), asyncio.get_running_loop())
        self._streams[stream] = None
        if len(self._streams) > self._limit:
            oldest = next(iter(self._streams))
            del self._streams[oldest]
            oldest.woken.set()
        try:
            yield ":\n\n"  # Sends the head of the response, so that pages know of the stream.
            while not self._closed and stream in self._streams:
                try:
                    await asyncio.wait_for(stream.woken.wait(), _KEEP_ALIVE_S)
                except TimeoutError:
                    yield ":\n\n"
                    continue
                stream.woken.clear()
                changed, stream.changed = stream.changed, set()
                for key in changed:
                    yield f"data: {key}\n\n"
                if not self._closed:
                    await asyncio.sleep(_PAUSE_S)
        finally:
            self._streams.pop(stream, None)

    def tell(self, *keys: str) -> None:
        """Send an event to the pages with these session hashes."""
        for stream in [*self._streams]:
            if told := stream.keys.intersection(keys):
                stream.wake(told)

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        for stream in [*self._streams]:
            stream.wake(())


@dataclass(eq=False)
class _Stream:
    """A browser's stream.

    Attributes:
        keys: session hashes of the browser's pages.
        loop: event loop of the server; only its thread may change the other attributes.
        changed: session hashes of the pages to tell.
        woken: whether there is something to send, or the stream ends.
    """

    keys: frozenset[str]
    loop: asyncio.AbstractEventLoop
    changed: set[str] = field(default_factory=set)
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self, keys: Iterable[str]) -> None:
        """Send the session hashes; any thread may call this."""

        def add() -> None:
            self.changed.update(keys)
            self.woken.set()

        with suppress(RuntimeError):  # The loop has ended, and so has the stream.
            self.loop.call_soon_threadsafe(add)
