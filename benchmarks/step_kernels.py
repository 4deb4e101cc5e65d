"""What a decode step launches: how many kernels, and how long they keep the GPU busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_LISTED = 16


def kernels_of(step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Run a step under torch's profiler.

    Args:
        step: waits for what it launches.

    Returns:
        "launches": kernels and copies, those of a CUDA graph too (on a CPU operations); "busy_ms":
        their time; "most": [name, launches, ms] of those that take most of it.
    """
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        step()
    found = []
    for event in profiler.key_averages():
        # Calls of the driver are events too, which take no time of the device.
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if spent:
            found.append([event.key, event.count, spent / 1e3])
    found.sort(key=lambda one: -one[2])
    return {
        "launches": sum(count for _, count, _ in found),
        "busy_ms": sum(spent for _, _, spent in found),
        "most": found[:_LISTED],
    }
