"""Tables of a decode step: where every stored token is, and which thread block attends to what.

Made on the host once a step, used by all layers of a device, read by ``csrc/decode/decode.cu``. The
arguments of ``decode`` are these tables, and what each layer has of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from oscar_mm.ops.library import FORMAT_NUMBERS, ArgumentChecker, format_of
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat

COLUMNS = 8
"""Query columns (tokens x query heads of a KV head) that a thread block takes at once."""
FEWEST_ITEMS = 8
"""Fewest items that a thread block gets, where a segment has that many: its warps take one each at
a time, and to add up the parts of many thread blocks takes longer."""
ROUND_ITEMS = 12
"""Fewest items where with ``FEWEST_ITEMS`` more than three quarters of the thread blocks had work:
a round of the warps. Meanwhile weights of the next product come to multiprocessors without work,
and there are fewer parts; steps take 2% to 3% less (30B-A3B after 32K tokens, H100)."""
SEGMENT_ITEMS = 20
"""Items in the time of which a thread block goes over to its next segment."""
TILE = 16
"""Tokens in 16-bit precision that a warp takes at a time."""
HALF_PAGE = PAGE_TOKENS // 2
"""Tokens that a warp takes where there are too few whole pages for all warps."""
START = 1 << 8
"""Unit of the first token in use in a page's entry; below it is the token after the last."""
SECOND = 1 << 16
"""Set in a page's entry if the page is of the second format."""
FIELDS = 16  # 32-bit words of an Assignment in csrc/decode/decode.cu, padding included
_checker = ArgumentChecker("decode")

Entries = tuple[np.ndarray, np.ndarray]
"""What a sequence has: (n, 2) int32 pages as in ``Tables.items``, (m,) int32 slots of 16 bit."""


@dataclass(frozen=True)
class Tables:
    """Tables on a device, all int32.

    Attributes:
        items: (batch, longest, 2): for each sequence its pages, {slot, stop + 256 * start + flag of
            the second format}, of which tokens start to stop - 1 are in use.
        recents: (batch, longest): slots of its tokens in 16-bit precision.
        counts: (batch, 2): tokens in 16-bit precision and pages.
        assignments: (thread blocks, 16).
    """

    items: torch.Tensor
    recents: torch.Tensor
    counts: torch.Tensor
    assignments: torch.Tensor

    @property
    def of_past(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the order in which ``oscar_mm.ops.decode`` takes them."""
        return self.items, self.recents, self.counts, self.assignments

    @classmethod
    def within(cls, whole: torch.Tensor, arrays: tuple[np.ndarray, ...]) -> Tables:
        """Views of a tensor that holds ``laid_out(arrays)``."""
        parts = whole.split([array.size for array in arrays])
        assignments, items, recents, counts = (
            part.view(array.shape) for part, array in zip(parts, arrays, strict=True)
        )
        return cls(items, recents, counts, assignments)


def tables_of(
    entries: Sequence[Entries],
    kv_heads: int,
    columns: int,
    workers: int,
    device: torch.device,
) -> Tables:
    """Tables for attention over what sequences hold.

    Args:
        entries: of each sequence before the step.
        kv_heads: KV heads of a layer.
        columns: query tokens times query heads of a KV head.
        workers: thread blocks, as many as the device runs at a time.
    """
    arrays = arrays_of(entries, kv_heads, columns, workers)
    # One copy to the device instead of three.
    return Tables.within(upload(laid_out(arrays), device), arrays)


def upload(table: np.ndarray, device: torch.device) -> torch.Tensor:
    """A table on a device; the host does not wait for the device's work before it."""
    tensor = torch.from_numpy(table)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def laid_out(arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    """All of ``arrays_of`` in one row."""
    return np.concatenate([array.ravel() for array in arrays])


def lengths_of(arrays: tuple[np.ndarray, ...]) -> tuple[int, int]:
    """Lengths of items and recents, of ``arrays_of``."""
    _, items, recents, _ = arrays
    return items.shape[1], recents.shape[1]


def arrays_of(
    entries: Sequence[Entries],
    kv_heads: int,
    columns: int,
    workers: int,
    longest: tuple[int, int] = (1, 1),
) -> tuple[np.ndarray, ...]:
    """Assignments, items, recents and counts of ``Tables``, on the host.

    Assignments come first: they are read 16 bytes at a time.

    Args:
        entries, kv_heads, columns, workers: as of ``tables_of``.
        longest: the least length of the second dimension of items and of recents.
    """
    with_halves = sum(1 - (-len(slots) // TILE) + 2 * len(pages) for pages, slots in entries)
    if with_halves * kv_heads * -(-columns // COLUMNS) <= workers * FEWEST_ITEMS:
        entries = [(_in_halves(pages), slots) for pages, slots in entries]
    counts = np.array([[len(slots), len(pages)] for pages, slots in entries], dtype=np.int32)
    in_16_bit, in_pages = counts.max(axis=0).tolist()
    items = np.zeros((len(entries), max(longest[0], in_pages), 2), dtype=np.int32)
    recents = np.zeros((len(entries), max(longest[1], in_16_bit)), dtype=np.int32)
    for row, (pages, slots) in enumerate(entries):
        items[row, : len(pages)] = pages
        recents[row, : len(slots)] = slots
    in_items = tuple((-(-slots // TILE), pages) for slots, pages in counts.tolist())
    return assign(in_items, kv_heads, columns, workers), items, recents, counts


def _in_halves(pages: np.ndarray) -> np.ndarray:
    """Pages as of ``Entries``, an item for each half in use.

    Where no warp has more than an item, the largest item is what takes the time.
    """
    halves = np.repeat(pages, 2, axis=0)
    used = halves[:, 1]
    first, last = used // START % START, used % START
    first[1::2] = first[1::2].clip(HALF_PAGE)
    last[::2] = last[::2].clip(None, HALF_PAGE)
    halves[:, 1] = used & SECOND | first * START | last
    return halves[first < last]


@lru_cache(maxsize=64)
def assign(
    counts: tuple[tuple[int, int], ...], kv_heads: int, columns: int, workers: int
) -> np.ndarray:
    """Share the line of items out to thread blocks: (workers, 16) int32, see csrc/decode/decode.cu.

    ``counts`` are of each sequence the tiles of its tokens in 16-bit precision, and its pages.

    With no more segments than thread blocks each thread block works on one segment, and segments
    get thread blocks by their length. Otherwise all get equal parts of the line, on which
    ``SEGMENT_ITEMS`` places without an item follow each segment: else the thread block of many
    short ones, such as rows that are there for a graph's sake, would take the longest.
    """
    column_tiles = -(-columns // COLUMNS)
    per_sequence = kv_heads * column_tiles
    lengths = np.repeat([1 + tiles + pages for tiles, pages in counts], per_sequence)
    straddle = len(lengths) > workers
    if straddle:
        lengths += SEGMENT_ITEMS
    starts = np.concatenate([[0], np.cumsum(lengths)])
    total = int(starts[-1])
    if total * workers >= 1 << 31:
        raise ValueError(f"{total} items are more than one launch can share out")
    table = np.zeros((workers, FIELDS), dtype=np.int32)

    def fill(worker: int, begin: int, end: int, segment: int, first: int, parts: int) -> None:
        sequence, within = divmod(segment, per_sequence)
        head, column_tile = divmod(within, column_tiles)
        tiles, pages = counts[sequence]
        table[worker, :13] = (
            *(begin, end, total, min(workers, total), sequence, head, column_tile, segment),
            *(starts[segment], tiles, pages, first, parts),
        )

    if not straddle:
        first = 0
        for segment, parts in enumerate(_shares(lengths, workers)):
            start, length = int(starts[segment]), int(lengths[segment])
            for part in range(parts):
                begin, end = start + length * part // parts, start + length * (part + 1) // parts
                fill(first + part, begin, end, segment, first, parts)
            first += parts
    else:
        used = min(workers, total)
        for worker in range(used):
            begin, end = total * worker // used, total * (worker + 1) // used
            # None begins behind a segment's items, and each has some: parts are no shorter than the
            # mean segment.
            segment = int(np.searchsorted(starts, begin + SEGMENT_ITEMS, side="right")) - 1
            fill(worker, max(begin, int(starts[segment])), end, segment, 0, 0)
    return table


def _shares(lengths: np.ndarray, workers: int) -> list[int]:
    """Thread blocks for each segment: the longest part is as short as it can be, but no shorter
    than ``FEWEST_ITEMS`` or ``ROUND_ITEMS``."""
    crowded = (-(-lengths // FEWEST_ITEMS)).sum() * 4 > workers * 3
    longest = ROUND_ITEMS if crowded else FEWEST_ITEMS
    high = max(longest, int(lengths.max()))
    while longest < high:
        middle = (longest + high) // 2
        if (-(-lengths // middle)).sum() <= workers:
            high = middle
        else:
            longest = middle + 1
    return (-(-lengths // longest)).tolist()


class DecodeArguments(NamedTuple):
    """Arguments of ``decode``.

    The result is (batch, query heads, tokens, head_dim), in memory by tokens, then heads.

    Attributes:
        queries: (batch, query heads, tokens, head_dim) bfloat16, float16 or float32; any strides
            with contiguous channels.
        keys: (batch, KV heads, tokens, head_dim) of the new tokens, in the same dtype; attention
            over them is causal.
        values: the shape of keys.
        pages: one pool, (slots, page_bytes) uint8, for each of ``formats``: at most two.
        recent: (slots, 2, KV heads, head_dim): tokens in 16-bit precision, in the dtype of queries;
            also in bfloat16 where that is float32.
        sigma: (KV heads or 1, head_dim) float32: balancing of the pages; or (batch, KV heads or 1,
            head_dim): each row's own; None for none.
        items, recents, counts, assignments: of ``Tables``.
        scaling: factor of the scores.
        formats: of the pages (``oscar_mm.ops.library.numbers_of``), by ascending bits.
        rotate: whether pages are stored rotated.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pages: list[torch.Tensor]
    recent: torch.Tensor
    sigma: torch.Tensor | None
    items: torch.Tensor
    recents: torch.Tensor
    counts: torch.Tensor
    assignments: torch.Tensor
    scaling: float
    formats: list[int]
    rotate: bool

    @property
    def page_formats(self) -> tuple[PageFormat, ...]:
        """Layouts of the pages; ValueError if they are not such as ``formats`` may have."""
        return _formats(tuple(self.formats))

    def result(self) -> torch.Tensor:
        """What ``decode`` returns, without data."""
        batch, query_heads, tokens, head_dim = self.queries.shape
        return self.queries.new_empty(batch, tokens, query_heads, head_dim).transpose(1, 2)


@lru_cache(maxsize=64)
def _formats(numbers: tuple[int, ...]) -> tuple[PageFormat, ...]:
    starts = range(0, len(numbers), FORMAT_NUMBERS)
    formats = tuple(format_of(numbers[start : start + FORMAT_NUMBERS]) for start in starts)
    bits = [page_format.bits for page_format in formats]
    if len(bits) > 2 or bits != sorted(set(bits)):
        _checker.refuse("formats", f"of {bits} bits", "at most two, by ascending bits")
    return formats
