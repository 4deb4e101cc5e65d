"""The jobs of pack by PyTorch operations: collect the tokens of pages, quantize, store."""

from __future__ import annotations

import torch

from oscar_mm.ops.store_torch import tokens_of
from oscar_mm.quant.quantize import Recipe, parts_of, quantize


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
        stored = source[jobs], rows[jobs, None]
        key_pages = tokens_of(keys, recent, 0, *stored).transpose(1, 2)
        value_pages = tokens_of(values, recent, 1, *stored).transpose(1, 2)
        packed, finite = quantize(key_pages, value_pages, recipe, sigma)
        pages[slots[jobs]] = packed
        bad |= (~finite).int()
