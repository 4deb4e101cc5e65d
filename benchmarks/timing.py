"""Timing on a GPU: one cold call, a call inside a CUDA graph, the host's share, copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

COLD_REPEATS, GRAPH_CALLS, GRAPH_REPLAYS, COPY_REPEATS = 30, 20, 10, 20
_WARM_UP = 3
_SAME = 1e-2
"""Relative difference that the order of sums in bfloat16 may make."""
_FLUSH_BYTES = 256 << 20
_FLUSHES = 4
"""Zeroings before a timed call: about 0.3 ms in which the host can enqueue it, so that what is
timed is the device's work, as far as the host is not slower than that."""
_COPY_BYTES = 1_000_000_000

Call = Callable[[], torch.Tensor]


class Timer:
    """Times calls on the current device, in microseconds."""

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._sum = torch.empty((), dtype=torch.int64, device="cuda")

    def cold(self, call: Call, repeats: int = COLD_REPEATS) -> float:
        """Median of single calls, each after the L2 cache was flushed.

        The flush zeroes 256 MB and then reads them, so that the call does not pay for writing the
        zeros back to memory.
        """
        for _ in range(_WARM_UP):
            call()
        return 1e3 * median(self._one(call) for _ in range(repeats))

    def _one(self, call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for _ in range(_FLUSHES):
            self._flush.zero_()
        torch.sum(self._flush, dim=0, out=self._sum)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def graph(self, call: Call) -> tuple[float | None, str]:
        """Time of a call in a CUDA graph of 20, or None and why it could not be captured.

        Calls follow each other on the same data: what fits in the L2 cache is read from there.
        """
        graph = torch.cuda.CUDAGraph()
        expected = call()
        torch.cuda.synchronize()
        try:
            # A failed capture leaves its own stream current; this context restores ours.
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                call()
                with torch.cuda.graph(graph, stream=stream):
                    for _ in range(GRAPH_CALLS):
                        output = call()
        except Exception as error:  # whatever a launch raises in a capture that it broke
            torch.cuda.synchronize()
            return None, _first_cause(error)
        # A kernel on another stream would escape the capture and seem to take no time.
        output.fill_(torch.nan)
        graph.replay()
        if not bool((output - expected).norm() <= _SAME * expected.norm()):
            return None, "its replay does not repeat the output"
        times = []
        for _ in range(GRAPH_REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return 1e3 * median(times) / GRAPH_CALLS, ""

    def host(self, call: Call) -> float:
        """Time that the host needs to enqueue a call."""
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(GRAPH_CALLS):
            call()
        spent = perf_counter() - start
        torch.cuda.synchronize()
        return 1e6 * spent / GRAPH_CALLS


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device-to-device copy of 1 GB."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(COPY_REPEATS + _WARM_UP):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * _COPY_BYTES / (median(times[_WARM_UP:]) / 1e3)


def _first_cause(error: BaseException) -> str:
    """First line of what went wrong first: ending a broken capture fails once more."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]
