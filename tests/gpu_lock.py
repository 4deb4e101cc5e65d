"""One GPU shared by the processes of pytest-xdist: some tests need it for themselves."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def gpu_lock(run: str, *, alone: bool) -> Iterator[None]:
    """Keep tests that measure or take all free memory of a GPU apart from the others.

    Args:
        run: id of the test run, the same in all its processes.
        alone: wait until no other test uses a GPU, and let none begin.
    """
    folder = Path(tempfile.gettempdir())
    with (folder / f"gpu-gate-{run}").open("w") as gate, (folder / f"gpu-{run}").open("w") as use:
        # Through the gate one at a time, or tests that share the GPU would never leave a pause.
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(use, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
