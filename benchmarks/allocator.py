"""What torch's allocator has handed out, before a conversation and after."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from benchmarks.replay import Call


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


def held(
    before: dict[str, int], now: dict[str, int], calls: Sequence[Call], device: torch.device
) -> dict[str, int]:
    """What came to be held in between, without what a benchmark has recorded there.

    Returns:
        "requested" and "allocated" bytes; "activations": most on top of what is held; {} on a CPU.
    """
    if not now:
        return {}
    tensors = [x for call in calls for x in (*call.prompt.inputs.values(), call.prompt.positions)]
    storages = [x.untyped_storage() for x in tensors if x.device.type == device.type]
    recorded = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
    kept = {name: now[name] - before[name] - recorded for name in ("requested", "allocated")}
    return kept | {"activations": now["peak"] - before["requested"] - kept["requested"]}
