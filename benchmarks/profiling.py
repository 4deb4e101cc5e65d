"""Measure time, memory and kernel launches on a GPU, with events, the allocator and a profiler."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from oscar_mm.kernels.address_range import bytes_in_ranges

COLD_REPEATS, GRAPH_CALLS, GRAPH_REPLAYS, COPY_REPEATS = 30, 20, 10, 20
_WARM_UP = 3
_TOLERANCE = 1e-2
"""Maximum relative difference that another order of summation in bfloat16 may cause."""
_FLUSH_BYTES = 256 << 20
_FLUSHES = 4
"""Number of memory fills before a timed call. They take about 0.3 ms, during which the host
enqueues the call. Thus the measured time is device time, unless the host takes longer than this."""
_COPY_BYTES = 1_000_000_000
_LISTED_KERNELS = 16

Call = Callable[[], torch.Tensor]


class Timer:
    """Timer that measures calls on the current GPU, in microseconds."""

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._sum = torch.empty((), dtype=torch.int64, device="cuda")

    def cold(self, call: Call, repeats: int = COLD_REPEATS) -> float:
        """Return the median time of single calls, each of which follows a flush of the L2 cache.

        The flush zeroes 256 MB and then reads them, so that writing the zeros back to memory does
        not count toward the call.
        """
        for _ in range(_WARM_UP):
            call()
        return 1e3 * median(self._cold_call_ms(call) for _ in range(repeats))

    def _cold_call_ms(self, call: Call) -> float:
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
        """Return the time of a call within a CUDA graph of 20 calls.

        The calls use the same data, so they find whatever fits into the L2 cache there.

        Returns:
            The time, or None if the capture failed; and the reason for the failure, or "".
        """
        graph = torch.cuda.CUDAGraph()
        expected = call()
        torch.cuda.synchronize()
        try:
            # A failed capture leaves its stream current; this context restores the previous stream.
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                call()
                with torch.cuda.graph(graph, stream=stream):
                    for _ in range(GRAPH_CALLS):
                        output = call()
        except Exception as error:  # A launch that breaks the capture may raise any exception.
            torch.cuda.synchronize()
            return None, _first_cause(error)
        # A kernel on another stream would not be captured, and would appear to take no time.
        output.fill_(torch.nan)
        graph.replay()
        if not bool((output - expected).norm() <= _TOLERANCE * expected.norm()):
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
        """Return the time that the host takes to enqueue a call."""
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(GRAPH_CALLS):
            call()
        seconds = perf_counter() - start
        torch.cuda.synchronize()
        return 1e6 * seconds / GRAPH_CALLS


def copy_bandwidth() -> float:
    """Return the bytes per second that a device-to-device copy of 1 GB reads and writes."""
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
    """Return the first line of the original error in a chain of exceptions.

    Ending a broken capture raises another error.
    """
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]


def release(device: torch.device) -> None:
    """Return the allocator's unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Return the number of bytes of a GPU's memory that are available to this process."""
    release(device)
    return torch.cuda.mem_get_info(device)[0]


def allocated(device: torch.device) -> dict[str, int]:
    """Return the bytes that torch's allocator and pools of pages use on a GPU.

    Returns:
        A dict, which is empty on a CPU: "requested", the bytes requested by callers; "allocated",
        the same bytes rounded up to blocks; "peak", the maximum of requested bytes since the last
        call, including the current pools.
    """
    gc.collect()
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    size, mapped = bytes_in_ranges(device)
    return {
        "requested": stats["requested_bytes.all.current"] + size,
        "allocated": stats["allocated_bytes.all.current"] + mapped,
        "peak": stats["requested_bytes.all.peak"] + size,
    }


def allocated_since(
    before: dict[str, int], after: dict[str, int], ignored: Iterable[torch.Tensor]
) -> dict[str, int]:
    """Return the bytes by which memory use grew between two calls of ``allocated``.

    Args:
        before, after: results of the two calls.
        ignored: tensors of the benchmark itself, which do not count.

    Returns:
        A dict, which is empty on a CPU: the growth of "requested" and "allocated" bytes, and
        "activations", the maximum bytes that were in use in addition to them.
    """
    if not after:
        return {}
    storages = [tensor.untyped_storage() for tensor in ignored]
    own = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    growth = {name: after[name] - before[name] - own for name in ("requested", "allocated")}
    return growth | {"activations": after["peak"] - before["requested"] - growth["requested"]}


def kernel_launches(step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Run a step under torch's profiler, and return statistics of its kernels.

    Args:
        step: function that launches kernels and waits for them.
        device: device of the step; on a CPU, operations are counted instead of kernels.

    Returns:
        A dict: "launches", the number of kernels and copies, including those of a CUDA graph;
        "busy_ms", the sum of their times; "span_ms", the time from the start of the first to the
        end of the last; "most", a list of [name, launches, busy ms, added ms] for those with the
        largest times. As kernels may overlap, the added time of a kernel is the time by which it
        ends later than all previous kernels, so that added times sum to the span.
    """
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        step()
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    # Driver calls are also events, but events of the CPU; operations on a CPU are nested.
    events = [event for event in profiler.events() if event.device_type == kind]
    events.sort(key=lambda event: (event.time_range.end, event.time_range.start))
    figures: dict[str, list[float]] = {}
    begin = reached = min((event.time_range.start for event in events), default=0.0)
    for event in events:
        figure = figures.setdefault(event.name, [0, 0.0, 0.0])
        figure[0] += 1
        figure[1] += (event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total) / 1e3
        figure[2] += max(event.time_range.end - reached, 0.0) / 1e3
        reached = max(reached, event.time_range.end)
    most = sorted(([name, *figure] for name, figure in figures.items()), key=lambda row: -row[3])
    return {
        "launches": sum(count for _, count, _, _ in most),
        "busy_ms": sum(busy for _, _, busy, _ in most),
        "span_ms": (reached - begin) / 1e3,
        "most": most[:_LISTED_KERNELS],
    }
