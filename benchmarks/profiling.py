"""Timing on a GPU: one cold call, a call inside a CUDA graph, the host's share, copy bandwidth."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

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


def release(device: torch.device) -> None:
    """Give memory that nobody uses back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def room(device: torch.device) -> int:
    """Bytes that a GPU has left for this process."""
    release(device)
    return torch.cuda.mem_get_info(device)[0]


def allocated(device: torch.device) -> dict[str, int]:
    """Bytes that are handed out on a GPU, and the most since the last call; {} on a CPU.

    Returns:
        "requested": as asked for; "allocated": rounded up; "peak": most requested.
    """
    gc.collect()
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    return {
        "requested": stats["requested_bytes.all.current"],
        "allocated": stats["allocated_bytes.all.current"],
        "peak": stats["requested_bytes.all.peak"],
    }


def allocated_since(
    before: dict[str, int], now: dict[str, int], recorded: Iterable[torch.Tensor]
) -> dict[str, int]:
    """What came to be held in between.

    Args:
        before, now: of ``allocated``.
        recorded: tensors of the benchmark itself, which do not count.

    Returns:
        "requested" and "allocated" bytes; "activations": most on top of what is held; {} on a CPU.
    """
    if not now:
        return {}
    storages = [tensor.untyped_storage() for tensor in recorded]
    not_ours = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    kept = {name: now[name] - before[name] - not_ours for name in ("requested", "allocated")}
    return kept | {"activations": now["peak"] - before["requested"] - kept["requested"]}


_LISTED = 16


def kernels_of(step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Run a step under torch's profiler.

    Args:
        step: waits for what it launches.

    Returns:
        "launches": kernels and copies, those of a CUDA graph too (on a CPU operations); "busy_ms":
        their time; "span_ms": from the first one's begin to the last one's end; "most": [name,
        launches, busy ms, added ms] of those that take most of it. Added is what a kernel's end
        comes after all ends before it: kernels overlap, so it is this that adds up to the span.
    """
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        step()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    # Calls of the driver are events too, of the CPU; operations of a CPU lie within each other.
    events = [one for one in profiler.events() if one.device_type == wanted]
    events.sort(key=lambda one: (one.time_range.end, one.time_range.start))
    kinds: dict[str, list[float]] = {}
    begin = reached = min((one.time_range.start for one in events), default=0.0)
    for event in events:
        kind = kinds.setdefault(event.name, [0, 0.0, 0.0])
        kind[0] += 1
        kind[1] += (event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total) / 1e3
        kind[2] += max(event.time_range.end - reached, 0.0) / 1e3
        reached = max(reached, event.time_range.end)
    found = sorted(([name, *kind] for name, kind in kinds.items()), key=lambda one: -one[3])
    return {
        "launches": sum(count for _, count, _, _ in found),
        "busy_ms": sum(busy for _, _, busy, _ in found),
        "span_ms": (reached - begin) / 1e3,
        "most": found[:_LISTED],
    }
