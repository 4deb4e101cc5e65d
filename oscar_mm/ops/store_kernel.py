"""The store kernel: 16-bit keys and values of tokens -> slots of stream pages, on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from oscar_mm.kernels.launch import (
    Kernel,
    Strides,
    addresses,
    aligned_rows,
    check_pages,
    current_stream,
    ints,
    pointers,
    recipe_macros,
    sigma_strides,
    strides,
)
from oscar_mm.kernels.self_check import OperationKernel
from oscar_mm.ops.library import recipe_arguments
from oscar_mm.ops.samples import (
    CHECKED_HEADS,
    random_basis,
    random_layer_stores,
    random_pages,
    random_stores,
)
from oscar_mm.ops.store_torch import (
    StoreArguments,
    StoreLayersArguments,
    store_by_torch,
    store_layers_one_by_one,
)
from oscar_mm.quant.quantize import Recipe

_WARPS = 4
"""Of a thread block: each has the keys, or the values, of one head of a job."""
_CHECKED_SLOTS = 5
_MOST_LAYERS = 96
"""Of a launch: what its parameters have room for."""


class Work(ctypes.Structure):
    """``Work`` of csrc/store/store.cu, field for field."""

    _fields_ = (
        *pointers("keys", "values", "jobs", "begins"),
        *(("key_stride", Strides), ("value_stride", Strides)),
        *ints("count", "begin_count", "kv_heads"),
    )


class Layer(ctypes.Structure):
    """``Layer`` of csrc/store/store.cu, field for field."""

    _fields_ = (
        *pointers("recent", "pages", "sigma", "not_finite"),
        *ints("sigma_row_stride", "sigma_head_stride"),
    )

    @classmethod
    def of(
        cls,
        recent: torch.Tensor,
        pages: torch.Tensor,
        not_finite: torch.Tensor,
        sigma: torch.Tensor | None,
    ) -> Layer:
        """The tensors of a layer, which must outlive the launch."""
        return cls(*addresses(recent, pages, sigma, not_finite), *sigma_strides(sigma))


class StoreParams(ctypes.Structure):
    """``Params`` of csrc/store/store.cu, field for field."""

    _fields_ = (("work", Work), ("layer", Layer))


class LayersParams(ctypes.Structure):
    """``LayersParams`` of csrc/store/store.cu, field for field."""

    _fields_ = (("work", Work), ("layers", Layer * _MOST_LAYERS))


class Specialization(NamedTuple):
    """What the kernels are compiled for."""

    recipe: Recipe
    dtype: torch.dtype

    @property
    def macros(self) -> dict[str, str | int]:
        """Macros that csrc/store/store.cu is compiled with."""
        recipe, bits = self.recipe, self.recipe.page_format.bits
        return recipe_macros(*self) | {
            "KEY_BITS": bits.keys,
            "VALUE_BITS": bits.values,
            "UNBIASED_KEYS": int(recipe.fit == "lsq" and recipe.norm == "unbiased"),
            "UNBIASED_VALUES": int(recipe.value_scale == "unbiased"),
        }


class StoreKernel(OperationKernel[Specialization], operation="store", bound=0.01):
    """The kernels that store together: ``centers`` goes first, where pages have a center."""

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        page_format = specialization.recipe.page_format
        check_pages(page_format, specialization.dtype)
        load = partial(self._load, "store/store.cu", specialization.macros)
        self._store, self._layers = load("store"), load("store_layers")
        self._centers = load("centers") if page_format.center else None

    def __call__(self, arguments: StoreArguments) -> None:
        """Launch ``store``; there is at least one job."""
        keys, values, _, jobs, begins, pages, not_finite, sigma, *_ = arguments
        keys, values = aligned_rows(keys), aligned_rows(values)
        stream, heads = current_stream(keys.device), keys.shape[1]
        work = Work(
            *addresses(keys, values, jobs, begins),
            *(strides(keys), strides(values), len(jobs), len(begins), heads),
        )
        params = StoreParams(work, Layer.of(arguments.recent, pages, not_finite, sigma))
        # With a line for each job they are those of a decode step: jobs see to their pages
        # themselves.
        if self._centers is not None and 0 < len(begins) != len(jobs):
            _run(self._centers, len(begins) * heads, 1, params, stream)
            params.work.begin_count = 0
        _run(self._store, 2 * len(jobs) * heads, 1, params, stream)

    def of_layers(self, arguments: StoreLayersArguments) -> None:
        """Launch ``store_layers``; there is at least one layer and one job."""
        jobs, begins, heads = arguments.jobs, arguments.begins, arguments.recent[0].shape[2]
        stream = current_stream(jobs.device)
        tables = (*addresses(None, None, jobs, begins), Strides(), Strides())
        work = Work(*tables, len(jobs), len(begins), heads)
        layers = [Layer.of(*layer) for layer in arguments.layers]
        for start in range(0, len(layers), _MOST_LAYERS):
            part = layers[start : start + _MOST_LAYERS]
            params = LayersParams(work, (Layer * _MOST_LAYERS)(*part))
            _run(self._layers, 2 * len(jobs) * heads, len(part), params, stream)

    @staticmethod
    def disagreement(
        specialization: Specialization, kernel: StoreKernel, device: torch.device
    ) -> float:
        """Share of written bytes that differ, as some may where a value lies between two codes."""
        recipe, dtype = specialization
        page_format = replace(recipe.page_format, kv_heads=CHECKED_HEADS)
        before = random_pages(_CHECKED_SLOTS, page_format, device)
        states = random_stores(page_format, dtype, device)
        shared, of_rows = (
            random_basis(page_format, recipe.rotate, device, rows).sigma
            for rows in ((), (len(states[0]),))
        )
        layers = random_layer_stores(page_format, dtype, device)
        how = recipe_arguments(replace(recipe, page_format=page_format))

        def results(
            store: Callable[[Any], None], store_layers: Callable[[Any], None]
        ) -> tuple[torch.Tensor, bool]:
            pages = [before.clone() for _ in range(4)]
            flags = [torch.zeros(1, dtype=torch.int32, device=device) for _ in pages]
            for index, sigma in enumerate((shared, of_rows)):
                store(StoreArguments(*states, pages[index], flags[index], sigma, *how))
            store_layers(StoreLayersArguments(*layers, pages[2:], flags[2:], [of_rows, None], *how))
            return torch.stack(pages), bool(torch.cat(flags).any())

        found, is_not_finite = results(kernel, kernel.of_layers)
        expected, _ = results(store_by_torch, store_layers_one_by_one)
        if is_not_finite:
            return float("nan")
        return float((found != expected).sum() / (expected != before).sum())


def _run(function: Kernel, warps: int, layers: int, params: ctypes.Structure, stream: int) -> None:
    grid, block = (-(-warps // _WARPS), layers, 1), (32 * _WARPS, 1, 1)
    function.launch(grid, block, 0, params, stream, dependent=True)
