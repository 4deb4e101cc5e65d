"""Timers for work on a device: a point in time, the duration of decode steps, the end of a pass."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import torch

_COUNTED = 9
"""Number of steps, or passes of one kind, over which their duration is estimated."""
_FEWEST = 3
"""Number of passes of one kind before their duration is known; the first ones are captured."""
_MARGIN_S = 2e-3
"""Seconds that the host is early, besides what it needs at most to launch a pass."""


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

    @property
    def is_over(self) -> bool:
        """Whether the device has reached this point."""
        return self._event is None or self._event.query()

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


class EarlyPass(NamedTuple):
    """Pass with a piece of prompts that was launched while the device ran the one before it.

    Attributes:
        begin, end: points in time between which the device runs it.
        launched: time of ``perf_counter`` at which the host had launched it.
        seen: time of ``perf_counter`` by which it had begun: the tokens of the pass before it had
            just arrived.
    """

    begin: DeviceTimer
    end: DeviceTimer
    launched: float
    seen: float


class PassTimer:
    """Estimates how long the host may wait before it launches the pass after the current one.

    If the host were late, the device would be idle. So the current pass is expected to take as
    long as the shortest of the latest passes of its kind, and the launch as the longest.
    """

    def __init__(self) -> None:
        recent = partial(deque[float], maxlen=_COUNTED)
        self._seconds: defaultdict[Hashable, deque[float]] = defaultdict(recent)
        self._launches = recent()
        self._current: tuple[Hashable, EarlyPass] | None = None

    def note_launch(self, seconds: float) -> None:
        """Record the seconds from the end of the host's wait until it had launched a pass."""
        self._launches.append(seconds)

    def note_begin(self, kind: Hashable, early: EarlyPass) -> None:
        """Record that a pass has begun; passes of the same kind take about as long."""
        self._note_end()
        self._current = kind, early

    def seconds_left(self) -> float:
        """Return the seconds that the host may wait, 0 or less if it should launch now."""
        self._note_end()
        now = time.perf_counter()
        if self._current is None:
            return 0.0
        kind, current = self._current
        known = self._seconds[kind]
        if len(known) < _FEWEST or not self._launches:
            return 0.0
        return current.seen + min(known) - max(self._launches) - _MARGIN_S - now

    def _note_end(self) -> None:
        if self._current is None:
            return
        kind, current = self._current
        if current.end.is_over:
            self._seconds[kind].append(current.end.since(current.begin))
            self._current = None
