"""Unpack: convert page bytes to keys and values in the model's coordinates."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from oscar_mm.kernels.launch import (
    addresses,
    check_pages,
    cpu_kernels_available,
    current_stream,
    ints,
    pointers,
)
from oscar_mm.kernels.macros import Macros, macros_of
from oscar_mm.kernels.self_check import OperationKernel, relative_error
from oscar_mm.ops.library import STATES, ArgumentChecker, define, format_of, numbers_of
from oscar_mm.ops.samples import CHECKED_HEADS, random_basis, random_pages
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.pages.quantize import unpack_by_torch
from oscar_mm.quant.basis import Basis

_THREADS = 256
_CHECKED_PAGES = 5
_checker = ArgumentChecker("unpack")
Sides = tuple[torch.Tensor, torch.Tensor]


class UnpackArguments(NamedTuple):
    """Arguments of ``unpack``.

    The results are keys and values, (n, KV heads, 128, head_dim) each. In memory, KV heads come
    before pages: with the first two dimensions swapped, the pages of a head are contiguous.

    Attributes:
        pages: (pool slots, page_bytes) uint8.
        slots: (n,) int32: slots of the pages to unpack, each within the pool.
        sigma: (KV heads or 1, head_dim) float32: balancing factors to undo; None for no balancing.
        format: format of the pages (``oscar_mm.ops.library.numbers_of``).
        rotate: whether pages are stored rotated.
        dtype: dtype of the results: bfloat16, float16 or float32.
    """

    pages: torch.Tensor
    slots: torch.Tensor
    sigma: torch.Tensor | None
    format: list[int]
    rotate: bool
    dtype: torch.dtype

    @property
    def page_format(self) -> PageFormat:
        """Layout of the pages."""
        return format_of(self.format)

    def result(self) -> Sides:
        """Return uninitialized keys and values."""
        page_format = self.page_format
        shape = (page_format.kv_heads, len(self.slots), PAGE_TOKENS, page_format.head_dim)
        keys, values = (
            self.pages.new_empty(shape, dtype=self.dtype).transpose(0, 1) for _ in range(2)
        )
        return keys, values


class UnpackParams(ctypes.Structure):
    """Mirror of ``Params`` in csrc/unpack/unpack.cu, field for field."""

    _fields_ = (
        *pointers("pages", "slots", "sigma", "keys", "values"),
        *((name, ctypes.c_int64) for name in ("page_stride", "head_stride")),
        *ints("kv_heads", "sigma_rows"),
    )


class Specialization(NamedTuple):
    """Compile-time parameters of the kernel."""

    page_format: PageFormat
    rotate: bool
    dtype: torch.dtype

    @property
    def macros(self) -> Macros:
        """Preprocessor macros for compiling csrc/unpack/unpack.cu."""
        keys, values = self.page_format.bits
        return macros_of(self, KEY_BITS=keys, VALUE_BITS=values)


class UnpackKernel(OperationKernel[Specialization], operation="unpack", bound=0.01):
    """CUDA kernel of ``unpack``; rounding to bfloat16 causes a relative error of 0.002."""

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        check_pages(specialization.page_format, specialization.dtype)
        self._kernel = self._load("unpack/unpack.cu", specialization.macros)

    def __call__(self, arguments: UnpackArguments) -> Sides:
        """Launch the kernel."""
        keys, values = arguments.result()
        pages, slots, sigma = arguments[:3]
        if len(slots):
            kv_heads = keys.shape[1]
            params = UnpackParams(
                *addresses(pages, slots, sigma, keys, values),
                *(keys.stride(0), keys.stride(1), kv_heads, 0 if sigma is None else len(sigma)),
            )
            stream = current_stream(pages.device)
            self._kernel.launch((len(slots), kv_heads, 1), (_THREADS, 1, 1), 0, params, stream)
        return keys, values

    @staticmethod
    def disagreement(
        specialization: Specialization, kernel: Callable[[Any], Sides], device: torch.device
    ) -> float:
        """Return the largest relative error of a page, for random codes with any scale."""
        page_format, rotate, dtype = specialization
        page_format = replace(page_format, kv_heads=CHECKED_HEADS)
        pages = random_pages(_CHECKED_PAGES, page_format, device)
        sigma = random_basis(page_format, rotate, device).sigma
        order = torch.tensor([3, 0, 4, 3, 1], dtype=torch.int32, device=device)
        arguments = UnpackArguments(pages, order, sigma, numbers_of(page_format), rotate, dtype)
        found = torch.stack(kernel(arguments)).flatten(2)
        expected = torch.stack(slots_by_torch(arguments, torch.float32)).flatten(2)
        return relative_error(found, expected)


def slots_by_torch(arguments: UnpackArguments, dtype: torch.dtype | None = None) -> Sides:
    """Run ``unpack`` with PyTorch operations; ``dtype`` overrides ``arguments.dtype``."""
    page_format = arguments.page_format
    basis = Basis(page_format.head_dim, arguments.rotate, arguments.sigma)
    pages = arguments.pages[arguments.slots]
    return unpack_by_torch(pages, page_format, basis, dtype or arguments.dtype)


def _check(arguments: UnpackArguments) -> None:
    pages, page_format, device = arguments.pages, arguments.page_format, arguments.pages.device
    _checker.check("pages", pages, ("slots", page_format.page_bytes), torch.uint8, device)
    _checker.check("slots", arguments.slots, ("n",), torch.int32, device)
    _checker.check_sigma(arguments.sigma, page_format.kv_heads, page_format.head_dim, device)
    if arguments.dtype not in STATES:
        raise TypeError(f"oscar_mm.unpack: dtype is {arguments.dtype}, must be one of {STATES}")


def _unpack(arguments: UnpackArguments) -> Sides:
    specialization = Specialization(arguments.page_format, arguments.rotate, arguments.dtype)
    kernel = UnpackKernel.of(specialization, arguments.pages.device)
    if kernel is not None:
        return kernel(arguments)
    if arguments.pages.is_cpu and cpu_kernels_available("unpack"):
        # Imported on first use, since it loads a compiler.
        from oscar_mm.ops.pages_numba import reads, unpack_on_cpu

        if reads(arguments.page_format, arguments.rotate):
            return unpack_on_cpu(arguments)
    keys, values = arguments.result()
    for result, side in zip((keys, values), slots_by_torch(arguments), strict=True):
        result.copy_(side)
    return keys, values


unpack_slots = define("unpack", UnpackArguments, _check, _unpack, "(Tensor keys, Tensor values)")


def unpack(pages: torch.Tensor, page_format: PageFormat, basis: Basis, dtype: torch.dtype) -> Sides:
    """Unpack all (n, page_bytes) pages to the model's coordinates and a dtype, using the
    operation."""
    slots = torch.arange(len(pages), dtype=torch.int32, device=pages.device)
    form = numbers_of(page_format)
    return unpack_slots(pages.contiguous(), slots, basis.sigma, form, basis.rotate, dtype)
