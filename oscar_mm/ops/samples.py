"""Small synthetic problems for comparing kernels with PyTorch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oscar_mm.ops.decode_tables import COLUMNS, SECOND, START, assign
from oscar_mm.ops.store_torch import CENTER_TOKENS, HEAD, NOTHING, TILE
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.quant.basis import Basis

CHECKED_HEADS = 3
"""Number of KV heads; kernels do not depend on it."""
JOB_SLOTS = 6
"""Number of pages that ``random_jobs`` writes to."""
_Tensor = torch.Tensor
Jobs = tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor]
Stores = tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor]
LayerStores = tuple[list[_Tensor], _Tensor, _Tensor]
Past = tuple[_Tensor, _Tensor, _Tensor, list[_Tensor], _Tensor, _Tensor | None]


def random_pages(count: int, page_format: PageFormat, device: torch.device) -> torch.Tensor:
    """Return (count, page_bytes) uint8 pages with reproducible random values in all fields."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.zeros(count, page_format.page_bytes, dtype=torch.uint8)
    for name, field in page_format.fields.items():
        if name.endswith("_high"):  # written together with the low bits
            continue
        heads = (page_format.kv_heads,) if field.per_head else ()
        shape = (count, *heads, *field.shape)
        bits = page_format.bits.values if name.startswith("value") else page_format.bits.keys
        if field.kind == "codes":
            shape = (*shape[:-1], page_format.head_dim)
            values = torch.randint(1 << bits, shape, generator=generator)
        else:
            values = torch.randn(shape, generator=generator)
            if name.endswith("scales"):  # so that keys and values are around 1
                values = (values / 4).exp() * 2 / (1 << bits)
            elif name.endswith("zeros"):
                values = values / 2 - 1
            elif name == "norms":
                values = (values / 2).exp()
        if name == "key_scales" and page_format.center:  # some keys have their center subtracted
            values *= 2 * torch.randint(2, shape, generator=generator) - 1
        page_format.write(pages, name, values)
    return pages.to(device)


def random_basis(
    page_format: PageFormat, rotate: bool, device: torch.device, rows: tuple[int, ...] = ()
) -> Basis:
    """Return a basis with balancing between 0.5 and 2 for each KV head; reciprocals are bfloat16
    numbers.

    Args:
        rows: number of rows with their own balancing; empty if all rows share one.
    """
    generator = torch.Generator().manual_seed(1)
    shape = (*rows, page_format.kv_heads, page_format.head_dim)
    share = torch.rand(shape, generator=generator)
    sigma = 1 / (share * 1.5 + 0.5).bfloat16().float()
    return Basis(page_format.head_dim, rotate, sigma.to(device))


def _random_states(
    page_format: PageFormat, tokens: int, slots: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of two rows, and some 16-bit tokens.

    Keys and values are (2, 2, heads, tokens, d), with norms that span two orders of magnitude; the
    16-bit tokens are (slots, 2, heads, d).
    """
    heads, head_dim = page_format.kv_heads, page_format.head_dim
    # In memory, tokens come before heads, as in attention layers.
    states = torch.randn(2, 2, tokens, heads, head_dim, generator=generator).transpose(2, 3)
    states *= torch.randn(2, 2, 1, tokens, 1, generator=generator).exp()
    return states, torch.randn(slots, 2, heads, head_dim, generator=generator)


def random_jobs(page_format: PageFormat, dtype: torch.dtype, device: torch.device) -> Jobs:
    """Return keys, values, recent, source, rows and slots for five jobs of pack
    (``oscar_mm.ops.pack``).

    There are pages of new tokens, of stored tokens, of both, and of tokens in random order, and a
    job that does nothing and refers to tokens that do not exist.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, slots = 300, 256
    states, recent = _random_states(page_format, tokens, slots, generator)
    stored = ~torch.randperm(slots, generator=generator)
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
    keys, values, recent = (x.to(device, dtype) for x in (*states, recent))
    source, rows, slots = (x.to(device, torch.int32) for x in tables)
    return keys, values, recent, source, rows, slots


def random_stores(page_format: PageFormat, dtype: torch.dtype, device: torch.device) -> Stores:
    """Return keys, values, recent, jobs and begins for store (``oscar_mm.ops.store``) with five
    pages.

    There are jobs with new tokens, with stored tokens, with both, with a single token, two jobs
    that share a tile, and a job that does nothing and refers to tokens that do not exist. If the
    format has centers, some pages get a new center from one token, from many tokens or from another
    page. Keys of the second row have a mean far from zero.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, slots = 120, 40
    states, recent = _random_states(page_format, tokens, slots, generator)
    states[0, 1] += 4 * torch.randn(states.shape[2], 1, states.shape[4], generator=generator)
    new, stored = torch.arange(TILE), ~torch.randperm(slots, generator=generator)
    both = torch.where(new % 3 == 0, stored[:TILE], new + 50)
    single, even = torch.full((2, TILE), NOTHING)
    single[11], even[::2] = 119, new[:8] + 9
    odd = torch.where(new % 2 == 1, both, NOTHING)
    jobs = [
        *((4, 0, 0, 0, *(new + 7)), (4, 7, 1, 0, *(new + 90)), (0, 3, 1, 0, *stored[:TILE])),
        *((0, 4, 1, 0, *both), (1, 5, 1, 0, *single), (-1, 99, 99, 0, *(new + (1 << 30)))),
        *((3, 6, 0, 0, *even), (3, 6, 1, 0, *odd), (1, 2, 0, 0, *(new + 100))),
    ]
    at_first = torch.zeros(5, HEAD + CENTER_TOKENS, dtype=torch.int64)
    at_first[:, :HEAD] = torch.tensor(
        [(4, 1, CENTER_TOKENS, 0), (-1, 99, 99, 0), (0, 0, 1, 0), (1, 1, 21, 0), (3, 99, 0, 2)]
    )
    at_first[0, HEAD:], at_first[2, HEAD:] = torch.arange(CENTER_TOKENS) + 80, stored[5]
    at_first[3, HEAD:] = torch.randint(-slots, tokens, (CENTER_TOKENS,), generator=generator)
    begins = at_first if page_format.center else at_first[:0]
    keys, values, recent = (x.to(device, dtype) for x in (*states, recent))
    table = torch.tensor(jobs).to(device, torch.int32)
    return keys, values, recent, table, begins.to(device, torch.int32)


def random_layer_stores(
    page_format: PageFormat, dtype: torch.dtype, device: torch.device
) -> LayerStores:
    """Return 16-bit tokens of two layers, jobs and begins for store_layers with five pages.

    The jobs are those of ``random_stores``, but with stored tokens only.
    """
    _, _, recent, jobs, begins = random_stores(page_format, dtype, device)
    for table in (jobs, begins):
        sources = table[:, HEAD:]
        sources.copy_(torch.where(sources >= 0, ~(sources % len(recent)), sources))
    return [recent, recent.flip(0)], jobs, begins


def random_past(
    formats: Sequence[PageFormat],
    rotate: bool,
    dtype: torch.dtype,
    device: torch.device,
    workers: int,
    narrow: bool = False,
) -> tuple[Past, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return arguments for decode (``oscar_mm.ops.decode``) with two unequal rows and a few new
    tokens.

    One row has 16-bit tokens, which fill two tiles and part of a third, and pages of all formats,
    some of them partly in use; the other row has one page. Unused tokens are NaN.

    Args:
        formats: one or two page formats.
        workers: number of thread blocks.
        narrow: whether to use two new tokens and two query heads per KV head, which take half of a
            fragment's columns; otherwise three and four, which take one and a half fragments.

    Returns:
        (queries, keys, values, pages, recent, sigma), items, recents, counts and assignments.
    """
    generator = torch.Generator().manual_seed(0)
    heads, head_dim = formats[0].kv_heads, formats[0].head_dim
    tokens, group = (2, 2) if narrow else (3, COLUMNS // 2)
    # In memory, tokens come before heads, as in attention layers.
    queries, keys, values = (
        torch.randn(2, tokens, n, head_dim, generator=generator).transpose(1, 2)
        for n in (heads * group, heads, heads)
    )
    slots = torch.randperm(60, generator=generator)[: 2 * TILE + 5]
    recent = torch.full((60, 2, heads, head_dim), torch.nan)
    recent[slots] = torch.randn(len(slots), 2, heads, head_dim, generator=generator)
    recents = torch.zeros(2, len(slots), dtype=torch.int32)
    recents[0] = slots
    pages, entries, last = [], [], PAGE_TOKENS
    for number, page_format in enumerate(formats):
        pool = random_pages(6, page_format, torch.device("cpu"))
        pool[2] = 255
        ranges = ((5, 0, last), (0, 30, 90), (1, 0, 1), (4, last - 1, last), (3, 0, last))
        flag = number * SECOND
        entries += [(slot, start * START + stop + flag) for slot, start, stop in ranges]
        if page_format.codec.appends_tokens:  # places without a token were never written
            owners = page_format.token_bytes(pool.device)
            for slot, start, stop in ranges:
                pool[slot, (owners >= 0) & ((owners < start) | (owners >= stop))] = 255
        pages.append(pool.to(device))
    rows = [entries, entries[:1]]
    counts = [(len(slots), len(entries)), (0, 1)]
    items = torch.zeros(2, len(rows[0]), 2, dtype=torch.int32)
    for item, row in zip(items, rows, strict=True):
        item[: len(row)] = torch.tensor(row)
    in_items = tuple((-(-in_16_bit // TILE), in_pages) for in_16_bit, in_pages in counts)
    assignments = assign(in_items, heads, tokens * group, workers)
    sigma = random_basis(formats[0], rotate, device).sigma
    queries, keys, values, recent = (x.to(device, dtype) for x in (queries, keys, values, recent))
    return (
        (queries, keys, values, pages, recent, sigma),
        items.to(device),
        recents.to(device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.from_numpy(assignments.copy()).to(device),
    )
