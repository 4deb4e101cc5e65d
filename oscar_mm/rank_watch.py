"""Rank watch: ends this process when another rank of a divided model is killed or crashes.

The next collective would wait for the lost rank: NCCL does so for ten minutes, in a call that no
signal handler of Python interrupts.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from threading import Thread
from typing import BinaryIO

from torch import distributed

from oscar_mm.tensor_parallel import TPGroup

try:
    import fcntl
except ImportError:  # Windows, where torch divides no model either
    fcntl = None

_ENDED = b"ended"
"""Content of a rank's file once the rank ends as it should."""
_PATIENCE_S = 1.0
"""Seconds that a rank with an exception waits for the reason."""


@cache
def watch(ranks: TPGroup) -> None:
    """Watch the other ranks of this machine until this process ends.

    Each rank locks a file of its own. The system releases the lock when the process is gone,
    whatever ended it, and a thread of every other rank waits for that. All ranks call this
    together.
    """
    if ranks.count == 1 or fcntl is None:
        return
    number, path = tempfile.mkstemp(prefix="oscar-mm-rank-")
    file = os.fdopen(number, "r+b", buffering=0)
    # Not lockf, which refuses to let two processes wait for each other. A forked child would keep
    # the lock of flock.
    fcntl.flock(file, fcntl.LOCK_EX)
    os.register_at_fork(after_in_child=file.close)
    watchers: list[Thread] = []
    Finalize(None, _end, (file, path, watchers), exitpriority=0)
    places: list[tuple[str, str]] = [("", "")] * ranks.count
    distributed.all_gather_object(places, (socket.gethostname(), path), ranks.group)
    for rank, (host, theirs) in enumerate(places):
        if rank != ranks.rank and host == socket.gethostname():
            arguments = (theirs, rank, ranks, path)
            watchers.append(Thread(target=_wait, args=arguments, daemon=True))
            watchers[-1].start()


def _end(file: BinaryIO, path: str, watchers: Sequence[Thread]) -> None:
    """Tell the other ranks that this one ends as it should, unless an exception ends it."""
    if not hasattr(sys, "last_value") and sys.exc_info()[0] in (None, SystemExit):
        file.write(_ENDED)
        Path(path).unlink(missing_ok=True)
        return
    # The exception may say that a connection was closed: its watcher names the rank.
    for watcher in watchers:
        watcher.join(_PATIENCE_S / len(watchers))


def _wait(path: str, rank: int, ranks: TPGroup, own: str) -> None:
    """Wait for the end of another rank, and end this process if that one was lost.

    Args:
        path, own: files of the other rank and of this one.
        rank: number of the other rank.
        ranks: all ranks.
    """
    assert fcntl is not None
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed below)
    except FileNotFoundError:  # it has ended in the meantime
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        if file.read() == _ENDED:
            return
    for lost in (path, own):
        Path(lost).unlink(missing_ok=True)
    print(
        f"oscar_mm: rank {rank} of {ranks.count} was killed or has crashed; rank {ranks.rank} ends "
        "too, because it has only a part of the model",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
