"""store, store_layers: 16-bit keys and values of tokens -> slots of stream pages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from oscar_mm.kernels.launch import has_loops
from oscar_mm.ops.library import STATES, ArgumentChecker, define, recipe_arguments
from oscar_mm.ops.store_kernel import Specialization, StoreKernel
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
from oscar_mm.quant.quantize import Recipe

_NORMS = ("plain", "unbiased")
_checker, _layers_checker = ArgumentChecker("store"), ArgumentChecker("store_layers")


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
    if not recipe.page_format.by_token:
        checker.refuse("format", "of key_axis 'channel'", "of key_axis 'token'")
    if len(begins) and not recipe.page_format.center:
        checker.refuse("begins", f"of {len(begins)} pages", "empty, as pages have no center")
    checker.check_recipe(recipe, _NORMS)


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
    """Loops on a CPU, PyTorch operations where there are none."""
    if device.type == "cpu" and has_loops("store"):
        # Not before it is used: it brings a compiler.
        from oscar_mm.ops.store_cpu import rotates, store_on_cpu

        if rotates(recipe):
            return store_on_cpu
    return store_by_torch


store = define("store", StoreArguments, _check, _store)
store_layers = define("store_layers", StoreLayersArguments, _check_layers, _store_layers)


def whole_pages(
    keys: torch.Tensor, values: torch.Tensor, recipe: Recipe, sigma: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill stream pages with 128 tokens each, by the operation.

    Args:
        keys: (pages, KV heads, 128, head_dim), float32, bfloat16 or float16, after RoPE, with
            contiguous channels.
        values: the same shape and dtype.
        recipe: how pages are made.
        sigma: as of ``store``.

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
        *recipe_arguments(recipe),
    )
    return pages, not_finite


def whole_page_tables(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Jobs and begins of so many whole pages: page i gets the tokens of row i."""
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
