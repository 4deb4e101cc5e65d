"""Memory of devices: what is free, and what reading a prompt takes beside its keys and values."""

from __future__ import annotations

import torch

HIDDEN_STATES = 6
"""Hidden states that are alive at once while a prompt is read, at the least.

Those of LLaVA with grouped queries: what the layer was given and its norm, and queries on their way
through RoPE with keys and values. Qwen's features and wider queries, towers and experts come on
top. It is low, so that nothing is refused that would run.
"""


def free_bytes(device: torch.device) -> int | None:
    """Bytes of a CUDA device that torch can still hand out; None for other devices."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached


def activation_bytes(tokens: int, hidden_size: int, itemsize: int) -> int:
    """Bytes that reading so many tokens at once takes at least, beside their keys and values."""
    return HIDDEN_STATES * tokens * hidden_size * itemsize
