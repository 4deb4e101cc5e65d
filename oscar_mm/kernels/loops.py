"""Loops for CPUs that numba compiles: how, and on how many threads."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import njit

_HOW = {"nogil": True, "fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy"}
_log = logging.getLogger(__name__)


class compiled:  # a decorator
    """Of a function that Python calls, and that raises nothing: compiled at its first call. The
    code stays in a file for the next process, where a file can be written and read."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        try:
            self._compiled = njit(cache=True, **_HOW)(function)
        except RuntimeError as error:  # No folder can be written.
            self._do_without_file(error)

    def __call__(self, *arguments: Any) -> None:
        """Run the loops."""
        try:
            self._compiled(*arguments)
        except Exception as error:  # a full disk, or a damaged file
            self._do_without_file(error)
            self._compiled(*arguments)

    def _do_without_file(self, error: Exception) -> None:
        name = self._function.__name__
        _log.warning("%s is compiled at each start, which takes seconds: %s", name, error)
        self._compiled = njit(**_HOW)(self._function)


# A function that is called is there twice, once in the caller's own code, and which of the two is
# run, with other bits as a result, depends on whether the code comes from the cache. That looks at
# the file of the compiled function alone: after a change of another touch those that call it.
inlined = njit(inline="always", **_HOW)
"""Of a function that a compiled one calls."""


def as_bits(states: torch.Tensor) -> np.ndarray:
    """Bits of bfloat16 (uint16) or float32 (uint32) numbers, contiguous; of float16 ones those of
    float32."""
    states = states.detach()
    if states.dtype == torch.bfloat16:
        return states.contiguous().view(torch.uint16).numpy()
    if states.dtype != torch.float32:
        states = states.float()
    return np.ascontiguousarray(states.numpy()).view(np.uint32)


@inlined
def widen(row, bits):
    """Write the numbers of a row of ``as_bits`` as bits of float32 ones."""
    shift = np.uint32(32 - 8 * row.itemsize)
    for index in range(len(row)):
        bits[index] = np.uint32(row[index]) << shift


@inlined
def read_floats(halves, places, numbers):
    """Write float16 numbers as float32; none of them is infinite or NaN.

    Args:
        halves: (n,) uint16.
        places: (m,) of the numbers.
        numbers: (m,) float32.
    """
    bits = numbers.view(np.uint32)
    for index in range(len(numbers)):
        bits[index] = halves[places[index]]
    for index in range(len(numbers)):
        half = bits[index]
        bits[index] = (half & np.uint32(0x8000)) << np.uint32(16) | (
            half & np.uint32(0x7FFF)
        ) << np.uint32(13)
    for index in range(len(numbers)):
        numbers[index] *= np.float32(2.0**112)  # The exponents' offsets are 15 and 127.


def shares(tasks: np.ndarray) -> list[np.ndarray]:
    """Tasks for each thread that torch has."""
    threads = min(torch.get_num_threads(), len(tasks))
    return [tasks[first::threads].copy() for first in range(threads)]


def call_all(calls: Sequence[tuple[Any, ...]]) -> None:
    """Call functions with their arguments, at once if torch has several threads. None of them runs
    any more when this returns or raises."""
    begun: list[Future[Any]] = []
    if len(calls) > 1 and (threads := torch.get_num_threads()) > 1:
        try:
            pool = _pool(os.getpid(), threads)
            for call in calls:
                begun.append(pool.submit(*call))
        except RuntimeError:  # Python is ending, and waits for this thread: pools take no more.
            pass
        finally:
            _wait_for_all(begun)
    for future in begun:
        future.result()
    for function, *arguments in calls[len(begun) :]:
        function(*arguments)


def _wait_for_all(futures: Sequence[Future[Any]]) -> None:
    """Wait, by Ctrl-C too: what the calls write to may be another's afterwards."""
    try:
        wait(futures)
    except BaseException:
        _wait_for_all(futures)
        raise


@lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of a process: a fork has none of its parent's."""
    return ThreadPoolExecutor(threads, "oscar-mm loops")
