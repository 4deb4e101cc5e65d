"""The pack kernel: 16-bit keys and values -> page bytes in one launch, on a GPU.

The host side of ``csrc/pack/pack.cu`` and ``csrc/pack/norms.cu``.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import partial

import torch

from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.launch import (
    ELEMENTS,
    OUT_OF_ORDER,
    Kernel,
    aligned_rows,
    current_stream,
    load_kernel,
    multiprocessors,
    page_macros,
)
from oscar_mm.kernels.self_check import CheckedKernels
from oscar_mm.ops.pack_torch import pack_by_torch
from oscar_mm.ops.samples import CHECKED_HEADS, JOB_SLOTS, random_basis, random_jobs
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.quant.fit import LSQ_ROUNDS, first_range
from oscar_mm.quant.quantize import Recipe

_PER_PROCESSOR = 2
"""Thread blocks that a multiprocessor runs at a time."""
FITS = {"minmax": 0, "lsq": 1}
"""Fits as the kernels' macro FIT."""
_NORMS = {"plain": 0, "refit": 1, "unbiased": 2}
_VALUE_SCALES = {"plain": 0, "unbiased": 1}
_WORST_SHARE = 0.01
"""Bytes in which a kernel that is right may differ from PyTorch operations."""
Specialization = tuple[Recipe, torch.dtype]
_POINTERS = (
    *("keys", "values", "recent", "source", "rows", "slots", "pages", "sigma", "norms", "bad"),
)
_NORMS_POINTERS = ("keys", "recent", "source", "rows", "slots", "sigma", "norms")
_NORMS_THREADS = 256


class PackParams(ctypes.Structure):
    """``Params`` of csrc/pack/pack.cu, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("key_stride", ctypes.c_int64 * 3),
        ("value_stride", ctypes.c_int64 * 3),
        ("jobs", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("sigma_rows", ctypes.c_int),
    )


class NormsParams(ctypes.Structure):
    """``Params`` of csrc/pack/norms.cu, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _NORMS_POINTERS),
        ("key_stride", ctypes.c_int64 * 3),
        ("kv_heads", ctypes.c_int),
        ("sigma_rows", ctypes.c_int),
    )


@dataclass(frozen=True)
class PackKernel:
    """The kernels that pack together: ``norms`` goes first, where norms are over all heads."""

    pack: Kernel
    norms: Kernel | None

    @property
    def key(self) -> str:
        """Of the code of both."""
        return self.pack.key if self.norms is None else f"{self.norms.key} {self.pack.key}"


def shared_bytes(head_dim: int) -> int:
    """``sizeof(Shared)`` of csrc/pack/pack.cu."""
    rows, sources, sizes = 3 * PAGE_TOKENS * head_dim * 2, 2 * PAGE_TOKENS * 4, head_dim * 2
    return rows + sources + sizes + 2 * PAGE_TOKENS * 4


def macros(recipe: Recipe, dtype: torch.dtype) -> dict[str, str | int]:
    """Macros that csrc/pack/pack.cu is compiled with."""
    page_format = recipe.page_format
    return norms_macros(page_format, dtype) | {
        "CODE_BITS": page_format.bits.keys,
        "ROTATE": int(recipe.rotate),
        "FIT": FITS[recipe.fit],
        "KEY_START": f"{first_range(page_format.bits.keys, page_format.key_group)}f",
        "VALUE_START": f"{first_range(page_format.bits.values, page_format.value_group)}f",
        "LSQ_ROUNDS": LSQ_ROUNDS,
        "NORM_FIT": _NORMS[recipe.norm],
        "VALUE_SCALE": _VALUE_SCALES[recipe.value_scale],
    }


def norms_macros(page_format: PageFormat, dtype: torch.dtype) -> dict[str, str | int]:
    """Macros that csrc/pack/norms.cu is compiled with."""
    return page_macros(page_format) | {"ELEMENT": ELEMENTS[dtype]}


def kernel_for(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> PackKernel | None:
    """The kernels to use; None for PyTorch operations."""
    return None if device.type != "cuda" else TRUSTED.kernel((recipe, dtype), device)


def launch(
    kernel: PackKernel,
    keys: torch.Tensor,
    values: torch.Tensor,
    recent: torch.Tensor,
    source: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    bad: torch.Tensor,
    sigma: torch.Tensor | None,
    recipe: Recipe,
) -> None:
    """As the operation ``pack`` (``oscar_mm.ops.pack``), with at least one job."""
    keys, values = aligned_rows(keys), aligned_rows(values)
    stream = current_stream(keys.device)
    named = {
        "keys": keys,
        "values": values,
        "recent": recent,
        "source": source,
        "rows": rows,
        "slots": slots,
        "pages": pages,
        "sigma": sigma,
        "norms": None,
        "bad": bad,
    }
    numbers = {
        "key_stride": (ctypes.c_int64 * 3)(*keys.stride()[:3]),
        "kv_heads": recipe.page_format.kv_heads,
        "sigma_rows": 0 if sigma is None else len(sigma),
    }

    def pointers(names: tuple[str, ...]) -> dict[str, int | None]:
        return {name: None if named[name] is None else named[name].data_ptr() for name in names}

    if kernel.norms is not None:
        named["norms"] = torch.empty(source.shape, dtype=torch.float32, device=keys.device)
        params = NormsParams(**pointers(_NORMS_POINTERS), **numbers)
        kernel.norms.launch((len(source), 1, 1), (_NORMS_THREADS, 1, 1), 0, params, stream)
    params = PackParams(
        **pointers(_POINTERS),
        **numbers,
        value_stride=(ctypes.c_int64 * 3)(*values.stride()[:3]),
        jobs=len(source),
    )
    head_dim, items = recipe.page_format.head_dim, len(source) * recipe.page_format.kv_heads
    kernel.pack.launch(
        (min(items, _PER_PROCESSOR * multiprocessors(keys.device)), 1, 1),
        (2 * head_dim, 1, 1),
        shared_bytes(head_dim),
        params,
        stream,
    )


def _make(specialization: Specialization, device: torch.device) -> PackKernel:
    recipe, dtype = specialization
    page_format = recipe.page_format
    if not page_format.in_fragments or page_format.by_token:
        raise KernelError(OUT_OF_ORDER)
    if dtype not in ELEMENTS:
        raise KernelError(f"the kernel takes bfloat16 and float16, not {dtype}")
    if page_format.token_scaling == "shared" and recipe.norm != "plain":
        # A norm over all heads that is fitted to the codes needs all heads at once, which a thread
        # block does not see.
        raise KernelError("the kernel fits norms per head, not one that all heads share")
    given = macros(recipe, dtype)
    norms = None
    if page_format.token_scaling == "shared":
        norms = load_kernel("pack/norms.cu", norms_macros(page_format, dtype), device)
    return PackKernel(load_kernel("pack/pack.cu", given, device), norms)


def _disagreement(
    specialization: Specialization, kernel: PackKernel, device: torch.device
) -> float:
    """Share of bytes that differ: single ones may, where a value lies between two codes."""
    recipe, dtype = specialization
    recipe = replace(recipe, page_format=replace(recipe.page_format, kv_heads=CHECKED_HEADS))
    jobs = random_jobs(recipe.page_format, dtype, device)
    sigma = random_basis(recipe.page_format, recipe.rotate, device).sigma
    made = []
    for make in (partial(launch, kernel), pack_by_torch):
        pages = torch.zeros(
            JOB_SLOTS, recipe.page_format.page_bytes, dtype=torch.uint8, device=device
        )
        bad = torch.zeros(1, dtype=torch.int32, device=device)
        make(*jobs, pages, bad, sigma, recipe)
        made.append(pages)
        if bool(bad):
            return float("nan")
    return float((made[0] != made[1]).float().mean())


TRUSTED: CheckedKernels[Specialization, PackKernel] = CheckedKernels(
    "pack", _make, _disagreement, _WORST_SHARE
)
