"""Shows what a server's threads and tasks do while its event loop stalls."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STALL_S = 2.0
"""Seconds without a turn of the event loop, or of the interpreter, after which all is shown."""
_BEAT_S = 0.1


def loop_of(server: Any) -> asyncio.AbstractEventLoop:
    return server.servers[0].get_loop()


def show(loop: asyncio.AbstractEventLoop) -> None:
    """Print the stacks of all threads, and of the tasks of an event loop."""
    print(f"\nall threads at {time.monotonic():.1f} s", file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback(sys.__stderr__)
    for task in asyncio.all_tasks(loop):
        task.print_stack(limit=4, file=sys.__stderr__)


@contextmanager
def watched(server: Any) -> Iterator[list[float]]:
    """Watch the event loop of a running server within the block.

    If the interpreter itself stalls, because a thread keeps its lock, faulthandler shows it.

    Yields:
        the longest time between two turns of the event loop, in seconds, as the only item.
    """
    loop, longest, over = loop_of(server), [0.0], threading.Event()
    latest = [time.monotonic()]

    def beat() -> None:
        now = time.monotonic()
        longest[0] = max(longest[0], now - latest[0])
        latest[0] = now

    def watch() -> None:
        shown = 0.0
        while not over.wait(_BEAT_S) and not loop.is_closed():
            faulthandler.dump_traceback_later(STALL_S + _BEAT_S, file=sys.__stderr__)
            loop.call_soon_threadsafe(beat)
            if time.monotonic() - latest[0] > STALL_S and shown != latest[0]:
                shown = latest[0]
                show(loop)
        faulthandler.cancel_dump_traceback_later()

    thread = threading.Thread(target=watch, name="watch", daemon=True)
    thread.start()
    try:
        yield longest
    finally:
        over.set()
        thread.join()
