"""The unpack kernel: page bytes -> 16-bit keys and values, on a GPU: csrc/unpack/unpack.cu."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch

from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.launch import (
    ELEMENTS,
    OUT_OF_ORDER,
    Kernel,
    current_stream,
    load_kernel,
    page_macros,
)
from oscar_mm.kernels.self_check import CheckedKernels
from oscar_mm.ops.samples import CHECKED_HEADS, random_basis, random_pages
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.quant.quantize import unpack_by_torch

_THREADS = 256
_POINTERS = ("pages", "slots", "sigma", "keys", "values")
_CHECKED_PAGES = 5
_WORST_ERROR = 0.01
"""Relative error of a kernel that is right: rounding to bfloat16 makes 0.002."""
Specialization = tuple[PageFormat, bool, torch.dtype]


class UnpackParams(ctypes.Structure):
    """``Params`` of csrc/unpack/unpack.cu, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("page_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("kv_heads", ctypes.c_int),
        ("sigma_rows", ctypes.c_int),
    )


def macros(page_format: PageFormat, rotate: bool, dtype: torch.dtype) -> dict[str, str | int]:
    """Macros that csrc/unpack/unpack.cu is compiled with."""
    return page_macros(page_format) | {
        "KEY_BITS": page_format.bits.keys,
        "VALUE_BITS": page_format.bits.values,
        "ELEMENT": ELEMENTS[dtype],
        "ROTATE": int(rotate),
    }


def kernel_for(
    page_format: PageFormat, rotate: bool, dtype: torch.dtype, device: torch.device
) -> Kernel | None:
    """The kernel to use; None for PyTorch operations."""
    if device.type != "cuda":
        return None
    return TRUSTED.kernel((page_format, rotate, dtype), device)


def launch(
    kernel: Kernel,
    pages: torch.Tensor,
    slots: torch.Tensor,
    sigma: torch.Tensor | None,
    page_format: PageFormat,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Fill keys and values, (n, KV heads, 128, head_dim) each with the same strides."""
    params = UnpackParams(
        *(pages.data_ptr(), slots.data_ptr()),
        None if sigma is None else sigma.data_ptr(),
        *(keys.data_ptr(), values.data_ptr()),
        *(keys.stride(0), keys.stride(1)),
        page_format.kv_heads,
        0 if sigma is None else len(sigma),
    )
    stream = current_stream(pages.device)
    kernel.launch((len(slots), page_format.kv_heads, 1), (_THREADS, 1, 1), 0, params, stream)


def _make(specialization: Specialization, device: torch.device) -> Kernel:
    page_format, rotate, dtype = specialization
    if not page_format.in_fragments:
        raise KernelError(OUT_OF_ORDER)
    if dtype not in ELEMENTS:
        raise KernelError(f"the kernel makes bfloat16 and float16, not {dtype}")
    return load_kernel("unpack/unpack.cu", macros(page_format, rotate, dtype), device)


def _disagreement(specialization: Specialization, kernel: Kernel, device: torch.device) -> float:
    """Largest relative error of a page, on random codes of any scale."""
    page_format, rotate, dtype = specialization
    page_format = replace(page_format, kv_heads=CHECKED_HEADS)
    pages = random_pages(_CHECKED_PAGES, page_format, device)
    basis = random_basis(page_format, rotate, device)
    order = torch.tensor([3, 0, 4, 3, 1], dtype=torch.int32, device=device)
    shape = (CHECKED_HEADS, len(order), PAGE_TOKENS, page_format.head_dim)
    found = torch.empty((2, *shape), dtype=dtype, device=device).transpose(1, 2)
    launch(kernel, pages, order, basis.sigma, page_format, *found)
    expected = torch.stack(unpack_by_torch(pages[order], page_format, basis, torch.float32))
    errors = (found.float() - expected).flatten(2).norm(dim=2) / expected.flatten(2).norm(dim=2)
    # The largest, or NaN if there is any.
    return float(errors.max())


TRUSTED: CheckedKernels[Specialization, Kernel] = CheckedKernels(
    "unpack", _make, _disagreement, _WORST_ERROR
)
