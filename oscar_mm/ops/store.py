"""store, store_layers: 16-bit keys and values of tokens -> slots of stream pages.

    store(Tensor keys, Tensor values, Tensor recent, Tensor jobs, Tensor begins, Tensor(a!) pages,
          Tensor(b!) bad, Tensor? sigma, str format, bool rotate, str fit, str norm,
          str value_scale) -> ()

    keys, values  (batch, KV heads, tokens, head_dim) of new tokens after RoPE, bfloat16, float16
                  or float32; any strides with contiguous channels
    recent        (slots, 2, KV heads, head_dim) in the same dtype: tokens from before
    jobs          (n, 20) int32: page (below 0 nothing is done, so that a captured graph can have a
                  fixed n), tile (0 to 7), row of the batch, 0, and for each of the tile's 16 places
                  the token that it gets: the index of a new one, ~slot of ``recent``, or
                  ``NOTHING`` for a place that is left alone. No two jobs have a place in common.
    begins        (m, 36) int32, of formats with a center: page (below 0: nothing), row, count, 0,
                  and the sources of ``count`` (1 to 32) tokens, the mean of whose keys becomes the
                  page's center, before any job needs it; of as many beginnings as jobs each
                  page must have a job
    pages         (pool slots, page_bytes) uint8; written
    bad           (1,) int32; set to 1 where a center, scale or zero is NaN, infinite or beyond
                  float16 (65504), else left alone
    sigma         (KV heads or 1, head_dim) float32: balancing; None for none
    format        of the pages (``oscar_mm.ops.library``)
    rotate, fit, norm, value_scale   as in ``KVPolicy``

    store_layers(Tensor[] recent, Tensor jobs, Tensor begins, Tensor(a!)[] pages, Tensor(b!)[] bad,
                 Tensor?[] sigma, str format, bool rotate, str fit, str norm, str value_scale) -> ()

The same jobs in each of several layers, which have ``recent``, ``pages``, ``bad`` and ``sigma`` of
their own. All sources are of ``recent``, and each page that begins has a job.

What ``recent`` holds may be given up as soon as this returns: later work of the same stream comes
after it.
"""

from __future__ import annotations

import torch

from oscar_mm.ops import store_kernel
from oscar_mm.ops.library import STATES, Arguments, define, format_of, text_of
from oscar_mm.ops.store_torch import (
    CENTER_TOKENS,
    HEAD,
    TILE,
    store_by_torch,
    store_layers_by_torch,
)
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.policy import KVPolicy
from oscar_mm.quant.basis import Basis
from oscar_mm.quant.quantize import Recipe

_NORMS = ("plain", "unbiased")
_arguments, _arguments_of_layers = Arguments("store"), Arguments("store_layers")


def whole_pages(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_format: PageFormat,
    policy: KVPolicy,
    basis: Basis,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill stream pages with 128 tokens each, by the operation.

    Args:
        keys: (pages, KV heads, 128, head_dim), float32, bfloat16 or float16, after RoPE, with
            contiguous channels; values likewise.
        page_format, policy, basis: as of ``oscar_mm.ops.pack.pack``.

    Returns:
        (pages, page_bytes) uint8, and ``bad``.
    """
    count, device = len(keys), keys.device
    jobs, begins = whole_page_tables(count, device)
    pages = torch.zeros(count, page_format.page_bytes, dtype=torch.uint8, device=device)
    bad = torch.zeros(1, dtype=torch.int32, device=device)
    store(
        *(keys, values, keys.new_empty(0, 2, page_format.kv_heads, page_format.head_dim)),
        *(jobs, begins[: count * page_format.center], pages, bad, basis.sigma),
        *(text_of(page_format), basis.rotate, policy.fit, policy.norm, policy.value_scale),
    )
    return pages, bad


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


def _check(
    keys: torch.Tensor,
    values: torch.Tensor,
    recent: torch.Tensor,
    jobs: torch.Tensor,
    begins: torch.Tensor,
    pages: torch.Tensor,
    bad: torch.Tensor,
    sigma: torch.Tensor | None,
    format: str,
    rotate: bool,
    fit: str,
    norm: str,
    value_scale: str,
) -> None:
    page_format, device = format_of(format), keys.device
    check = _arguments.check
    shape = ("batch", page_format.kv_heads, "tokens", page_format.head_dim)
    check("keys", keys, shape, STATES, device, rows=True)
    check("values", values, keys.shape, keys.dtype, device, rows=True)
    _check_tables(_arguments, jobs, begins, device)
    _check_layer(_arguments, recent, pages, bad, sigma, page_format, keys.dtype, device)
    _check_recipe(_arguments, page_format, len(begins), fit, norm, value_scale)


def _check_layers(
    recent: list[torch.Tensor],
    jobs: torch.Tensor,
    begins: torch.Tensor,
    pages: list[torch.Tensor],
    bad: list[torch.Tensor],
    sigma: list[torch.Tensor | None],
    format: str,
    rotate: bool,
    fit: str,
    norm: str,
    value_scale: str,
) -> None:
    page_format, device, of_layers = format_of(format), jobs.device, _arguments_of_layers
    for name, tensors in (("pages", pages), ("bad", bad), ("sigma", sigma)):
        if len(tensors) != len(recent):
            of_layers.refuse(name, f"of {len(tensors)} layers", f"of {len(recent)}, as recent")
    _check_tables(of_layers, jobs, begins, device)
    for one in zip(recent, pages, bad, sigma, strict=True):
        dtypes = STATES if one[0] is recent[0] else recent[0].dtype
        _check_layer(of_layers, *one, page_format, dtypes, device)
    _check_recipe(of_layers, page_format, len(begins), fit, norm, value_scale)


def _check_tables(
    arguments: Arguments, jobs: torch.Tensor, begins: torch.Tensor, device: torch.device
) -> None:
    arguments.check("jobs", jobs, ("jobs", HEAD + TILE), torch.int32, device)
    arguments.check("begins", begins, ("pages", HEAD + CENTER_TOKENS), torch.int32, device)


def _check_layer(
    arguments: Arguments,
    recent: torch.Tensor,
    pages: torch.Tensor,
    bad: torch.Tensor,
    sigma: torch.Tensor | None,
    page_format: PageFormat,
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    heads, head_dim = page_format.kv_heads, page_format.head_dim
    arguments.check("recent", recent, ("slots", 2, heads, head_dim), dtypes, device)
    arguments.check("pages", pages, ("slots", page_format.page_bytes), torch.uint8, device)
    arguments.check("bad", bad, (1,), torch.int32, device)
    arguments.check_sigma(sigma, heads, head_dim, device)


def _check_recipe(
    arguments: Arguments,
    page_format: PageFormat,
    begins: int,
    fit: str,
    norm: str,
    value_scale: str,
) -> None:
    if not page_format.by_token:
        arguments.refuse("format", "of key_axis 'channel'", "of key_axis 'token'")
    if begins and not page_format.center:
        arguments.refuse("begins", f"of {begins} pages", "empty, as pages have no center")
    arguments.check_recipe(fit, norm, _NORMS, value_scale)


def _store(
    keys: torch.Tensor,
    values: torch.Tensor,
    recent: torch.Tensor,
    jobs: torch.Tensor,
    begins: torch.Tensor,
    pages: torch.Tensor,
    bad: torch.Tensor,
    sigma: torch.Tensor | None,
    format: str,
    rotate: bool,
    fit: str,
    norm: str,
    value_scale: str,
) -> None:
    tensors = (keys, values, recent, jobs, begins, pages, bad, sigma)
    _check(*tensors, format, rotate, fit, norm, value_scale)
    if not len(jobs):
        return
    recipe = Recipe(format_of(format), rotate, fit, norm, value_scale)
    kernel = store_kernel.kernel_for(recipe, keys.dtype, keys.device)
    if kernel is None:
        store_by_torch(*tensors, recipe)
    else:
        store_kernel.launch(kernel, *tensors, recipe)


def _store_layers(
    recent: list[torch.Tensor],
    jobs: torch.Tensor,
    begins: torch.Tensor,
    pages: list[torch.Tensor],
    bad: list[torch.Tensor],
    sigma: list[torch.Tensor | None],
    format: str,
    rotate: bool,
    fit: str,
    norm: str,
    value_scale: str,
) -> None:
    tensors = (recent, jobs, begins, pages, bad, sigma)
    _check_layers(*tensors, format, rotate, fit, norm, value_scale)
    if not len(jobs) or not recent:
        return
    recipe = Recipe(format_of(format), rotate, fit, norm, value_scale)
    kernel = store_kernel.kernel_for(recipe, recent[0].dtype, jobs.device)
    if kernel is None:
        store_layers_by_torch(*tensors, recipe)
    else:
        store_kernel.launch_layers(kernel, *tensors, recipe)


store = define(
    "store(Tensor keys, Tensor values, Tensor recent, Tensor jobs, Tensor begins, Tensor(a!) pages,"
    " Tensor(b!) bad, Tensor? sigma, str format, bool rotate, str fit, str norm, str value_scale)"
    " -> ()",
    _store,
    _check,
)
store_layers = define(
    "store_layers(Tensor[] recent, Tensor jobs, Tensor begins, Tensor(a!)[] pages,"
    " Tensor(b!)[] bad, Tensor?[] sigma, str format, bool rotate, str fit, str norm,"
    " str value_scale) -> ()",
    _store_layers,
    _check_layers,
)
