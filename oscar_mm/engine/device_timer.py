"""Timers for work on a device: DeviceTimer for a point in time, StepTimer for decode steps."""

from __future__ import annotations

import time
from collections import deque

import torch

_COUNTED = 9
"""Number of steps over which the step time is estimated."""


class DeviceTimer:
    """Point in time at which a device has finished everything launched on it so far."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        self._seconds = time.perf_counter()

    @property
    def comes_later(self) -> bool:
        """Whether the device may reach this point after the host does."""
        return self._event is not None

    def wait(self) -> None:
        """Wait until the device has reached this point."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: DeviceTimer) -> float:
        """Return the seconds since an earlier timer; the device must have reached both."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        return earlier._event.elapsed_time(self._event) / 1e3


class StepTimer:
    """Estimate of a decode step's duration: the lower quartile of the latest steps.

    The lower quartile ignores the first step between two layers, which takes longer, as the GPU
    waits while the host prepares it.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[DeviceTimer, DeviceTimer]] = deque(maxlen=_COUNTED)
        self._seconds: deque[float] = deque(maxlen=_COUNTED)

    def note(self, begin: DeviceTimer, end: DeviceTimer) -> None:
        """Record the begin and end of a step; the end may still be in the future."""
        self._steps.append((begin, end))

    def seconds(self) -> float:
        """Return the seconds per step, 0 before the first step; recorded steps must have ended."""
        self._seconds.extend(end.since(begin) for begin, end in self._steps)
        self._steps.clear()
        return sorted(self._seconds)[len(self._seconds) // 4] if self._seconds else 0.0
