"""Store and store_layers: quantize 16-bit keys and values of tokens into stream pages."""

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
    cpu_kernels_available,
    current_stream,
    ints,
    pointers,
    recipe_macros,
    sigma_strides,
    strides,
)
from oscar_mm.kernels.self_check import OperationKernel
from oscar_mm.ops.library import STATES, ArgumentChecker, define, recipe_numbers
from oscar_mm.ops.samples import (
    CHECKED_HEADS,
    random_basis,
    random_layer_stores,
    random_pages,
    random_stores,
)
from oscar_mm.ops.store_torch import (
    CENTER_TOKENS,
    HEAD,
    TILE,
    StoreArguments,
    StoreLayersArguments,
    store_by_torch,
    store_layers_one_by_one,
)
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.pages.quantize import Recipe
from oscar_mm.quant.fit import CHANGES, FLOOR

_WARPS = 4
"""Warps per thread block; each processes the keys or the values of one head of a job."""
_CHECKED_SLOTS = 5
_MAX_LAYERS = 96
"""Maximum number of layers per launch, limited by the size of a kernel's parameters."""
_NORMS = ("plain", "unbiased")
_checker, _layers_checker = ArgumentChecker("store"), ArgumentChecker("store_layers")


class Work(ctypes.Structure):
    """Mirror of ``Work`` in csrc/store/store.cu, field for field."""

    _fields_ = (
        *pointers("keys", "values", "jobs", "begins"),
        *(("key_stride", Strides), ("value_stride", Strides)),
        *ints("count", "begin_count", "kv_heads"),
    )


class Layer(ctypes.Structure):
    """Mirror of ``Layer`` in csrc/store/store.cu, field for field."""

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
        """Return the parameters for a layer's tensors, which must outlive the launch."""
        return cls(*addresses(recent, pages, sigma, not_finite), *sigma_strides(sigma))


class StoreParams(ctypes.Structure):
    """Mirror of ``Params`` in csrc/store/store.cu, field for field."""

    _fields_ = (("work", Work), ("layer", Layer))


class LayersParams(ctypes.Structure):
    """Mirror of ``LayersParams`` in csrc/store/store.cu, field for field."""

    _fields_ = (("work", Work), ("layers", Layer * _MAX_LAYERS))


class Specialization(NamedTuple):
    """Compile-time parameters of the kernels."""

    recipe: Recipe
    dtype: torch.dtype

    @property
    def macros(self) -> dict[str, str | int]:
        """Preprocessor macros for compiling csrc/store/store.cu."""
        recipe, bits = self.recipe, self.recipe.page_format.bits
        return recipe_macros(*self) | {
            "KEY_BITS": bits.keys,
            "VALUE_BITS": bits.values,
            "UNBIASED_KEYS": int(recipe.unbiased_keys),
            "UNBIASED_VALUES": int(recipe.value_scale == "unbiased"),
            "SCORE_CHANGES": CHANGES if recipe.lowers_score_error else 0,
            "SCORE_FLOOR": f"{FLOOR}f",
        }


class StoreKernel(OperationKernel[Specialization], operation="store", bound=0.01):
    """CUDA kernels of ``store``; ``centers`` runs first if pages have a center."""

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        page_format = specialization.recipe.page_format
        check_pages(page_format, specialization.dtype)
        load = partial(self._load, "store/store.cu", specialization.macros)
        self._store, self._layers = load("store"), load("store_layers")
        self._centers = load("centers") if page_format.center else None

    def __call__(self, arguments: StoreArguments) -> None:
        """Launch ``store``; requires at least one job."""
        keys, values, _, jobs, begins, pages, not_finite, sigma, *_ = arguments
        keys, values = aligned_rows(keys), aligned_rows(values)
        stream, heads = current_stream(keys.device), keys.shape[1]
        work = Work(
            *addresses(keys, values, jobs, begins),
            *(strides(keys), strides(values), len(jobs), len(begins), heads),
        )
        params = StoreParams(work, Layer.of(arguments.recent, pages, not_finite, sigma))
        # If there is one begin per job, this is a decode step, whose jobs compute their pages'
        # centers themselves.
        if self._centers is not None and 0 < len(begins) != len(jobs):
            _run(self._centers, len(begins) * heads, 1, params, stream)
            params.work.begin_count = 0
        _run(self._store, 2 * len(jobs) * heads, 1, params, stream)

    def of_layers(self, arguments: StoreLayersArguments) -> None:
        """Launch ``store_layers``; requires at least one layer and one job."""
        jobs, begins, heads = arguments.jobs, arguments.begins, arguments.recent[0].shape[2]
        stream = current_stream(jobs.device)
        tables = (*addresses(None, None, jobs, begins), Strides(), Strides())
        work = Work(*tables, len(jobs), len(begins), heads)
        layers = [Layer.of(*layer) for layer in arguments.layers]
        for start in range(0, len(layers), _MAX_LAYERS):
            part = layers[start : start + _MAX_LAYERS]
            params = LayersParams(work, (Layer * _MAX_LAYERS)(*part))
            _run(self._layers, 2 * len(jobs) * heads, len(part), params, stream)

    @staticmethod
    def disagreement(
        specialization: Specialization, kernel: StoreKernel, device: torch.device
    ) -> float:
        """Return the fraction of written bytes that differ; a few may, where a value lies between
        two codes."""
        recipe, dtype = specialization
        page_format = replace(recipe.page_format, kv_heads=CHECKED_HEADS)
        before = random_pages(_CHECKED_SLOTS, page_format, device)
        states = random_stores(page_format, dtype, device)
        shared, of_rows = (
            random_basis(page_format, recipe.rotate, device, rows).sigma
            for rows in ((), (len(states[0]),))
        )
        layers = random_layer_stores(page_format, dtype, device)
        numbers = recipe_numbers(replace(recipe, page_format=page_format))

        def results(
            store: Callable[[Any], None], store_layers: Callable[[Any], None]
        ) -> tuple[torch.Tensor, bool]:
            pages = [before.clone() for _ in range(4)]
            flags = [torch.zeros(1, dtype=torch.int32, device=device) for _ in pages]
            for index, sigma in enumerate((shared, of_rows)):
                store(StoreArguments(*states, pages[index], flags[index], sigma, numbers))
            sigmas = [of_rows, None]
            store_layers(StoreLayersArguments(*layers, pages[2:], flags[2:], sigmas, numbers))
            return torch.stack(pages), bool(torch.cat(flags).any())

        found, is_not_finite = results(kernel, kernel.of_layers)
        expected, _ = results(store_by_torch, store_layers_one_by_one)
        if is_not_finite:
            return float("nan")
        return float((found != expected).sum() / (expected != before).sum())


def _run(function: Kernel, warps: int, layers: int, params: ctypes.Structure, stream: int) -> None:
    grid, block = (-(-warps // _WARPS), layers, 1), (32 * _WARPS, 1, 1)
    function.launch(grid, block, 0, params, stream, dependent=True)


def _check(arguments: StoreArguments) -> None:
    keys, device, recipe = arguments.keys, arguments.keys.device, arguments.recipe
    page_format = recipe.page_format
    shape = ("batch", page_format.kv_heads, "tokens", page_format.head_dim)
    _checker.check("keys", keys, shape, STATES, device, rows=True)
    _checker.check("values", arguments.values, keys.shape, keys.dtype, device, rows=True)
    _check_tables(_checker, arguments, recipe, device)
    layer = (arguments.recent, arguments.pages, arguments.not_finite, arguments.sigma)
    _check_layer(_checker, *layer, page_format, keys.dtype, device, len(keys))


def _check_layers(arguments: StoreLayersArguments) -> None:
    recent, device, recipe = arguments.recent, arguments.jobs.device, arguments.recipe
    for name in ("pages", "not_finite", "sigma"):
        count = len(getattr(arguments, name))
        if count != len(recent):
            _layers_checker.refuse(name, f"of {count} layers", f"of {len(recent)}, as recent")
    _check_tables(_layers_checker, arguments, recipe, device)
    dtypes = STATES
    for layer in arguments.layers:
        _check_layer(_layers_checker, *layer, recipe.page_format, dtypes, device, "batch")
        dtypes = recent[0].dtype


def _check_tables(
    checker: ArgumentChecker,
    arguments: StoreArguments | StoreLayersArguments,
    recipe: Recipe,
    device: torch.device,
) -> None:
    jobs, begins = arguments.jobs, arguments.begins
    checker.check("jobs", jobs, ("jobs", HEAD + TILE), torch.int32, device)
    checker.check("begins", begins, ("pages", HEAD + CENTER_TOKENS), torch.int32, device)
    if not recipe.page_format.codec.appends_tokens:
        found = f"of key_axis {recipe.page_format.key_axis!r}"
        checker.refuse("format", found, "of key_axis 'token'")
    if len(begins) and not recipe.page_format.center:
        checker.refuse("begins", f"of {len(begins)} pages", "empty, as pages have no center")
    checker.check_norm(recipe, _NORMS)


def _check_layer(
    checker: ArgumentChecker,
    recent: torch.Tensor,
    pages: torch.Tensor,
    not_finite: torch.Tensor,
    sigma: torch.Tensor | None,
    page_format: PageFormat,
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
    batch: int | str,
) -> None:
    heads, head_dim = page_format.kv_heads, page_format.head_dim
    checker.check("recent", recent, ("slots", 2, heads, head_dim), dtypes, device)
    checker.check("pages", pages, ("slots", page_format.page_bytes), torch.uint8, device)
    checker.check("not_finite", not_finite, (1,), torch.int32, device)
    checker.check_sigma(sigma, heads, head_dim, device, batch)


def _store(arguments: StoreArguments) -> None:
    if len(arguments.jobs):
        recipe, device = arguments.recipe, arguments.keys.device
        kernel = StoreKernel.of(Specialization(recipe, arguments.keys.dtype), device)
        (kernel or _without_kernel(recipe, device))(arguments)


def _store_layers(arguments: StoreLayersArguments) -> None:
    if len(arguments.jobs) and arguments.recent:
        recipe, device = arguments.recipe, arguments.jobs.device
        kernel = StoreKernel.of(Specialization(recipe, arguments.recent[0].dtype), device)
        if kernel:
            kernel.of_layers(arguments)
        else:
            store_layers_one_by_one(arguments, _without_kernel(recipe, device))


def _without_kernel(recipe: Recipe, device: torch.device) -> Callable[[StoreArguments], None]:
    """Return the CPU kernel on a CPU, or PyTorch operations if there is no kernel."""
    if device.type == "cpu" and cpu_kernels_available("store"):
        # Imported on first use, since it loads a compiler.
        from oscar_mm.ops.store_numba import rotates, store_on_cpu

        if recipe.page_format.codec.has_kernels and rotates(recipe):
            return store_on_cpu
    return store_by_torch


store = define("store", StoreArguments, _check, _store)
store_layers = define("store_layers", StoreLayersArguments, _check_layers, _store_layers)


def whole_pages(
    keys: torch.Tensor, values: torch.Tensor, recipe: Recipe, sigma: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill stream pages with 128 tokens each, using the operation ``store``.

    Args:
        keys: (pages, KV heads, 128, head_dim), float32, bfloat16 or float16, after RoPE, with
            contiguous channels.
        values: same shape and dtype as keys.
        recipe: recipe of the pages.
        sigma: see ``store``.

    Returns:
        (pages, page_bytes) uint8, and ``not_finite``.
    """
    count, page_format, device = len(keys), recipe.page_format, keys.device
    jobs, begins = whole_page_tables(count, device)
    pages = torch.zeros(count, page_format.page_bytes, dtype=torch.uint8, device=device)
    not_finite = torch.zeros(1, dtype=torch.int32, device=device)
    store(
        *(keys, values, keys.new_empty(0, 2, page_format.kv_heads, page_format.head_dim)),
        *(jobs, begins[: count * page_format.center], pages, not_finite, sigma),
        recipe_numbers(recipe),
    )
    return pages, not_finite


def whole_page_tables(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return jobs and begins for ``count`` full pages: page i gets the tokens of row i."""
    order = torch.arange(count, dtype=torch.int32, device=device)
    places = torch.arange(PAGE_TOKENS, dtype=torch.int32, device=device)
    tiles = PAGE_TOKENS // TILE
    jobs = torch.zeros(count, tiles, HEAD + TILE, dtype=torch.int32, device=device)
    jobs[..., 0] = jobs[..., 2] = order[:, None]
    jobs[..., 1] = places[:tiles]
    jobs[..., HEAD:] = places.view(tiles, TILE)
    begins = torch.zeros(count, HEAD + CENTER_TOKENS, dtype=torch.int32, device=device)
    begins[:, 0] = begins[:, 1] = order
    begins[:, 2] = CENTER_TOKENS
    begins[:, HEAD:] = places[:CENTER_TOKENS]
    return jobs.flatten(0, 1), begins
