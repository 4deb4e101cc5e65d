"""Tables for a decode step: the slot of each stored token, and the work of each thread block.

They are built on the host once per step, shared by all layers on a device, and read by
``csrc/decode/decode.cu``. The arguments of ``decode`` are these tables and the layer's tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from oscar_mm.ops.library import FORMAT_NUMBERS, ArgumentChecker, format_of
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat

COLUMNS = 8
"""Query columns (tokens x query heads per KV head) that a thread block processes at once."""
FEWEST_ITEMS = 8
"""Minimum items per thread block, if a segment has that many. Each warp takes one item at a time,
and merging the parts of more thread blocks would take longer."""
ROUND_ITEMS = 12
"""Minimum items per thread block if ``FEWEST_ITEMS`` would give work to more than three quarters of
the thread blocks; it is one round of the warps. Idle multiprocessors then load weights of the next
product, and there are fewer parts; steps take 2% to 3% less time (30B-A3B after 32K tokens,
H100)."""
SEGMENT_ITEMS = 20
"""Cost of switching a thread block to its next segment, in items."""
MANY_SEGMENTS = 3
"""Minimum segments per thread block with which warps may have segments of their own
(csrc/decode/by_warps.cuh)."""
SHORT_ITEMS = 48
"""Maximum mean items of these segments; longer ones are faster by thread blocks."""
WARP_SEGMENT_ITEMS = 3
"""Cost of switching a warp to its next segment, in items."""
DIVIDING_WARPS = 16
"""Number of warps of a thread block that divide the work list."""
WORKING_WARPS = (12, DIVIDING_WARPS)
"""Numbers of warps of a thread block that may work, each on one segment, in order of preference.
With more warps, segments have more parts, which takes longer (64 rows after 2,200 tokens: 39 us
with 12 warps, 49 with 16). But where only 16 give each segment a warp, warps that straddle segments
take longer still (256 rows after 700 tokens: 58 us with 16, 75 straddling; H200)."""
TILE = 16
"""Number of 16-bit tokens that a warp processes at a time."""
HALF_PAGE = PAGE_TOKENS // 2
"""Number of tokens that a warp processes at a time if there are too few whole pages for all
warps."""
START = 1 << 8
"""Factor of the first used token in a page's entry; lower bits are the exclusive end of the
range."""
SECOND = 1 << 16
"""Flag in a page's entry: the page has the second format."""
FIELDS = 32  # 32-bit words of Work in csrc/decode/params.cuh, including padding
_PINNED_SIZES = [1 << power for power in range(3, 20)]
"""Sizes of pinned memory in bytes: from a row's token to the tables of 256 rows."""
_PINNED_EACH = 16
"""Number of buffers of each size, 16 MiB in all: two passes are in flight, with at most five tables
of a size each."""
_checker = ArgumentChecker("decode")

INT32 = "i"
"""Type code of ``Entries``."""
Entries: TypeAlias = "tuple[array[int], array[int]]"
"""Stored tokens of a sequence, int32: pages, two numbers for each as in ``Tables.items``, and slots
of 16-bit tokens."""


def by_warps(segments: int, workers: int, items: int = 0) -> bool:
    """Return whether warps, not thread blocks, divide the work list; without the number of items,
    whether they may."""
    return segments >= MANY_SEGMENTS * workers and items <= SHORT_ITEMS * segments


@dataclass(frozen=True)
class Tables:
    """Tables on a device, all int32.

    Attributes:
        items: (batch, longest, 2): pages of each sequence, as {slot, stop + 256 * start + flag for
            the second format}; tokens start to stop - 1 are in use.
        recents: (batch, longest): slots of each sequence's 16-bit tokens.
        counts: (batch, 2): number of 16-bit tokens, and of pages.
        assignments: (thread blocks, FIELDS): work of each thread block.
    """

    items: torch.Tensor
    recents: torch.Tensor
    counts: torch.Tensor
    assignments: torch.Tensor

    @property
    def of_past(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tables in the argument order of ``oscar_mm.ops.decode``."""
        return self.items, self.recents, self.counts, self.assignments

    @classmethod
    def within(cls, whole: torch.Tensor, arrays: tuple[np.ndarray, ...]) -> Tables:
        """Return the tables as views of a tensor that contains ``laid_out(arrays)``."""
        parts = whole.split([array.size for array in arrays])
        assignments, items, counts, recents = (
            part.view(array.shape) for part, array in zip(parts, arrays, strict=True)
        )
        return cls(items, recents, counts, assignments)


class StoredTokens(NamedTuple):
    """Pages and 16-bit slots of the tokens of several sequences, as int32 arrays.

    Attributes:
        items: (sequences, longest, 2), see ``Tables.items``; zeros after a sequence's last page.
        recents: (sequences, longest), see ``Tables.recents``; zeros after the last token.
        counts: (sequences, 2), see ``Tables.counts``.
    """

    items: np.ndarray
    recents: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, entries: Sequence[Entries]) -> StoredTokens:
        """Return the entries of at least one sequence as arrays."""
        pages, slots = zip(*entries, strict=True)
        in_16_bit, in_pages = np.array([list(map(len, slots)), list(map(len, pages))], np.int32)
        in_pages //= 2
        items = np.frombuffer(b"".join(pages), np.int32).reshape(-1, 2)
        recents = np.frombuffer(b"".join(slots), np.int32)
        counts = np.stack([in_16_bit, in_pages], axis=1)
        return cls(_by_row(items, in_pages), _by_row(recents, in_16_bit), counts)

    def latest(self, own: np.ndarray, count: int) -> StoredTokens:
        """Return only the last ``count`` tokens of each sequence.

        Args:
            own: (sequences, 2): numbers of 16-bit tokens and of pages of the stream that contains
                all of these tokens; it is the last one in the tables.
            count: number of tokens; the stream of no sequence may have fewer.
        """
        in_16_bit, in_pages = self.counts.T
        kept = np.minimum(own[:, 0], count)
        recents = _columns_at(self.recents, in_16_bit - kept, kept)
        # The stream's pages, the last one first.
        back = np.arange(own[:, 1].max(initial=0))
        used = np.take_along_axis(
            self.items[:, :, 1], np.maximum(in_pages[:, None] - 1 - back, 0), 1
        )
        tokens = (used % START - used // START % START) * (back < own[:, 1, None])
        later = tokens.cumsum(1) - tokens
        left = (count - kept)[:, None]
        read = (tokens > 0) & (later < left)
        pages = read.sum(1)
        items = _columns_at(self.items, in_pages - pages, pages)
        surplus = (tokens * read).sum(1) - left[:, 0]
        first = np.flatnonzero(pages)
        items[first, :1, 1] += START * surplus[first, None]
        return StoredTokens(items, recents, np.stack([kept, pages], 1).astype(np.int32))

    def beside(self, other: StoredTokens, rows: np.ndarray) -> StoredTokens:
        """Return the tokens of these sequences and others.

        Args:
            other: tokens of the other sequences.
            rows: (other sequences,) index of each of them in the result, ascending; these sequences
                take the remaining indices, in order.
        """
        count = len(self.counts) + len(other.counts)
        rest = np.ones(count, bool)
        rest[rows] = False
        merged = []
        for one, theirs in zip(self, other, strict=True):
            longest = np.maximum(one.shape, theirs.shape)
            table = np.zeros((count, *longest[1:]), np.int32)
            table[rest, : one.shape[1]] = one
            table[rows, : theirs.shape[1]] = theirs
            merged.append(table)
        return StoredTokens(*merged)


def tables_of(
    stored: StoredTokens,
    kv_heads: int,
    columns: int,
    workers: int,
    device: torch.device,
) -> Tables:
    """Build the tables for attention to stored tokens.

    Args:
        stored: tokens of each sequence before the step.
        kv_heads: KV heads of a layer.
        columns: number of query tokens times query heads per KV head.
        workers: number of thread blocks that the device runs at a time.
    """
    arrays = arrays_of(stored, kv_heads, columns, workers)
    # This takes one copy to the device instead of several.
    return Tables.within(upload(laid_out(arrays), device), arrays)


def upload(table: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a table to a device without waiting for the device's queued work."""
    return moved(torch.from_numpy(table), device)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a small tensor on a device; a copy from the CPU does not wait for the device's queued
    work."""
    pinned = tensor.is_cpu and device.type == "cuda"
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=pinned)


@cache
def fill_pinned_cache() -> None:
    """Let torch allocate the pinned memory that the tables of steps need, once in a process.

    Later, an allocation would wait for the passes that are queued on the GPU. Torch reuses pinned
    memory, in sizes of powers of two, only once the GPU has carried out the copy from it, so
    several tables of a size need memory at a time.
    """
    for size in _PINNED_SIZES:
        held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(_PINNED_EACH)]
        del held  # Torch keeps the memory for later tensors.


def laid_out(arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    """Concatenate the results of ``arrays_of``."""
    return np.concatenate([array.ravel() for array in arrays])


def lengths_of(arrays: tuple[np.ndarray, ...]) -> tuple[int, int]:
    """Return the lengths of items and recents in the result of ``arrays_of``."""
    _, items, _, recents = arrays
    return items.shape[1], recents.shape[1]


def arrays_of(
    stored: StoredTokens,
    kv_heads: int,
    columns: int,
    workers: int,
    longest: tuple[int, int] = (1, 1),
) -> tuple[np.ndarray, ...]:
    """Return assignments, items, counts and recents of ``Tables``, on the host.

    Assignments come first, since they are read 16 bytes at a time; pairs come before single
    numbers, since they are read 8 bytes at a time.

    Args:
        stored, kv_heads, columns, workers: see ``tables_of``.
        longest: minimum sizes of the second dimension of items and of recents.
    """
    items, recents, (in_16_bit, in_pages) = stored.items, stored.recents, stored.counts.T
    tiles = -(-in_16_bit // TILE)
    with_halves = int((1 + tiles + 2 * in_pages).sum())
    if with_halves * kv_heads * -(-columns // COLUMNS) <= workers * FEWEST_ITEMS:
        whole = items[np.arange(items.shape[1]) < in_pages[:, None]]
        halves, in_pages = _in_halves(whole, in_pages)
        items = _by_row(halves, in_pages)
    in_items = tuple(zip(tiles.tolist(), in_pages.tolist(), strict=True))
    return (
        assign(in_items, kv_heads, columns, workers),
        _widened(items, longest[0]),
        np.stack([in_16_bit, in_pages], axis=1),
        _widened(recents, longest[1]),
    )


def _by_row(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Split consecutive values into rows of these lengths, padded with zeros to the same length of
    at least 1."""
    length = max(1, int(counts.max()))
    table = np.zeros((len(counts), length, *values.shape[1:]), dtype=np.int32)
    table[np.arange(length) < counts[:, None]] = values
    return table


def _columns_at(table: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return ``counts`` columns of each row from ``starts`` on, followed by zeros.

    Args:
        table: (rows, columns, ...).
        starts, counts: (rows,).
    """
    columns = np.arange(counts.max(initial=0))
    found = table[np.arange(len(table))[:, None], (starts[:, None] + columns) % table.shape[1]]
    found[columns >= counts[:, None]] = 0
    return found


def _widened(table: np.ndarray, longest: int) -> np.ndarray:
    """Pad the second dimension with zeros to at least ``longest``."""
    if table.shape[1] >= longest:
        return table
    return grown(table, (len(table), longest, *table.shape[2:]))


def grown(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array extended by zeros."""
    larger = np.zeros(shape, array.dtype)
    larger[tuple(map(slice, array.shape))] = array
    return larger


def _in_halves(pages: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split pages, (n, 2), into an item for each half in use, and return the items and their number
    in each sequence, as ``counts`` is that of the pages.

    This is faster if no warp has more than one item, since the largest item then determines the
    time.
    """
    halves = np.repeat(pages, 2, axis=0)
    used = halves[:, 1]
    first, last = used // START % START, used % START
    first[1::2] = first[1::2].clip(HALF_PAGE)
    last[::2] = last[::2].clip(None, HALF_PAGE)
    halves[:, 1] = used & SECOND | first * START | last
    kept = first < last
    rows = np.repeat(np.arange(len(counts)), 2 * counts)
    return halves[kept], np.bincount(rows[kept], minlength=len(counts)).astype(np.int32)


@lru_cache(maxsize=64)
def assign(
    counts: tuple[tuple[int, int], ...], kv_heads: int, columns: int, workers: int
) -> np.ndarray:
    """Distribute the work list over thread blocks.

    Returns (workers, FIELDS) int32, see csrc/decode/params.cuh. ``counts`` contains the number of
    16-bit tiles and of pages for each sequence.

    If there are no more segments than thread blocks, each thread block works on one segment, and
    segments get thread blocks in proportion to their length. Otherwise all thread blocks get equal
    parts of the work list, in which each segment is followed by ``SEGMENT_ITEMS`` empty items, or
    ``WARP_SEGMENT_ITEMS`` if warps divide the list: without them, thread blocks with many short
    segments, such as padding rows of a graph, would take longest.

    If warps divide the list, each works on one segment, provided that nearly all of them get work
    that way; segments get warps in proportion to their length. The second half of a thread block's
    row then says where its first warp begins. Otherwise that half is 0, and warps straddle
    segments.
    """
    column_tiles = -(-columns // COLUMNS)
    per_sequence = kv_heads * column_tiles
    sizes = np.array(counts)
    lengths = np.repeat(1 + sizes.sum(1), per_sequence)
    straddle = len(lengths) > workers
    divided = by_warps(len(lengths), workers, int(lengths.sum()))
    gap = WARP_SEGMENT_ITEMS if divided else SEGMENT_ITEMS
    if straddle:
        lengths += gap
    starts = np.concatenate([[0], np.cumsum(lengths)])
    total = int(starts[-1])
    if total * workers >= 1 << 31:
        raise ValueError(f"{total} items cannot be distributed in a single launch")
    table = np.zeros((workers, FIELDS), dtype=np.int32)

    if straddle:
        used = min(workers, total)
        bounds = total * np.arange(used + 1) // used
        begins, ends = bounds[:-1], bounds[1:]
        # No part begins in a segment's empty places, and each part has items: parts are no shorter
        # than the mean segment.
        segments = np.searchsorted(starts, begins + gap, side="right") - 1
        begins = np.maximum(begins, starts[segments])
        firsts = parts = np.zeros(used, np.int64)
    else:
        shares = _shares(lengths, workers)
        used = int(shares.sum())
        segments, parts = np.repeat(np.arange(len(shares)), shares), np.repeat(shares, shares)
        firsts = np.repeat(np.cumsum(shares) - shares, shares)
        part, length = np.arange(used) - firsts, lengths[segments]
        begins = starts[segments] + length * part // parts
        ends = starts[segments] + length * (part + 1) // parts
    sequences, within = np.divmod(segments, per_sequence)
    heads, column_tile = np.divmod(within, column_tiles)
    tiles, pages = sizes[sequences].T
    columns_of = (
        *(begins, ends, total, min(workers, total), sequences, heads, column_tile, segments),
        *(starts[segments], tiles, pages, firsts, parts, gap, divided),
    )
    for field, values in enumerate(columns_of):
        table[:used, field] = values
    if divided:
        _assign_warps(table[:, FIELDS // 2 :], sizes, kv_heads, column_tiles)
    return table


def _assign_warps(table: np.ndarray, sizes: np.ndarray, kv_heads: int, column_tiles: int) -> None:
    """Write where each thread block's first warp begins, if each warp works on one segment; leave
    the table unchanged if too many warps would have no work.

    Args:
        table: (workers, FIELDS / 2) zeros, see ``Work::warp`` in csrc/decode/params.cuh.
        sizes: (sequences, 2): 16-bit tiles and pages.
    """
    per_sequence = kv_heads * column_tiles
    lengths = 1 + sizes.sum(1)
    for working in WORKING_WARPS:
        warps = len(table) * working
        if len(lengths) * per_sequence > warps:
            continue
        longest = _longest(lengths, warps // per_sequence, 1)
        shares = -(-lengths // longest)
        upto = np.cumsum(shares * per_sequence)
        if 8 * (total := int(upto[-1])) >= 7 * warps:
            break
    else:
        return
    first_warps = np.arange(0, total, working)
    sequences = np.searchsorted(upto, first_warps, side="right")
    shares, begins = shares[sequences], (upto - shares * per_sequence)[sequences]
    within = (first_warps - begins) // shares
    heads, tiles = np.divmod(within, column_tiles)
    segments, firsts = sequences * per_sequence + within, begins + within * shares
    # Length, workers and parts, even of thread blocks without work; then the fields from sequence
    # to index, and from tiles to first.
    table[:, [2, 3, 12]] = working, total, longest
    found = (sequences, heads, tiles, segments), (*sizes[sequences].T, firsts)
    for start, columns_of in zip((4, 9), found, strict=True):
        for field, values in enumerate(columns_of, start):
            table[: len(segments), field] = values


def _shares(lengths: np.ndarray, workers: int) -> np.ndarray:
    """Return the number of thread blocks for each segment that makes the longest share of a block
    as short as possible, but at least ``FEWEST_ITEMS``, or ``ROUND_ITEMS`` if there are many."""
    crowded = (-(-lengths // FEWEST_ITEMS)).sum() * 4 > workers * 3
    longest = _longest(lengths, workers, ROUND_ITEMS if crowded else FEWEST_ITEMS)
    return -(-lengths // longest)


def _longest(lengths: np.ndarray, workers: int, longest: int) -> int:
    """Return the smallest maximum length of a part, at least ``longest``, for which all segments
    have no more parts than there are workers."""
    high = max(longest, int(lengths.max()))
    while longest < high:
        middle = (longest + high) // 2
        if (-(-lengths // middle)).sum() <= workers:
            high = middle
        else:
            longest = middle + 1
    return longest


class DecodeArguments(NamedTuple):
    """Arguments of ``decode``.

    The result is (batch, query heads, tokens, head_dim); in memory, tokens come before heads.

    Attributes:
        queries: (batch, query heads, tokens, head_dim) bfloat16, float16 or float32; any strides
            with contiguous channels.
        keys: (batch, KV heads, tokens, head_dim): keys of the new tokens, in the same dtype;
            attention to them is causal.
        values: same shape and dtype as keys.
        pages: one pool, (slots, page_bytes) uint8, for each of ``formats``, at most two.
        recent: (slots, 2, KV heads, head_dim): tokens in 16-bit precision, in the dtype of the
            queries, or in bfloat16 if these are float32.
        sigma: (KV heads or 1, head_dim) float32 balancing factors of the pages, or (batch, KV
            heads or 1, head_dim) for per-row balancing; None for no balancing.
        items, recents, counts, assignments: see ``Tables``.
        scaling: factor by which scores are multiplied.
        formats: formats of the pages (``oscar_mm.ops.library.numbers_of``), in order of ascending
            bits.
        rotate: whether pages are stored rotated.
        sinks: (query heads,) float32 scores that enlarge the softmax's denominator, or None.
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
    sinks: torch.Tensor | None = None

    @property
    def page_formats(self) -> tuple[PageFormat, ...]:
        """Layouts of the pages; raises ValueError if ``formats`` is invalid."""
        return _formats(tuple(self.formats))

    def result(self) -> torch.Tensor:
        """Return an uninitialized tensor for the result."""
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
