"""Waiting in tests for what other threads and processes do."""

import time
from collections.abc import Callable


def until(done: Callable[[], object], seconds: float = 20) -> None:
    """Wait until a condition holds, and fail if it does not in time."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)
