"""CUDA graphs: work on fixed tensors that is captured once, and launched again at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from oscar_mm.kernels.launch import switched_off

SWITCH = "OSCAR_MM_CUDA_GRAPHS"
"""Environment variable: "off" leaves steps eager."""
Result = TypeVar("Result")
Record = Callable[[Callable[[], Any], torch.device], Callable[[], Any]]
"""Makes of a function on fixed tensors of a device one that does the same again, maybe without
running it."""
_CAPTURES = threading.Lock()
_BROKEN = list[torch.cuda.CUDAGraph]()
"""Graphs whose capture has failed. They stay, as torch's allocators go on asking them."""


def record_cuda_graph(function: Callable[[], Result], device: torch.device) -> Callable[[], Result]:
    """Capture a function's work on a GPU; what comes back launches it and returns the same tensors
    again.

    Other threads may use the GPU meanwhile, but not wait for all of it, which breaks the capture.

    Raises:
        Exception: what the function raises, or torch as the capture is broken. Another try may
            succeed.
    """
    graph, aside = torch.cuda.CUDAGraph(), _capture_stream(device)
    # One capture at a time, as they share a stream. Other threads may allocate meanwhile: they are
    # not part of it.
    with _CAPTURES:
        with torch.cuda.device(device):
            # A thread's first product makes a handle of cuBLAS, which allocates: no capture may.
            torch.cuda.current_blas_handle()
        try:
            # Out of the stream again also where the capture fails at its end.
            with (
                torch.cuda.stream(aside),
                torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"),
            ):
                result = function()
        except BaseException:
            _BROKEN.append(graph)
            raise

    def replay() -> Result:
        graph.replay()
        return result

    return replay


def recorder(devices: set[torch.device]) -> Record | None:
    """CUDA graphs where they can be had, for steps that attend by our kernels.

    Args:
        devices: on which steps compute.
    """
    if switched_off() or os.environ.get(SWITCH) == "off":
        return None
    return record_cuda_graph if all(device.type == "cuda" for device in devices) else None


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one that graphs of a GPU are captured on: cuBLAS keeps 32 MiB for every stream it saw."""
    return torch.cuda.Stream(device)
