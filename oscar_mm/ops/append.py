"""append: keys and values of new tokens -> slots of 16 bit, without waiting for the host.

    append(Tensor keys, Tensor values, Tensor(a!) recent, Tensor writes, Tensor(b!) bad) -> ()

    keys, values  (batch, KV heads, tokens, head_dim) bfloat16, float16 or float32; any strides with
                  contiguous channels
    recent        (slots, 2, KV heads, head_dim), keys then values, in the same dtype; written
    writes        (n, 3) int32: row, token and slot; with slot -1 nothing is done, so that a
                  captured graph can have a fixed n. No two of them have the same slot.
    bad           (1,) int32; set to 1 where a key or value is NaN or infinite, else left alone

One launch for all of them, which CUDA graphs capture.
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch

from oscar_mm.kernels.launch import Kernel, current_stream, load_kernel, tell_once
from oscar_mm.kernels.self_check import CheckedKernels
from oscar_mm.ops.library import STATES, Arguments, define

_MAX_THREADS = 256
_UNITS = (16, 8, 4)
_EXPONENTS = {
    torch.bfloat16: "0x7f807f80u",
    torch.float16: "0x7c007c00u",
    torch.float32: "0x7f800000u",
}
_arguments = Arguments("append")


class AppendParams(ctypes.Structure):
    """``Params`` of csrc/append/append.cu, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "recent", "writes", "bad")),
        ("key_stride", ctypes.c_int64 * 3),
        ("value_stride", ctypes.c_int64 * 3),
        ("kv_heads", ctypes.c_int),
        ("row_bytes", ctypes.c_int),
    )


def macros(dtype: torch.dtype, unit: int) -> dict[str, str | int]:
    """Macros that csrc/append/append.cu is compiled with."""
    return {"UNIT": unit, "ELEMENT_BYTES": dtype.itemsize, "EXPONENT": _EXPONENTS[dtype]}


def _check(
    keys: torch.Tensor,
    values: torch.Tensor,
    recent: torch.Tensor,
    writes: torch.Tensor,
    bad: torch.Tensor,
) -> None:
    device = keys.device
    _arguments.check("keys", keys, ("batch", "heads", "tokens", "d"), STATES, device, rows=True)
    _arguments.check("values", values, keys.shape, keys.dtype, device, rows=True)
    shape = ("slots", 2, keys.shape[1], keys.shape[3])
    _arguments.check("recent", recent, shape, keys.dtype, device)
    _arguments.check("writes", writes, ("n", 3), torch.int32, device)
    _arguments.check("bad", bad, (1,), torch.int32, device)


def _append(
    keys: torch.Tensor,
    values: torch.Tensor,
    recent: torch.Tensor,
    writes: torch.Tensor,
    bad: torch.Tensor,
) -> None:
    _check(keys, values, recent, writes, bad)
    if not len(writes):
        return
    kernel = None
    if keys.is_cuda:
        unit = _unit(keys, values, recent)
        if unit is None:
            tell_once("append", f"rows are not aligned to {_UNITS[-1]} bytes")
        else:
            kernel = TRUSTED.kernel((keys.dtype, unit), keys.device)
    if kernel is not None:
        _by_kernel(kernel, keys, values, recent, writes, bad)
    else:
        _by_torch(keys, values, recent, writes, bad)


def _by_torch(
    keys: torch.Tensor,
    values: torch.Tensor,
    recent: torch.Tensor,
    writes: torch.Tensor,
    bad: torch.Tensor,
) -> None:
    rows, tokens, slots = writes[writes[:, 2] >= 0].long().unbind(1)
    for side, states in enumerate((keys, values)):
        new = states[rows, :, tokens]
        recent[:, side][slots] = new
        bad |= (~new.isfinite().all()).int()


def _unit(*tensors: torch.Tensor) -> int | None:
    """Bytes that all rows can be taken apart into and are aligned to; None if there are none."""
    for unit in _UNITS:
        elements = unit // tensors[0].element_size()
        if all(
            x.data_ptr() % unit == 0
            and x.shape[-1] % elements == 0
            and all(stride % elements == 0 for stride in x.stride()[:-1])
            for x in tensors
        ):
            return unit
    return None


def _by_kernel(
    kernel: Kernel,
    keys: torch.Tensor,
    values: torch.Tensor,
    recent: torch.Tensor,
    writes: torch.Tensor,
    bad: torch.Tensor,
) -> None:
    size, kv_heads = keys.element_size(), keys.shape[1]
    row_bytes = keys.shape[3] * size
    params = AppendParams(
        *(x.data_ptr() for x in (keys, values, recent, writes, bad)),
        *(
            (ctypes.c_int64 * 3)(*(stride * size for stride in x.stride()[:3]))
            for x in (keys, values)
        ),
        kv_heads,
        row_bytes,
    )
    threads = min(_MAX_THREADS, -(-2 * kv_heads * row_bytes // 16 // 32) * 32)
    stream = current_stream(keys.device)
    block = (max(threads, 32), 1, 1)
    kernel.launch((len(writes), 1, 1), block, 0, params, stream, dependent=True)


def _make(specialization: tuple[torch.dtype, int], device: torch.device) -> Kernel:
    return load_kernel("append/append.cu", macros(*specialization), device)


def _disagreement(
    specialization: tuple[torch.dtype, int], kernel: Kernel, device: torch.device
) -> float:
    """Share of a few slots' elements and flags that differ, on rows of one unit each and more."""
    dtype, unit = specialization
    generator = torch.Generator(device).manual_seed(0)
    random = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    heads, head_dim = 3, 5 * unit
    keys, values = (random(2, 7, heads, head_dim).transpose(1, 2) for _ in range(2))
    writes = [[0, 6, 2], [1, 0, 0], [1, 5, -1], [1, 3, 1]]
    writes = torch.tensor(writes, dtype=torch.int32, device=device)
    differing = 0.0
    for last in (1.0, torch.inf):
        values[1, 2, 3, -1] = last
        results = []
        recent = random(4, 2, heads, head_dim)
        for append in (partial(_by_kernel, kernel), _by_torch):
            target, bad = recent.clone(), torch.zeros(1, dtype=torch.int32, device=device)
            append(keys, values, target, writes, bad)
            results.append(torch.cat([target.flatten().float(), bad.float()]))
        differing += float((results[0] != results[1]).float().mean())
    return differing


TRUSTED: CheckedKernels[tuple[torch.dtype, int], Kernel] = CheckedKernels(
    "append", _make, _disagreement, 0.0
)
append = define(
    "append(Tensor keys, Tensor values, Tensor(a!) recent, Tensor writes, Tensor(b!) bad) -> ()",
    _append,
    _check,
)
