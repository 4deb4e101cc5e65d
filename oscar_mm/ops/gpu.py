"""What kernels need to know of a GPU, and whether they are to be used on it."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from oscar_mm.ops.nvrtc import KernelError

SWITCH = "OSCAR_MM_KERNELS"
"""Environment variable: "auto" (default), "off" (PyTorch operations), or "no-bulk" (the copy path
of GPUs before sm_90, on any GPU)."""
_ARCHITECTURES = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (12, 0): "sm_120",
}


def switched_off() -> bool:
    """Whether the user wants PyTorch operations instead of kernels."""
    return os.environ.get(SWITCH) == "off"


def architecture(device: torch.device) -> str | None:
    """What to compile for on a device; None if the kernels do not run there."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability in _ARCHITECTURES:
        return _ARCHITECTURES[capability]
    # Code for a lower minor version of the same generation runs; that with an "a" runs nowhere
    # else, and no code runs on another generation.
    lower = [known for known in _ARCHITECTURES if known[0] == capability[0] and known < capability]
    return _ARCHITECTURES[max(lower)].rstrip("a") if lower else None


def copies_in_bulk(device: torch.device) -> bool:
    """Whether kernels use the bulk copy engine (csrc/copy.cuh): from sm_90 on, unless switched off.

    Raises:
        KernelError: kernels do not run on the device.
    """
    arch = architecture(device)
    if arch is None:
        raise KernelError(f"{device} is no NVIDIA GPU of capability 8.0 or more")
    return int(arch[3:].rstrip("a")) >= 90 and os.environ.get(SWITCH) != "no-bulk"


def current_stream(device: torch.device) -> int:
    """Handle of the stream that torch works on, on a GPU given with its index."""
    # As ``torch.cuda.current_stream(device).cuda_stream``, which takes longer than a launch.
    return torch._C._cuda_getCurrentRawStream(device.index)


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a thread block may have on a GPU."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@lru_cache(maxsize=16)
def shared_of_one(device: torch.device) -> int:
    """Bytes of shared memory of which a GPU's multiprocessor has room for one thread block only.

    Where two kernels that read weights share multiprocessors, those of the next come in while this
    one's are waited for: 10% to 40% slower (H200).
    """
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor // 2


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
