"""The pack kernel: 16-bit keys and values -> page bytes in one launch, on a GPU.

The host side of ``csrc/pack.cu``. ``oscar_mm.ops.pack`` decides when it is used.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from oscar_mm.cache.layout import PAGE_TOKENS, PageFormat
from oscar_mm.ops.kernel import ELEMENTS, SCALINGS, Kernel, load_kernel, tell_once
from oscar_mm.ops.nvrtc import KernelError
from oscar_mm.policy import KVPolicy
from oscar_mm.quant.basis import Basis
from oscar_mm.quant.fit import LSQ_ROUNDS, LSQ_START

_THREADS = 128
_FITS = {"minmax": 0, "lsq": 1}
_NORMS = {"plain": 0, "refit": 1, "unbiased": 2}
NOT_STORABLE = "keys or values hold NaN, infinity or numbers beyond float16 (65504)"
_POINTERS = ("keys", "values", "pages", "sigma", "norms", "bad")


class PackParams(ctypes.Structure):
    """``Params`` of csrc/pack.cu, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("key_stride", ctypes.c_int64 * 3),
        ("value_stride", ctypes.c_int64 * 3),
        ("kv_heads", ctypes.c_int),
        ("sigma_rows", ctypes.c_int),
    )


def shared_bytes(head_dim: int) -> int:
    """``sizeof(Shared)`` of csrc/pack.cu."""
    rows = PAGE_TOKENS * (head_dim + 1) * 4
    return rows + PAGE_TOKENS * (head_dim + 4) + 2 * 4 * PAGE_TOKENS * 4 + PAGE_TOKENS * 4


def macros(
    page_format: PageFormat, policy: KVPolicy, rotate: bool, dtype: torch.dtype
) -> dict[str, str | int]:
    """Macros that csrc/pack.cu is compiled with."""
    return {
        "HEAD_DIM": page_format.head_dim,
        "KEY_GROUP": page_format.key_group,
        "VALUE_GROUP": page_format.value_group,
        "SCALING": SCALINGS[page_format.token_scaling],
        "CODE_BITS": page_format.bits,
        "ELEMENT": ELEMENTS[dtype],
        "ROTATE": int(rotate),
        "FIT": _FITS[policy.fit],
        "LSQ_START": f"{LSQ_START[page_format.bits]}f",
        "LSQ_ROUNDS": LSQ_ROUNDS,
        "NORM_FIT": _NORMS[policy.norm],
    }


def takes(
    keys: torch.Tensor, values: torch.Tensor, page_format: PageFormat, policy: KVPolicy
) -> bool:
    """Whether the kernel packs such pages: formats in fragment order, 16-bit input.

    A norm over all heads that is fitted to the codes needs all heads at once, which a thread
    block does not see.
    """
    shared_fit = page_format.token_scaling == "shared" and policy.norm != "plain"
    contiguous = keys.stride(3) == values.stride(3) == 1
    return page_format.in_fragments and keys.dtype in ELEMENTS and contiguous and not shared_fit


@lru_cache(maxsize=64)
def kernel_for(
    page_format: PageFormat,
    policy: KVPolicy,
    rotate: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Kernel | None:
    """The kernel of a specialization, compiled when first asked for.

    None where it cannot be compiled or the device cannot run it: tried and logged once, because
    every layer asks at every page.
    """
    try:
        return load_kernel("pack.cu", macros(page_format, policy, rotate, dtype), device)
    except KernelError as error:
        tell_once("packing", str(error))
        return None


def pack_by_kernel(
    kernel: Kernel,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_format: PageFormat,
    basis: Basis,
    shared_norms: torch.Tensor | None,
) -> torch.Tensor:
    """Quantize whole pages; arguments and result as ``oscar_mm.ops.pack.pack``.

    Args:
        shared_norms: (pages, 128) float32 with token_scaling "shared", else None.

    Raises:
        FloatingPointError: a scale, zero or norm is no finite float16.
    """
    count, kv_heads = keys.shape[:2]
    pages = torch.zeros(count, page_format.page_bytes, dtype=torch.uint8, device=keys.device)
    bad = torch.zeros(1, dtype=torch.int32, device=keys.device)
    sigma = None if basis.sigma is None else basis.sigma.contiguous()
    params = PackParams(
        *(keys.data_ptr(), values.data_ptr(), pages.data_ptr()),
        None if sigma is None else sigma.data_ptr(),
        None if shared_norms is None else shared_norms.data_ptr(),
        bad.data_ptr(),
        *((ctypes.c_int64 * 3)(*x.stride()[:3]) for x in (keys, values)),
        kv_heads,
        0 if sigma is None else len(sigma),
    )
    kernel.launch(
        (count, kv_heads, 1),
        (_THREADS, 1, 1),
        shared_bytes(page_format.head_dim),
        params,
        torch.cuda.current_stream(keys.device).cuda_stream,
    )
    if bool(bad):
        raise FloatingPointError(NOT_STORABLE)
    return pages
