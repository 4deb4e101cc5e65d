"""Pieces of work that run in parallel in a CUDA graph, on two streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def in_parallel(
    device: torch.device, work: Callable[[], Result], beside: Callable[[], Any]
) -> Result:
    """Launch two independent pieces of work and return the result of the first.

    In a CUDA graph they run in parallel. Outside a graph they run one after the other, ``beside``
    first, since switching streams costs the host more time than it saves.

    Args:
        device: device on which both run.
        work: piece whose result is returned.
        beside: piece that may run at the same time; its result is dropped.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        beside()
        return work()
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(main)
    result = work()
    with torch.cuda.stream(side):
        beside()
    main.wait_stream(side)
    return result


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the shared side stream; there is only one, since cuBLAS keeps 32 MiB for each stream
    of a thread."""
    return torch.cuda.Stream(device)
