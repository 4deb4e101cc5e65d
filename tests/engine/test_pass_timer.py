"""How long the host may wait before it launches the next pass."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from oscar_mm.engine import device_timer
from oscar_mm.engine.device_timer import EarlyPass, PassTimer


@dataclass
class Point:
    """Point in time of a simulated device."""

    at: float
    is_over: bool = False

    def since(self, earlier: Point) -> float:
        assert self.is_over
        return self.at - earlier.at


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(device_timer.time, "perf_counter", lambda: now[0])
    return now


def begun(timer: PassTimer, kind: str, seconds: float) -> Point:
    """Let a pass begin now; return its end."""
    now, end = device_timer.time.perf_counter(), Point(seconds)
    timer.note_begin(kind, EarlyPass(Point(0.0, True), end, now, now))
    return end


def run(timer: PassTimer, kind: str, *seconds: float) -> None:
    for each in seconds:
        begun(timer, kind, each).is_over = True


def test_waits_until_shortly_before_the_shortest_pass_ends(clock) -> None:
    timer = PassTimer()
    timer.note_launch(0.001)
    timer.note_launch(0.004)
    run(timer, "long", 0.030, 0.024, 0.025)
    run(timer, "short", 0.005, 0.005, 0.005)
    begun(timer, "long", 0.024)
    assert 0.016 < timer.seconds_left() < 0.020  # 24 ms less the longest launch, and some more.
    clock[0] += 0.010
    assert 0.006 < timer.seconds_left() < 0.010
    clock[0] += 0.013
    assert timer.seconds_left() <= 0


def test_does_not_wait_without_knowledge(clock) -> None:
    timer = PassTimer()
    assert timer.seconds_left() <= 0  # No pass is under way.
    run(timer, "long", 0.024, 0.024, 0.024)
    begun(timer, "long", 0.024)
    assert timer.seconds_left() <= 0  # How long a launch takes is unknown.
    timer.note_launch(0.001)
    assert timer.seconds_left() > 0
    begun(timer, "other", 0.024)
    assert timer.seconds_left() <= 0  # So is how long this pass takes.


def test_does_not_wait_for_a_pass_that_is_over(clock) -> None:
    timer = PassTimer()
    timer.note_launch(0.001)
    run(timer, "long", 0.024, 0.024, 0.024)
    assert timer.seconds_left() <= 0


def test_a_slow_launch_is_forgotten(clock) -> None:
    timer = PassTimer()
    for seconds in (0.5, *[0.001] * 9):  # The first one captured a graph.
        timer.note_launch(seconds)
    run(timer, "long", 0.9, *[0.024] * 9)
    begun(timer, "long", 0.024)
    assert 0.018 < timer.seconds_left() < 0.024


def test_work_of_the_host_is_no_part_of_a_pass(clock) -> None:
    """Between the begin of a pass and its record, the host gives the last tokens to requests."""
    timer = PassTimer()
    timer.note_launch(0.001)
    run(timer, "long", 0.024, 0.024, 0.024)
    early = EarlyPass(Point(0.0, True), Point(0.024), clock[0], clock[0])
    clock[0] += 0.010
    timer.note_begin("long", early)
    assert 0.008 < timer.seconds_left() < 0.014
