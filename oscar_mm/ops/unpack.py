"""unpack: page bytes -> keys and values in the model's coordinates.

unpack(Tensor pages, Tensor slots, Tensor? sigma, str format, bool rotate, ScalarType dtype)
    -> (Tensor keys, Tensor values)

pages   (pool slots, page_bytes) uint8
slots   (n,) int32, each within the pool
sigma   (KV heads or 1, head_dim) float32: balancing to take out; None for none
format  of the pages (``oscar_mm.ops.library``)
rotate  whether they are stored rotated
dtype   bfloat16, float16 or float32
result  (n, KV heads, 128, head_dim) each, in memory by KV heads, then pages: with the first two
        dimensions swapped, the pages of a head follow each other
"""

from __future__ import annotations

import torch

from oscar_mm.ops import unpack_kernel
from oscar_mm.ops.library import STATES, Arguments, define, format_of, text_of
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.quant.basis import Basis
from oscar_mm.quant.quantize import unpack_by_torch

_arguments = Arguments("unpack")


def unpack(
    pages: torch.Tensor, page_format: PageFormat, basis: Basis, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """All of (n, page_bytes) pages, in the model's coordinates and dtype, by the operation."""
    slots = torch.arange(len(pages), dtype=torch.int32, device=pages.device)
    return unpack_slots(
        pages.contiguous(), slots, basis.sigma, text_of(page_format), basis.rotate, dtype
    )


def _empty(
    pages: torch.Tensor,
    slots: torch.Tensor,
    sigma: torch.Tensor | None,
    format: str,
    rotate: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the arguments; results without data."""
    page_format = format_of(format)
    kv_heads, head_dim = page_format.kv_heads, page_format.head_dim
    device = pages.device
    _arguments.check("pages", pages, ("slots", page_format.page_bytes), torch.uint8, device)
    _arguments.check("slots", slots, ("n",), torch.int32, device)
    _arguments.check_sigma(sigma, kv_heads, head_dim, device)
    if dtype not in STATES:
        raise TypeError(f"oscar_mm.unpack: dtype is {dtype}, must be one of {STATES}")
    shape = (kv_heads, len(slots), PAGE_TOKENS, head_dim)
    keys, values = (pages.new_empty(shape, dtype=dtype).transpose(0, 1) for _ in range(2))
    return keys, values


def _unpack(
    pages: torch.Tensor,
    slots: torch.Tensor,
    sigma: torch.Tensor | None,
    format: str,
    rotate: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    results = _empty(pages, slots, sigma, format, rotate, dtype)
    page_format = format_of(format)
    kernel = unpack_kernel.kernel_for(page_format, rotate, dtype, pages.device)
    if kernel is None:
        basis = Basis(page_format.head_dim, rotate, sigma)
        made = unpack_by_torch(pages[slots], page_format, basis, dtype)
        for result, side in zip(results, made, strict=True):
            result.copy_(side)
    elif len(slots):
        unpack_kernel.launch(kernel, pages, slots, sigma, page_format, *results)
    return results


unpack_slots = define(
    "unpack(Tensor pages, Tensor slots, Tensor? sigma, str format, bool rotate, ScalarType dtype)"
    " -> (Tensor keys, Tensor values)",
    _unpack,
    _empty,
)
