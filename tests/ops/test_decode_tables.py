"""Tables of a decode step: every token once, work shared out evenly, segments' parts in order."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm.cache.kv_manager import KVCacheManager
from oscar_mm.cache.page_store import PageStore
from oscar_mm.ops.decode_tables import (
    COLUMNS,
    FEWEST_ITEMS,
    FIELDS,
    MANY_SEGMENTS,
    ROUND_ITEMS,
    SEGMENT_ITEMS,
    SHORT_ITEMS,
    WARP_SEGMENT_ITEMS,
    WORKING_WARPS,
    StoredTokens,
    assign,
    fill_pinned_cache,
    tables_of,
    upload,
)
from oscar_mm.policy import Bits, KVPolicy

COUNTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 300)), min_size=1, max_size=5)


@given(COUNTS, st.integers(1, 8), st.integers(1, 40), st.integers(1, 140))
@settings(max_examples=150, deadline=None)
def test_line_is_shared_out(
    counts: list[tuple[int, int]], kv_heads: int, columns: int, workers: int
) -> None:
    table = assign(tuple(counts), kv_heads, columns, workers)
    assert table.shape == (workers, FIELDS)
    tiles = -(-columns // COLUMNS)
    items = np.repeat([1 + sum(count) for count in counts], kv_heads * tiles)
    by_warps = len(items) >= MANY_SEGMENTS * workers and items.mean() <= SHORT_ITEMS
    gap = WARP_SEGMENT_ITEMS if by_warps else SEGMENT_ITEMS
    lengths = items + (gap if len(items) > workers else 0)
    starts = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    working = table[table[:, 0] < table[:, 1]]
    # The parts follow each other and cover the line, but for places behind a segment's items.
    assert working[0, 0] == 0 and working[-1, 1] == total
    ends = (starts + items)[working[1:, 7] - 1]
    gaps = working[1:, 0] - working[:-1, 1]
    assert ((gaps == 0) | (gaps > 0) & (working[:-1, 1] >= ends)).all()
    assert (working[:, 2] == total).all()
    for (
        begin,
        end,
        _,
        used,
        sequence,
        head,
        tile,
        segment,
        start,
        in_16_bit,
        pages,
        first,
        parts,
    ) in working[:, :13].tolist():
        assert segment == (sequence * kv_heads + head) * tiles + tile
        assert start == starts[segment] <= begin < start + items[segment]
        assert (in_16_bit, pages) == counts[sequence]
        if parts:
            assert end <= start + lengths[segment]
            group = working[(working[:, 7] == segment)]
            assert len(group) == parts and group[0, 11] == first
            assert (group[:, 11] == first).all()
        else:
            assert used == min(workers, total)
    if len(lengths) <= workers:
        longest = int((working[:, 1] - working[:, 0]).max())

        def fit(items: int) -> bool:
            return (-(-lengths // items)).sum() <= workers

        # With shorter ones the segments would need more thread blocks than there are.
        assert longest <= ROUND_ITEMS or not fit(longest - 1)
        assert longest <= FEWEST_ITEMS or (-(-lengths // FEWEST_ITEMS)).sum() > 0.75 * workers
    else:
        spread = np.diff([0, *working[:, 1]])
        assert spread.max() - spread.min() <= 1


def test_if_nearly_all_thread_blocks_have_work_each_has_a_round() -> None:
    """A head's 260 items are not divided by eight, which would give every thread block some."""
    tables = [assign(((3, pages),), 4, 4, 132) for pages in (65, 188, 256, 392, 400)]
    assert [(table[:, 1] > 0).sum() // 4 for table in tables] == [9, 24, 22, 33, 32]


def test_more_segments_than_thread_blocks_straddle() -> None:
    table = assign(((0, 3), (1, 5)), 8, 4, 6)
    assert (table[:, 12] == 0).all()
    assert table[-1, 1] == 8 * (4 + 7 + 2 * SEGMENT_ITEMS)


def test_warps_divide_many_short_segments() -> None:
    """Not few ones, nor long ones, which thread blocks read faster."""
    for workers, pages, by_warps in ((5, 40, True), (6, 40, False), (5, 60, False)):
        table = assign(((0, pages), (1, pages)), 8, 4, workers)
        gap = WARP_SEGMENT_ITEMS if by_warps else SEGMENT_ITEMS
        assert (table[:, 13] == gap).all() and (table[:, 14] == by_warps).all()
        assert table[-1, 1] == 8 * (2 * pages + 3 + 2 * gap)


def parts_of_warps(
    table: np.ndarray, counts: list[tuple[int, int]], kv_heads: int
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Items of each (sequence, head) that warps attend to, as they find them from the first warp of
    their thread block (csrc/decode/by_warps.cuh)."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for block, row in enumerate(table[:, FIELDS // 2 :].tolist()):
        each, working, sequence, head, first, longest = row[2:6] + row[11:13]
        for warp in range(block * each, min((block + 1) * each, working)):
            parts = -(-(1 + sum(counts[sequence])) // longest)
            while warp >= first + parts:
                first, head = first + parts, head + 1
                if head == kv_heads:
                    sequence, head = sequence + 1, 0
                parts = -(-(1 + sum(counts[sequence])) // longest)
            items, place = 1 + sum(counts[sequence]), warp - first
            part = items * place // parts, items * (place + 1) // parts
            found.setdefault((sequence, head), []).append(part)
    return found


@pytest.mark.parametrize(("rows", "pages"), [(18, 17), (36, 3), (77, 5), (57, 30)])
def test_each_warp_has_a_part_of_one_segment(rows: int, pages: int) -> None:
    """Rows of unequal lengths, one of them without a past."""
    counts, workers, kv_heads = [(0, 0), *((3, pages + row % 3) for row in range(rows))], 40, 8
    table = assign(tuple(counts), kv_heads, 4, workers)
    found = parts_of_warps(table, counts, kv_heads)
    assert len(found) == len(counts) * kv_heads
    for (sequence, _), parts in found.items():
        begins, ends = zip(*parts, strict=True)
        assert begins == (0, *ends[:-1]) and ends[-1] == 1 + sum(counts[sequence])
    # With shorter parts, the segments would need more warps than there are.
    warps, longest = workers * table[0, FIELDS // 2 + 2], table[0, FIELDS // 2 + 12]
    shorter = sum(-(-(1 + sum(count)) // (longest - 1)) for count in counts) * kv_heads
    assert sum(map(len, found.values())) <= warps < shorter


@pytest.mark.parametrize(
    ("rows", "working"),
    [(20, WORKING_WARPS[0]), (48, 0), (56, WORKING_WARPS[0]), (75, WORKING_WARPS[1]), (81, 0)],
)
def test_warps_straddle_segments_if_many_would_have_none(rows: int, working: int) -> None:
    """40 thread blocks have 480 or 640 working warps.

    20 rows are 160 segments, of which each gets three of 480 warps; 48 rows are 384 segments, of
    which each would get one, so that 96 warps get none.
    """
    table = assign(((3, 17),) * rows, 8, 4, 40)
    assert table[:, 14].all() and (table[:, FIELDS // 2 + 2] == working).all()


def test_rows_without_a_past_are_not_one_thread_blocks_work() -> None:
    """Such as the last of a graph for more rows than decode: 4 of 176 took 17% more time."""
    table = assign((*[(2, 257)] * 172, *[(0, 0)] * 4), 8, 4, 132)
    segments = np.diff([*table[:, 7], 176 * 8])  # that end in the part of each thread block
    items = np.diff([0, *table[:, 1]]) - SEGMENT_ITEMS * segments
    assert segments[-1] > 32 and items[-1] < 0.85 * items[:-1].mean()


@pytest.mark.parametrize("workers", [10, 20])
@pytest.mark.parametrize(
    "fields", [{}, {"key_axis": "token", "token_scaling": None, "center": True}]
)
def test_every_token_is_listed_once(fields: dict[str, object], workers: int) -> None:
    """Also where there are warps enough for half pages."""
    two, four = Bits(2, 2), Bits(4, 2) if fields else Bits(4, 4)
    policy = KVPolicy(bits={"text": four, "image": two}, window=16, sinks=3, **fields)
    kv_manager = KVCacheManager(PageStore(policy))
    generator = np.random.default_rng(0)
    for tokens in (700, 1, 1, 333):
        ids = np.repeat(generator.integers(0, 2, (2, tokens // 7 + 1)), 7, axis=1)[:, :tokens]
        kv_manager.advance(ids.astype(np.int8))
    kv_manager.crop(150)
    for start in (60, 120):
        kv_manager.forget(1, start, start + 30)
    stored = StoredTokens.of([row.entries((two, four)) for row in kv_manager.sequences])
    tables = tables_of(stored, 2, 3, workers, torch.device("cpu"))
    lengths, starts_within = [], False
    for row, sequence in enumerate(kv_manager.sequences):
        in_16_bit, pages = tables.counts[row].tolist()
        recents = tables.recents[row, :in_16_bit].tolist()
        streams = sequence.streams.values()
        assert sorted(recents) == sorted(slot for stream in streams for slot in stream.slots)
        assert len(set(recents)) == len(recents)
        listed = []
        for slot, used in tables.items[row, :pages].tolist():
            start, stop, bits = used >> 8 & 0xFF, used & 0xFF, four if used >> 16 else two
            lengths.append(stop - start)
            starts_within |= start % 64 > 0 and stop % 64 > 0
            listed += [(slot, token, bits) for token in range(start, stop)]
        assert len(listed) + len(recents) == (885, 825)[row]
        assert sorted(listed) == sorted(
            (slot, token, stream.bits)
            for stream in streams
            for slot, start, stop in zip(stream.pages, stream.starts, stream.stops, strict=True)
            for token in range(start, stop)
        )
        # The rest of a row, up to the length of the longest, is nobody's token.
        assert not tables.items[row, pages:].any() and not tables.recents[row, in_16_bit:].any()
    assert starts_within and max(lengths) == (64 if workers == 20 else 128)
    # Work is counted in pages and in tiles of 16 tokens, the last of which need not be full.
    in_items = tuple((-(-tokens // 16), pages) for tokens, pages in tables.counts.tolist())
    assert np.array_equal(tables.assignments.numpy(), assign(in_items, 2, 3, workers))


@pytest.mark.gpu
def test_uploads_behind_a_long_pass_allocate_no_pinned_memory() -> None:
    fill_pinned_cache.cache_clear()  # Tables of earlier tests may still hold some of that memory.
    fill_pinned_cache()
    torch.cuda.synchronize()
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    torch.cuda._sleep(200_000_000)
    ended = torch.cuda.Event()
    ended.record()
    device = torch.device("cuda")
    sent = [upload(np.zeros(size, np.int8), device) for size in (8, 500, 70_000, 500_000) * 8]
    assert not ended.query() and len(sent) == 32
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
