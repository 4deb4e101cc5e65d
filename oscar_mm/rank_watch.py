"""Rank watch: end this process if another rank of a tensor-parallel group is killed or crashes.

Without the watch, the next collective would wait for the lost rank; NCCL waits for ten minutes, in
a call that Python's signal handlers cannot interrupt.
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
except ImportError:  # on Windows, where torch does not support tensor parallelism either
    fcntl = None

_ENDED = b"ended"
"""Content of a rank's file after it has exited normally."""
_PATIENCE_S = 1.0
"""Seconds that a rank waits after an exception for its watchers to report the cause."""


@cache
def watch(ranks: TPGroup) -> None:
    """Watch the other ranks on this machine until this process ends; all ranks must call this.

    Each rank locks its own file. When its process ends for any reason, the system releases the
    lock; on every other rank, a thread waits for this.
    """
    if ranks.count == 1 or fcntl is None:
        return
    number, path = tempfile.mkstemp(prefix="oscar-mm-rank-")
    file = os.fdopen(number, "r+b", buffering=0)
    # lockf is not used, since it does not let two processes wait for each other. With flock, a
    # forked child would keep the lock; the handler prevents this.
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
    """Tell the other ranks that this rank exits normally, unless an exception is ending it."""
    if not hasattr(sys, "last_value") and sys.exc_info()[0] in (None, SystemExit):
        file.write(_ENDED)
        Path(path).unlink(missing_ok=True)
        return
    # The exception may be a closed connection, in which case a watcher names the lost rank.
    for watcher in watchers:
        watcher.join(_PATIENCE_S / len(watchers))


def _wait(path: str, rank: int, ranks: TPGroup, own: str) -> None:
    """Wait for the end of another rank, and end this process if that rank was lost.

    Args:
        path, own: files of the other rank and of this rank.
        rank: index of the other rank.
        ranks: tensor-parallel group.
    """
    assert fcntl is not None
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed below)
    except FileNotFoundError:  # The rank has ended in the meantime.
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
