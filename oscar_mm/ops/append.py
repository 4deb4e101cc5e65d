"""Append: write keys and values of new tokens to 16-bit slots, without waiting for the host.

A single launch, which CUDA graphs can capture, writes all tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from oscar_mm.kernels.launch import (
    Strides,
    addresses,
    current_stream,
    ints,
    pointers,
    refuse_capture,
    warn_once,
)
from oscar_mm.kernels.self_check import OperationKernel, random_normal
from oscar_mm.ops.library import STATES, ArgumentChecker, Written, define

_FEW_WRITES = 4
"""Maximum number of writes that are copied one by one on a CPU."""
_MAX_THREADS = 64
"""Maximum number of threads per block, so that a block can share a multiprocessor with one of
``decode``."""
UNITS = (16, 8, 4)
"""Possible numbers of bytes that a thread of the kernel copies at a time, fastest first."""
_EXPONENTS = {
    torch.bfloat16: "0x7f807f80u",
    torch.float16: "0x7c007c00u",
    torch.float32: "0x7f800000u",
}
_checker = ArgumentChecker("append")


class AppendArguments(NamedTuple):
    """Arguments of ``append``.

    Attributes:
        keys: (batch, KV heads, tokens, head_dim) bfloat16, float16 or float32; any strides with
            contiguous channels.
        values: same shape and dtype as keys.
        recent: (slots, 2, KV heads, head_dim), keys then values, in the same dtype.
        writes: (n, 3) int32: row, token and slot; nothing is written for slot -1, so that a
            captured graph can have a fixed n. No slot occurs twice.
        not_finite: (1,) int32; set to 1 if a key or value is NaN or infinite, otherwise unchanged.
        beside: whether the preceding launch is ``decode`` for these tokens and reads none of the
            slots, so that this launch need not wait for it.
    """

    keys: torch.Tensor
    values: torch.Tensor
    recent: Written
    writes: torch.Tensor
    not_finite: Written
    beside: bool = False


class AppendParams(ctypes.Structure):
    """Mirror of ``Params`` in csrc/append/append.cu, field for field."""

    _fields_ = (
        *pointers("keys", "values", "recent", "writes", "not_finite"),
        *(("key_stride", Strides), ("value_stride", Strides)),
        *ints("kv_heads", "row_bytes", "beside"),
    )


class Specialization(NamedTuple):
    """Compile-time parameters of the kernel."""

    dtype: torch.dtype
    unit: int
    """Bytes that a thread copies at a time."""

    @property
    def macros(self) -> dict[str, str | int]:
        """Preprocessor macros for compiling csrc/append/append.cu."""
        exponent = _EXPONENTS[self.dtype]
        return {"UNIT": self.unit, "ELEMENT_BYTES": self.dtype.itemsize, "EXPONENT": exponent}


class AppendKernel(OperationKernel[Specialization], operation="append", bound=0.0):
    """CUDA kernel of ``append``."""

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        self._kernel = self._load("append/append.cu", specialization.macros)

    def __call__(self, arguments: AppendArguments) -> None:
        """Launch the kernel; there must be at least one write."""
        keys, values, recent, writes, not_finite, beside = arguments
        size, kv_heads = keys.element_size(), keys.shape[1]
        row_bytes = keys.shape[3] * size
        params = AppendParams(
            *addresses(keys, values, recent, writes, not_finite),
            *(Strides(*(step * size for step in x.stride()[:3])) for x in (keys, values)),
            *(kv_heads, row_bytes, beside),
        )
        threads = min(_MAX_THREADS, -(-2 * kv_heads * row_bytes // 16 // 32) * 32)
        stream = current_stream(keys.device)
        block = (max(threads, 32), 1, 1)
        self._kernel.launch((len(writes), 1, 1), block, 0, params, stream, dependent=True)

    @staticmethod
    def disagreement(
        specialization: Specialization, kernel: Callable[[Any], None], device: torch.device
    ) -> float:
        """Return the fraction of elements and flags that differ, for rows of one or more units."""
        dtype, unit = specialization
        random = random_normal(dtype, device)
        heads, head_dim = 3, 5 * unit
        keys, values = (random(2, 7, heads, head_dim).transpose(1, 2) for _ in range(2))
        writes = [[0, 6, 2], [1, 0, 0], [1, 5, -1], [1, 3, 1]]
        writes = torch.tensor(writes, dtype=torch.int32, device=device)
        differing = 0.0
        for last in (1.0, torch.inf):
            values[1, 2, 3, -1] = last
            results = []
            recent = random(4, 2, heads, head_dim)
            for run in (kernel, append_by_torch):
                target, flag = recent.clone(), torch.zeros(1, dtype=torch.int32, device=device)
                run(AppendArguments(keys, values, target, writes, flag))
                results.append(torch.cat([target.flatten().float(), flag.float()]))
            differing += float((results[0] != results[1]).float().mean())
        return differing


def append_by_torch(arguments: AppendArguments) -> None:
    """Run ``append`` with PyTorch operations; waits for the device."""
    refuse_capture("append", arguments.keys.device)
    sides = arguments.keys, arguments.values
    if arguments.keys.is_cpu and len(arguments.writes) <= _FEW_WRITES:
        # Copies of single tokens take a fraction of the time of indexing.
        writes = [write for write in arguments.writes.tolist() if write[2] >= 0]
        stored = [arguments.recent[slot] for _, _, slot in writes]
        for (row, token, _), target in zip(writes, stored, strict=True):
            for side, states in zip(target, sides, strict=True):
                side.copy_(states[row, :, token])
    else:
        rows, tokens, slots = arguments.writes[arguments.writes[:, 2] >= 0].unbind(1)
        stored = [torch.stack([states[rows, :, tokens] for states in sides], 1)]
        arguments.recent[slots] = stored[0]
    if not all(bool(new.isfinite().all()) for new in stored):
        arguments.not_finite.fill_(1)


def _check(arguments: AppendArguments) -> None:
    keys, check, device = arguments.keys, _checker.check, arguments.keys.device
    check("keys", keys, ("batch", "heads", "tokens", "d"), STATES, device, rows=True)
    check("values", arguments.values, keys.shape, keys.dtype, device, rows=True)
    shape = ("slots", 2, keys.shape[1], keys.shape[3])
    check("recent", arguments.recent, shape, keys.dtype, device)
    check("writes", arguments.writes, ("n", 3), torch.int32, device)
    check("not_finite", arguments.not_finite, (1,), torch.int32, device)


def _append(arguments: AppendArguments) -> None:
    if not len(arguments.writes):
        return
    kernel = None
    if arguments.keys.is_cuda:
        unit = unit_of(*arguments[:3])
        if unit is None:
            warn_once("append", f"rows are not aligned to {UNITS[-1]} bytes")
        else:
            kernel = AppendKernel.of(
                Specialization(arguments.keys.dtype, unit), arguments.keys.device
            )
    (kernel or append_by_torch)(arguments)


def unit_of(*tensors: torch.Tensor) -> int | None:
    """Return the largest unit that divides the size of all rows and to which they are aligned; None
    if there is none."""
    for unit in UNITS:
        elements = unit // tensors[0].element_size()
        if all(
            x.data_ptr() % unit == 0
            and x.shape[-1] % elements == 0
            and all(stride % elements == 0 for stride in x.stride()[:-1])
            for x in tensors
        ):
            return unit
    return None


append = define("append", AppendArguments, _check, _append)
