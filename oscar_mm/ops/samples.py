"""Small problems without a user's data: kernels and PyTorch operations must agree on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oscar_mm.cache.layout import BLOCK_TOKENS, PAGE_TOKENS, PageFormat
from oscar_mm.cache.stream import START
from oscar_mm.cache.tables import COLUMNS, SECOND, assign
from oscar_mm.quant.basis import Basis

CHECKED_HEADS = 3
"""KV heads: a kernel is the same for any number."""
JOB_SLOTS = 6
"""Pages that ``random_jobs`` writes to."""
_Tensor = torch.Tensor
Jobs = tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor]
Past = tuple[_Tensor, _Tensor, _Tensor, list[_Tensor], _Tensor, _Tensor | None]


def random_pages(count: int, page_format: PageFormat, device: torch.device) -> torch.Tensor:
    """(count, page_bytes) uint8: random codes, scales, zeros and norms, always the same."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.zeros(count, page_format.page_bytes, dtype=torch.uint8)
    for name, field in page_format.fields.items():
        heads = (page_format.kv_heads,) if field.per_head else ()
        shape = (count, *heads, *field.shape)
        if field.kind == "codes":
            shape = (*shape[:-2], PAGE_TOKENS, page_format.head_dim)
            values = torch.randint(1 << page_format.bits, shape, generator=generator)
        else:
            values = torch.randn(shape, generator=generator)
            if name.endswith("scales"):  # so that keys and values are around 1
                values = (values / 4).exp() * 2 / (1 << page_format.bits)
            elif name.endswith("zeros"):
                values = values / 2 - 1
            else:
                values = (values / 2).exp()
            if name.startswith("value"):
                values = values.transpose(2, 3)
        page_format.write(pages, name, values)
    return pages.to(device)


def random_basis(page_format: PageFormat, rotate: bool, device: torch.device) -> Basis:
    """Balancing of every KV head, between 0.5 and 2; its reciprocals are bfloat16 numbers."""
    generator = torch.Generator().manual_seed(1)
    share = torch.rand(page_format.kv_heads, page_format.head_dim, generator=generator)
    sigma = 1 / (share * 1.5 + 0.5).bfloat16().float()
    return Basis(page_format.head_dim, rotate, sigma.to(device))


def random_jobs(page_format: PageFormat, dtype: torch.dtype, device: torch.device) -> Jobs:
    """Keys, values, blocks, source, rows and slots of five jobs of pack (``oscar_mm.ops.pack``).

    Pages of new tokens, of stored ones, of both, of tokens in any order, and one job that does
    nothing and names tokens that are not there. Token norms are over two decades.
    """
    generator = torch.Generator().manual_seed(0)
    heads, head_dim, tokens, slots = page_format.kv_heads, page_format.head_dim, 300, 8
    # As attention makes them: tokens before heads in memory.
    states = torch.randn(2, 2, tokens, heads, head_dim, generator=generator).transpose(2, 3)
    states *= torch.randn(2, 2, 1, tokens, 1, generator=generator).exp()
    blocks = torch.randn(slots, 2, heads, BLOCK_TOKENS, head_dim, generator=generator)
    stored = ~torch.randperm(slots * BLOCK_TOKENS, generator=generator)
    new = torch.arange(PAGE_TOKENS)
    source = torch.stack(
        [
            new + 7,
            stored[:PAGE_TOKENS],
            torch.cat([stored[PAGE_TOKENS:][:100], new[:28]]),
            new + (1 << 30),
            torch.randperm(tokens, generator=generator)[:PAGE_TOKENS],
        ]
    )
    tables = (source, torch.tensor([0, 1, 0, 99, 1]), torch.tensor([4, 0, 5, -1, 2]))
    keys, values, blocks = (x.to(device, dtype) for x in (*states, blocks))
    source, rows, slots = (x.to(device, torch.int32) for x in tables)
    return keys, values, blocks, source, rows, slots


def random_past(
    formats: Sequence[PageFormat],
    rotate: bool,
    dtype: torch.dtype,
    device: torch.device,
    workers: int,
    narrow: bool = False,
) -> tuple[Past, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments of decode (``oscar_mm.ops.decode``) for two unequal rows and a few new tokens.

    One row has halves of blocks, the last in part filled, and pages of all formats, of some of
    which a range is in use; the other has one page. What is not in use is NaN.

    Args:
        formats: one or two, by ascending bits.
        workers: thread blocks.
        narrow: two new tokens of two query heads a KV head, half of a fragment's columns; else
            three of four, one and a half.

    Returns:
        (queries, keys, values, pages, blocks, sigma), items, counts and assignments.
    """
    generator = torch.Generator().manual_seed(0)
    heads, head_dim = formats[0].kv_heads, formats[0].head_dim
    tokens, group = (2, 2) if narrow else (3, COLUMNS // 2)
    # As attention makes them: tokens before heads in memory.
    queries, keys, values = (
        torch.randn(2, tokens, n, head_dim, generator=generator).transpose(1, 2)
        for n in (heads * group, heads, heads)
    )
    blocks = torch.full((3, 2, heads, BLOCK_TOKENS, head_dim), torch.nan)
    halves = [(4, 16), (5, 16), (0, 5)]  # of blocks 2 and 0
    for half, filled in halves:
        places = slice(half % 2 * 16, half % 2 * 16 + filled)
        stored = torch.randn(2, heads, filled, head_dim, generator=generator)
        blocks[half // 2, :, :, places] = stored
    pages, entries = [], []
    for number, page_format in enumerate(formats):
        pool = random_pages(6, page_format, torch.device("cpu"))
        pool[2] = 255
        pages.append(pool.to(device))
        ranges = ((5, 0, 128), (0, 30, 90), (1, 0, 1), (4, 127, 128), (3, 0, 128))
        flag = number * SECOND
        entries += [(slot, start * START + stop + flag) for slot, start, stop in ranges]
    rows = [halves + entries, entries[:1]]
    counts = [(len(halves), len(entries)), (0, 1)]
    items = torch.zeros(2, len(rows[0]), 2, dtype=torch.int32)
    for item, row in zip(items, rows, strict=True):
        item[: len(row)] = torch.tensor(row)
    assignments = assign(tuple(counts), heads, tokens * group, workers)
    sigma = random_basis(formats[0], rotate, device).sigma
    queries, keys, values, blocks = (x.to(device, dtype) for x in (queries, keys, values, blocks))
    return (
        (queries, keys, values, pages, blocks, sigma),
        items.to(device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.from_numpy(assignments.copy()).to(device),
    )
