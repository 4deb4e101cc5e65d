"""decode by PyTorch operations: the CPU's path and the kernel's reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oscar_mm.ops.decode_tables import SECOND, START
from oscar_mm.ops.running_attention import RunningAttention
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.quant.basis import Basis
from oscar_mm.quant.quantize import unpack_stored

_TOKENS_AT_ONCE = 2048
"""Tokens of the past that are in memory at a time, in float32."""


def decode_by_torch(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: Sequence[torch.Tensor],
    recent: torch.Tensor,
    sigma: torch.Tensor | None,
    items: torch.Tensor,
    recents: torch.Tensor,
    counts: torch.Tensor,
    scaling: float,
    formats: Sequence[PageFormat],
    rotate: bool,
) -> torch.Tensor:
    """As the operation ``decode`` (``oscar_mm.ops.decode``), a row at a time; waits for the device.

    Returns:
        (batch, query heads, tokens, head_dim) contiguous.
    """
    output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    basis = Basis(queries.shape[3], rotate, sigma)
    for row, (in_16_bit, in_pages) in enumerate(counts.tolist()):
        packed = basis if in_pages else None
        running = RunningAttention(queries[row], keys.shape[1], scaling, packed)
        for slots in recents[row, :in_16_bit].split(_TOKENS_AT_ONCE) if in_16_bit else ():
            stored = recent[slots].permute(1, 2, 0, 3)
            running.add(stored[0], stored[1], stored=False)
        entries = items[row, :in_pages]
        for number, page_format in enumerate(formats):
            mine = entries[(entries[:, 1] >= SECOND) == bool(number)]
            for part in mine.split(_TOKENS_AT_ONCE // PAGE_TOKENS) if len(mine) else ():
                stored = unpack_stored(pages[number][part[:, 0]], page_format)
                used = part[:, 1] % SECOND
                sides = (_in_use(side, used // START, used % START) for side in stored)
                running.add(*sides, stored=True)
        running.add(keys[row], values[row], stored=False, first_query=0)
        output[row] = running.output()
    return output


def _in_use(states: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """(n, KV heads, tokens, head_dim) -> (KV heads, tokens from starts to stops - 1, head_dim)."""
    places = torch.arange(states.shape[2], device=states.device)
    used = (places >= starts[:, None]) & (places < stops[:, None])
    joined = states.transpose(0, 1).flatten(1, 2)
    return joined if bool(used.all()) else joined[:, used.flatten()]
