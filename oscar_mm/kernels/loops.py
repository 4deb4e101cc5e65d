"""Loops for CPUs that numba compiles: how, and on how many threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import njit

_HOW = {"nogil": True, "fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy"}
compiled = njit(cache=True, **_HOW)
"""Of a function that Python calls."""
# A function that is called is there twice, once in the caller's own code, and which of the two is
# run, with other bits as a result, depends on whether the code comes from the cache.
inlined = njit(inline="always", **_HOW)
"""Of a function that a compiled one calls."""


def as_bits(states: torch.Tensor) -> np.ndarray:
    """Bits of bfloat16 (uint16) or float32 (uint32) numbers, contiguous; of float16 ones those of
    float32."""
    states = states.detach()
    if states.dtype == torch.bfloat16:
        return states.contiguous().view(torch.uint16).numpy()
    return states.float().contiguous().view(torch.uint32).numpy()


@inlined
def floats(halves, places):
    """float16 numbers as float32; none of them is infinite or NaN.

    Args:
        halves: (n,) uint16.
        places: (m,) of the numbers.
    """
    bits = np.empty(len(places), np.uint32)
    for index in range(len(bits)):
        half = np.uint32(halves[places[index]])
        bits[index] = (half & np.uint32(0x8000)) << np.uint32(16) | (
            half & np.uint32(0x7FFF)
        ) << np.uint32(13)
    found = bits.view(np.float32)
    for index in range(len(bits)):
        found[index] *= np.float32(2.0**112)  # The exponents' offsets are 15 and 127.
    return found


def shares(tasks: np.ndarray) -> list[np.ndarray]:
    """Tasks for each thread that torch has."""
    threads = min(torch.get_num_threads(), len(tasks))
    return [tasks[first::threads].copy() for first in range(threads)]


def call_all(calls: list[tuple[Any, ...]]) -> None:
    """Call functions with their arguments, at once if torch has several threads."""
    if torch.get_num_threads() == 1 or len(calls) == 1:
        for function, *arguments in calls:
            function(*arguments)
        return
    pool = _pool(os.getpid(), torch.get_num_threads())
    for made in [pool.submit(*call) for call in calls]:
        made.result()


@lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of a process: a fork has none of its parent's."""
    return ThreadPoolExecutor(threads, "oscar-mm loops")
