"""What a decode step launches: how many kernels, and how long they keep the GPU busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

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
