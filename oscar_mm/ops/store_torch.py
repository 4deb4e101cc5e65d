"""Arguments of store and store_layers, and their reference implementations in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from oscar_mm.kernels.launch import refuse_capture
from oscar_mm.ops.library import Written, WrittenList, recipe_of, sigma_of
from oscar_mm.pages.quantize import Recipe, quantize_tokens, unpack_stored
from oscar_mm.quant.basis import Basis

TILE = 16
"""Tokens per job."""
HEAD = 4
"""Numbers that precede the sources in a line of jobs or begins."""
NOTHING = torch.iinfo(torch.int32).min
"""Source value for a place that stays unchanged."""
CENTER_TOKENS = 32
"""Maximum number of tokens to average for a page's center."""
STORED_CENTER = slice(64, 64 + CENTER_TOKENS)
"""Tokens of another page to average for a page's center."""
_JOBS_AT_ONCE = 256
"""Number of jobs (4,096 tokens) to process at a time, which bounds the float32 temporaries of a
long prompt."""


class StoreArguments(NamedTuple):
    """Arguments of ``store``.

    Slots of ``recent`` may be reused as soon as the operation returns, since later work on the same
    stream runs after it.

    Attributes:
        keys: (batch, KV heads, tokens, head_dim): keys of new tokens after RoPE, in bfloat16,
            float16 or float32; any strides with contiguous channels.
        values: same shape and dtype as keys.
        recent: (slots, 2, KV heads, head_dim): earlier tokens, in the same dtype.
        jobs: (n, 20) int32: page (nothing is done if it is negative, so that a captured graph can
            have a fixed n), tile (0 to 7), row of the batch, 0, and the source of each of the
            tile's 16 tokens: the index of a new token, ~slot of ``recent``, or ``NOTHING`` for a
            token that stays unchanged. No two jobs write to the same token.
        begins: (m, 36) int32, for formats with a center: page (nothing is done if it is negative),
            row, count, another page, and the sources of ``count`` (0 to 32) tokens. The mean of
            their keys becomes the page's center, before any job needs it. If the count is 0, the
            center is the mean of tokens 64 to 95 as stored in the other page; that page must not
            begin in this call, and no job may write these tokens. If there are as many begins as
            jobs, each page must have a job.
        pages: (pool slots, page_bytes) uint8.
        not_finite: (1,) int32; set to 1 if a center, scale or zero is NaN, infinite or beyond
            float16 (65504), otherwise unchanged.
        sigma: (KV heads or 1, head_dim) float32 balancing factors, or (batch, KV heads or 1,
            head_dim) for per-row balancing; None for no balancing.
        recipe_numbers: recipe of the pages (``oscar_mm.ops.library.recipe_numbers``).
    """

    keys: torch.Tensor
    values: torch.Tensor
    recent: torch.Tensor
    jobs: torch.Tensor
    begins: torch.Tensor
    pages: Written
    not_finite: Written
    sigma: torch.Tensor | None
    recipe_numbers: list[int]

    @property
    def recipe(self) -> Recipe:
        """Recipe of the pages."""
        return recipe_of(self.recipe_numbers)


class StoreLayersArguments(NamedTuple):
    """Arguments of ``store_layers``: the same jobs in each of several layers.

    Attributes:
        recent, pages, not_finite, sigma: see ``StoreArguments``, one per layer.
        jobs, begins: see ``StoreArguments``; all sources refer to ``recent``, and each page that
            is begun has a job.
        recipe_numbers: see ``StoreArguments``.
    """

    recent: list[torch.Tensor]
    jobs: torch.Tensor
    begins: torch.Tensor
    pages: WrittenList
    not_finite: WrittenList
    sigma: list[torch.Tensor | None]
    recipe_numbers: list[int]

    @property
    def recipe(self) -> Recipe:
        """Recipe of the pages."""
        return recipe_of(self.recipe_numbers)

    @property
    def layers(
        self,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Iterate over (recent, pages, not_finite, sigma) of each layer."""
        return zip(self.recent, self.pages, self.not_finite, self.sigma, strict=True)


def store_by_torch(arguments: StoreArguments) -> None:
    """Run ``store`` with PyTorch operations; waits for the device."""
    begin_by_torch(arguments)
    for jobs in _parts_of(arguments.jobs):
        _fill(arguments, jobs)


def begin_by_torch(arguments: StoreArguments) -> None:
    """Write the centers of new pages; the first half of ``store_by_torch``."""
    for begins in _parts_of(arguments.begins):
        _begin(arguments, begins)


def _parts_of(table: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the active lines of a table, a limited number at a time."""
    refuse_capture("store", table.device)
    todo = table[table[:, 0] >= 0]
    yield from todo.split(_JOBS_AT_ONCE) if len(todo) else ()


def store_layers_one_by_one(
    arguments: StoreLayersArguments, store: Callable[[StoreArguments], None] = store_by_torch
) -> None:
    """Run ``store_layers`` as a ``store`` for each layer; waits for the device."""
    page_format = arguments.recipe.page_format
    tables = arguments.jobs, arguments.begins
    for recent, pages, not_finite, sigma in arguments.layers:
        none = recent.new_empty(1, page_format.kv_heads, 0, page_format.head_dim)
        layer = (none, none, recent, *tables, pages, not_finite, sigma)
        store(StoreArguments(*layer, arguments.recipe_numbers))


def _begin(arguments: StoreArguments, begins: torch.Tensor) -> None:
    """Write the centers of pages."""
    recipe, pages = arguments.recipe, arguments.pages
    page_format = recipe.page_format
    slots, rows, counts, others = begins[:, :HEAD].long().unbind(1)
    sources = begins[:, HEAD:]
    used = torch.arange(sources.shape[1], device=begins.device) < counts[:, None]
    at, places = used.nonzero().unbind(1)
    keys = tokens_of(arguments.keys, arguments.recent, 0, sources[at, places], rows[at])
    basis = Basis(page_format.head_dim, recipe.rotate, sigma_of(arguments.sigma, rows[at]))
    turned = basis.keys_in(keys[:, :, None])[:, :, 0]
    sums = turned.new_zeros(len(begins), *turned.shape[1:]).index_add_(0, at, turned)
    centers = sums / counts.clamp(min=1)[:, None, None]
    by_page = (counts == 0).nonzero()[:, 0]
    if len(by_page):
        stored, _ = unpack_stored(pages[others[by_page]], page_format)
        centers[by_page] = stored[:, :, STORED_CENTER].mean(2)
    arguments.not_finite.bitwise_or_((~centers.half().isfinite().all()).int())
    there = pages[slots]
    page_format.write(there, "center", centers)
    pages[slots] = there


def _fill(arguments: StoreArguments, jobs: torch.Tensor) -> None:
    """Write the tokens of the jobs to their pages."""
    recipe, pages, recent = arguments.recipe, arguments.pages, arguments.recent
    page_format = recipe.page_format
    slots, tiles, rows, _ = jobs[:, :HEAD].long().unbind(1)
    sources = jobs[:, HEAD:]
    at, within = (sources != NOTHING).nonzero().unbind(1)
    if not len(at):
        return
    taken = sources[at, within], rows[at]
    keys = tokens_of(arguments.keys, recent, 0, *taken)
    values = tokens_of(arguments.values, recent, 1, *taken)
    mine = slots[at]
    centers = page_format.read(pages, "center", mine) if page_format.center else None
    sigma = sigma_of(arguments.sigma, rows[at])
    arrays, finite = quantize_tokens(keys, values, centers, recipe, sigma)
    arguments.not_finite.bitwise_or_((~finite).int())
    for name, array in arrays.items():
        page_format.write_tokens(pages, mine, tiles[at] * TILE + within, name, array)


def tokens_of(
    states: torch.Tensor,
    recent: torch.Tensor,
    side: int,
    source: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Return the keys (side 0) or values (side 1) of tokens, (*source shape, KV heads, head_dim),
    without waiting.

    Args:
        source: source of each token: the index of a new token, or ~slot of ``recent``.
        rows: row of the batch of each token, broadcast to ``source``.
    """
    if not len(recent):
        return states[rows, :, source]
    kept = recent[(~source).clamp(min=0), side]
    if not states.shape[2]:
        return kept
    new = states[rows, :, source.clamp(min=0)]
    return torch.where((source >= 0)[..., None, None], new, kept)
