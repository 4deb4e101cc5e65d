"""The jobs of store by PyTorch operations: the CPU's path, the kernel's reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.quant.basis import Basis
from oscar_mm.quant.quantize import Recipe, quantize_tokens

TILE = 16
"""Tokens of a job."""
HEAD = 4
"""Numbers of a job, or of a beginning, before its sources."""
NOTHING = torch.iinfo(torch.int32).min
"""Source of a place that is left alone."""
CENTER_TOKENS = 32
"""Most tokens whose mean is a page's center."""
_JOBS_AT_ONCE = 256
"""4,096 tokens: bounds the float32 temporaries of a long prompt."""


def store_by_torch(
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
    """As the operation ``store`` (``oscar_mm.ops.store``); waits for the device."""
    for table, carry_out in ((begins, _begin), (jobs, _fill)):
        todo = table[table[:, 0] >= 0]
        for lines in todo.split(_JOBS_AT_ONCE) if len(todo) else ():
            carry_out(keys, values, recent, lines, pages, bad, sigma, recipe)


def store_layers_by_torch(
    recent: Sequence[torch.Tensor],
    jobs: torch.Tensor,
    begins: torch.Tensor,
    pages: Sequence[torch.Tensor],
    bad: Sequence[torch.Tensor],
    sigma: Sequence[torch.Tensor | None],
    recipe: Recipe,
) -> None:
    """As the operation ``store_layers``, likewise."""
    page_format = recipe.page_format
    for stored, target, flag, by in zip(recent, pages, bad, sigma, strict=True):
        none = stored.new_empty(1, page_format.kv_heads, 0, page_format.head_dim)
        store_by_torch(none, none, stored, jobs, begins, target, flag, by, recipe)


def _begin(
    keys: torch.Tensor,
    _values: torch.Tensor,
    recent: torch.Tensor,
    begins: torch.Tensor,
    pages: torch.Tensor,
    bad: torch.Tensor,
    sigma: torch.Tensor | None,
    recipe: Recipe,
) -> None:
    """Write the centers of pages."""
    page_format = recipe.page_format
    slots, rows, counts, _ = begins[:, :HEAD].long().unbind(1)
    sources = begins[:, HEAD:]
    used = torch.arange(sources.shape[1], device=begins.device) < counts[:, None]
    at, places = used.nonzero().unbind(1)
    found = tokens_of(keys, recent, 0, sources[at, places], rows[at])
    basis = Basis(page_format.head_dim, recipe.rotate, sigma)
    turned = basis.keys_in(found[:, :, None])[:, :, 0]
    sums = turned.new_zeros(len(begins), *turned.shape[1:]).index_add_(0, at, turned)
    centers = sums / counts.clamp(min=1)[:, None, None]
    bad |= (~centers.half().isfinite().all()).int()
    there = pages[slots]
    page_format.write(there, "center", centers)
    pages[slots] = there


def _fill(
    keys: torch.Tensor,
    values: torch.Tensor,
    recent: torch.Tensor,
    jobs: torch.Tensor,
    pages: torch.Tensor,
    bad: torch.Tensor,
    sigma: torch.Tensor | None,
    recipe: Recipe,
) -> None:
    """Write tokens to their places."""
    page_format = recipe.page_format
    slots, tiles, rows, _ = jobs[:, :HEAD].long().unbind(1)
    sources = jobs[:, HEAD:]
    at, within = (sources != NOTHING).nonzero().unbind(1)
    if not len(at):
        return
    taken = sources[at, within], rows[at]
    new_keys, new_values = tokens_of(keys, recent, 0, *taken), tokens_of(values, recent, 1, *taken)
    # Jobs of one page are put together: their bytes may share what is read and written at once.
    targets, page = slots[at].unique(return_inverse=True)
    places = tiles[at] * TILE + within
    there = pages[targets]
    centers = page_format.read(there, "center")[page] if page_format.center else None
    arrays, finite = quantize_tokens(new_keys, new_values, centers, recipe, sigma)
    bad |= (~finite).int()
    written = torch.zeros_like(there)
    for name, array in arrays.items():
        shape = (len(targets), page_format.kv_heads, PAGE_TOKENS, array.shape[2])
        whole = array.new_zeros(shape)
        whole[page, :, places] = array
        page_format.write(written, name, whole)
    filled = torch.zeros(len(targets), PAGE_TOKENS + 1, dtype=torch.bool, device=pages.device)
    filled[page, places] = True
    # The byte of no token, -1, takes the last column, which is False.
    mine = filled[:, page_format.token_bytes(pages.device).long()]
    pages[targets] = torch.where(mine, written, there)


def tokens_of(
    states: torch.Tensor,
    recent: torch.Tensor,
    side: int,
    source: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Keys (side 0) or values of tokens, (*shape of source, KV heads, head_dim); does not wait.

    Args:
        source: of each token, the index of a new one or ~slot of ``recent``.
        rows: of the batch, broadcast to ``source``.
    """
    if not len(recent):
        return states[rows, :, source]
    kept = recent[(~source).clamp(min=0), side]
    if not states.shape[2]:
        return kept
    new = states[rows, :, source.clamp(min=0)]
    return torch.where((source >= 0)[..., None, None], new, kept)
