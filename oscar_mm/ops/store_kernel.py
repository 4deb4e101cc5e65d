"""The store kernel: 16-bit keys and values of tokens -> slots of stream pages, on a GPU.

The host side of ``csrc/store/store.cu``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
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
    page_macros,
)
from oscar_mm.kernels.self_check import CheckedKernels
from oscar_mm.ops.pack_kernel import FITS
from oscar_mm.ops.samples import (
    CHECKED_HEADS,
    random_basis,
    random_layer_stores,
    random_pages,
    random_stores,
)
from oscar_mm.ops.store_torch import store_by_torch, store_layers_by_torch
from oscar_mm.quant.fit import LSQ_ROUNDS, first_range
from oscar_mm.quant.quantize import Recipe

_WARPS = 4
"""Of a thread block: each has the keys, or the values, of one head of a job."""
_WORST_SHARE = 0.01
"""Written bytes in which a kernel that is right may differ from PyTorch operations."""
_CHECKED_SLOTS = 5
Specialization = tuple[Recipe, torch.dtype]
_MOST_LAYERS = 96
"""Of a launch: what its parameters have room for."""
_Strides = ctypes.c_int64 * 3


class Work(ctypes.Structure):
    """``Work`` of csrc/store/store.cu, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "jobs", "begins")),
        ("key_stride", _Strides),
        ("value_stride", _Strides),
        *((name, ctypes.c_int) for name in ("count", "begin_count", "kv_heads")),
    )


class Layer(ctypes.Structure):
    """``Layer``, likewise."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("recent", "pages", "sigma", "bad")),
        ("sigma_rows", ctypes.c_int),
    )

    @classmethod
    def of(
        cls,
        recent: torch.Tensor,
        pages: torch.Tensor,
        bad: torch.Tensor,
        sigma: torch.Tensor | None,
    ) -> Layer:
        """Of what a layer has."""
        balancing = (None, bad.data_ptr(), 0)
        if sigma is not None:
            balancing = (sigma.data_ptr(), bad.data_ptr(), len(sigma))
        return cls(recent.data_ptr(), pages.data_ptr(), *balancing)


class StoreParams(ctypes.Structure):
    """``Params``, likewise."""

    _fields_ = (("work", Work), ("layer", Layer))


class LayersParams(ctypes.Structure):
    """``LayersParams``, likewise."""

    _fields_ = (("work", Work), ("layers", Layer * _MOST_LAYERS))


@dataclass(frozen=True)
class StoreKernel:
    """The kernels that store together: ``centers`` goes first, where pages have a center."""

    store: Kernel
    layers: Kernel
    centers: Kernel | None

    @property
    def key(self) -> str:
        """Of the code of all, which is one."""
        return self.store.key


def macros(recipe: Recipe, dtype: torch.dtype) -> dict[str, str | int]:
    """Macros that csrc/store/store.cu is compiled with."""
    page_format = recipe.page_format
    bits = page_format.bits
    return page_macros(page_format) | {
        "KEY_BITS": bits.keys,
        "VALUE_BITS": bits.values,
        "ELEMENT": ELEMENTS[dtype],
        "ROTATE": int(recipe.rotate),
        "FIT": FITS[recipe.fit],
        "KEY_START": f"{first_range(bits.keys, page_format.key_group)}f",
        "VALUE_START": f"{first_range(bits.values, page_format.value_group)}f",
        "LSQ_ROUNDS": LSQ_ROUNDS,
        "UNBIASED_KEYS": int(recipe.fit == "lsq" and recipe.norm == "unbiased"),
        "UNBIASED_VALUES": int(recipe.value_scale == "unbiased"),
    }


def kernel_for(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> StoreKernel | None:
    """The kernels to use; None for PyTorch operations."""
    return None if device.type != "cuda" else TRUSTED.kernel((recipe, dtype), device)


def launch(
    kernel: StoreKernel,
    keys: torch.Tensor,
    values: torch.Tensor,
    recent: torch.Tensor,
    jobs: torch.Tensor,
    begins: torch.Tensor,
    pages: torch.Tensor,
    bad: torch.Tensor,
    sigma: torch.Tensor | None,
    recipe: Recipe,
) -> None:
    """As the operation ``store`` (``oscar_mm.ops.store``), with at least one job."""
    keys, values = aligned_rows(keys), aligned_rows(values)
    stream, heads = current_stream(keys.device), recipe.page_format.kv_heads
    # With a line for each job they are those of a decode step: jobs see to their pages themselves.
    begun_first = kernel.centers is not None and 0 < len(begins) != len(jobs)
    work = Work(
        *(x.data_ptr() for x in (keys, values, jobs, begins)),
        *(_Strides(*x.stride()[:3]) for x in (keys, values)),
        *(len(jobs), len(begins), heads),
    )
    params = StoreParams(work, Layer.of(recent, pages, bad, sigma))
    if begun_first and kernel.centers is not None:
        _run(kernel.centers, len(begins) * heads, 1, params, stream)
        params.work.begin_count = 0
    _run(kernel.store, 2 * len(jobs) * heads, 1, params, stream)


def launch_layers(
    kernel: StoreKernel,
    recent: Sequence[torch.Tensor],
    jobs: torch.Tensor,
    begins: torch.Tensor,
    pages: Sequence[torch.Tensor],
    bad: Sequence[torch.Tensor],
    sigma: Sequence[torch.Tensor | None],
    recipe: Recipe,
) -> None:
    """As the operation ``store_layers``, with at least one layer and one job."""
    stream, heads = current_stream(jobs.device), recipe.page_format.kv_heads
    tables = (None, None, jobs.data_ptr(), begins.data_ptr(), _Strides(), _Strides())
    work = Work(*tables, len(jobs), len(begins), heads)
    layers = list(map(Layer.of, recent, pages, bad, sigma))
    for start in range(0, len(layers), _MOST_LAYERS):
        some = layers[start : start + _MOST_LAYERS]
        params = LayersParams(work, (Layer * _MOST_LAYERS)(*some))
        _run(kernel.layers, 2 * len(jobs) * heads, len(some), params, stream)


def _run(function: Kernel, warps: int, layers: int, params: ctypes.Structure, stream: int) -> None:
    grid, block = (-(-warps // _WARPS), layers, 1), (32 * _WARPS, 1, 1)
    function.launch(grid, block, 0, params, stream, dependent=True)


def _make(specialization: Specialization, device: torch.device) -> StoreKernel:
    recipe, dtype = specialization
    page_format = recipe.page_format
    if not page_format.in_fragments:
        raise KernelError(OUT_OF_ORDER)
    if dtype not in ELEMENTS:
        raise KernelError(f"the kernel takes bfloat16 and float16, not {dtype}")
    load = partial(load_kernel, "store/store.cu", macros(recipe, dtype), device)
    centers = load("centers") if page_format.center else None
    return StoreKernel(load("store"), load("store_layers"), centers)


def _disagreement(
    specialization: Specialization, kernel: StoreKernel, device: torch.device
) -> float:
    """Share of written bytes that differ: single ones may, where a value lies between two codes."""
    recipe, dtype = specialization
    recipe = replace(recipe, page_format=replace(recipe.page_format, kv_heads=CHECKED_HEADS))
    before = random_pages(_CHECKED_SLOTS, recipe.page_format, device)
    sigma = random_basis(recipe.page_format, recipe.rotate, device).sigma
    states = random_stores(recipe.page_format, dtype, device)
    layers = random_layer_stores(recipe.page_format, dtype, device)

    def made(one: Callable[..., None], several: Callable[..., None]) -> tuple[torch.Tensor, bool]:
        pages = [before.clone() for _ in range(3)]
        bad = [torch.zeros(1, dtype=torch.int32, device=device) for _ in pages]
        one(*states, pages[0], bad[0], sigma, recipe)
        several(*layers, pages[1:], bad[1:], [sigma, None], recipe)
        return torch.stack(pages), bool(torch.cat(bad).any())

    found, is_bad = made(partial(launch, kernel), partial(launch_layers, kernel))
    expected, _ = made(store_by_torch, store_layers_by_torch)
    if is_bad:
        return float("nan")
    return float((found != expected).sum() / (expected != before).sum())


TRUSTED: CheckedKernels[Specialization, StoreKernel] = CheckedKernels(
    "store", _make, _disagreement, _WORST_SHARE
)
