"""The jobs of pack by PyTorch operations: collect the tokens of pages, quantize, store."""

from __future__ import annotations

import torch

from oscar_mm.ops.quantize import Recipe, parts_of, quantize


def pack_by_torch(
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
    """As the operation ``pack`` (``oscar_mm.ops.pack``); waits for the device."""
    todo = (slots >= 0).nonzero()[:, 0]
    for part in parts_of(len(todo), recipe.page_format):
        jobs = todo[part]
        stored = source[jobs], rows[jobs]
        key_pages = collect(keys, recent, 0, *stored)
        value_pages = collect(values, recent, 1, *stored)
        packed, finite = quantize(key_pages, value_pages, recipe, sigma)
        pages[slots[jobs]] = packed
        bad |= (~finite).int()


def collect(
    states: torch.Tensor,
    recent: torch.Tensor,
    side: int,
    source: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Keys (side 0) or values of whole pages, (n, KV heads, 128, head_dim); does not wait."""
    found = states[rows[:, None], :, source.clamp(min=0)]
    if len(recent):
        kept = recent[(~source).clamp(min=0), side]
        found = torch.where((source >= 0)[..., None, None], found, kept)
    return found.transpose(1, 2)
