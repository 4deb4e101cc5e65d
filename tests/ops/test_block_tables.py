"""block_tables: every new token is stored once, every past one attended to once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm.kernels.compile import csrc_folder
from oscar_mm.ops.block_tables import (
    BlockTables,
    BlockTablesKernel,
    Params,
    block_tables_by_numpy,
    checked_tables,
    row_tiles,
)
from oscar_mm.ops.decode_tables import (
    FEWEST_ITEMS,
    FIELDS,
    MANY_SEGMENTS,
    ROUND_ITEMS,
    SEGMENT_ITEMS,
    SHORT_ITEMS,
    WARP_SEGMENT_ITEMS,
    WORKING_WARPS,
    assign,
)
from oscar_mm.ops.rings import MAX_ROWS
from oscar_mm.ops.store_torch import CENTER_TOKENS, HEAD, NOTHING, TILE
from tests.compiled import architectures, compile_once, same_struct

CPU = torch.device("cpu")
PASTS = st.lists(st.integers(0, 700), min_size=1, max_size=6)


def places_of(tables: BlockTables) -> dict[int, int]:
    """Slot of each token that a job stores."""
    found: dict[int, int] = {}
    in_ring = {place: token for _, token, place in tables.writes.tolist()}
    for page, tile, row, nothing, *sources in tables.jobs.tolist():
        assert row == nothing == 0
        for at, source in enumerate(sources):
            if source != NOTHING:
                token = in_ring[~source] if tables.staged else source
                assert page >= 0 and token not in found
                found[token] = page * 128 + tile * TILE + at
    return found


def place(tables: BlockTables, position: int) -> int:
    """The place of a request's token in its ring."""
    sinks, window, spare = tables.shape
    return position if position < sinks else sinks + position % (window + spare)


@given(PASTS, st.data())
@settings(max_examples=60, deadline=None)
def test_mixed_requests(pasts: list[int], data: st.DataObject) -> None:
    news = [data.draw(st.integers(1, 300)) for _ in pasts]
    decodes = data.draw(st.integers(0, len(pasts) - 1))
    news[:decodes] = [data.draw(st.integers(1, 8))] * decodes
    tables = checked_tables(pasts, news, decodes, CPU)
    block_tables_by_numpy(tables)
    stored = {at: slot for at, slot in enumerate(tables.slots.tolist()) if slot >= 0}
    assert places_of(tables) == stored
    starts, blocks = tables.starts.tolist(), tables.blocks.tolist()
    begun = {page: line for page, *line in tables.begins.tolist() if page >= 0}
    assert len(begun) == sum(page >= 0 for page in tables.begins[:, 0].tolist())
    wanted = set()
    for row, (past, new, start) in enumerate(zip(pasts, news, starts, strict=False)):
        for number in range(-(-past // 128), -(-(past + new) // 128)):
            token = start + number * 128 - past
            if tables.slots[token] < 0:
                continue
            page = blocks[row][number]
            wanted.add(page)
            _, count, other, *sources = begun[page]
            own = sources[:count]
            assert sources[count:] == [NOTHING] * (CENTER_TOKENS - count)
            if count:
                # The first tokens of the page, or the last of the request, of this request alone.
                assert own == list(range(own[0], own[0] + count)) and start <= own[0] <= token
                assert own[-1] < start + new and (count == CENTER_TOKENS or number == 0)
                assert own[0] == token or own[-1] == start + new - 1
            else:
                assert other == blocks[row][number - 1] and new < CENTER_TOKENS
    assert set(begun) == wanted
    counts = []
    for row, past in enumerate(pasts[:decodes]):
        exact, pages = tables.counts[row].tolist()
        counts.append((-(-exact // TILE), pages))
        ring, first = tables.tails[row].tolist()
        kept = {*range(max(first, past - 32), past), *(range(min(4, past)) if not first else ())}
        kept = kept if ring >= 0 else set()
        places = [ring * tables.shape.entries + place(tables, x) for x in kept]
        assert sorted(tables.recents[row, :exact].tolist()) == sorted(places)
        packed = set[int]()
        for number, (page, use) in enumerate(tables.items[row, :pages].tolist()):
            assert page == blocks[row][number]
            packed |= {number * 128 + x for x in range(use >> 8, use & 255)}
        assert packed == set(range(past)) - kept
    for row, (past, new, start) in enumerate(zip(pasts, news, starts, strict=False)):
        ring = int(tables.tails[row, 0])
        for token in range(start, start + new):
            position = past + token - start
            is_kept = position < 4 or token >= start + new - tables.shape.size
            found = ring * tables.shape.entries + place(tables, position)
            is_kept &= ring >= 0 and token in stored
            assert tables.writes[token].tolist() == [0, token, found if is_kept else -1]
    if decodes:
        shares = assign(tuple(counts), tables.kv_heads, tables.columns, len(tables.assignments))
        assert (tables.assignments.numpy() == shares).all()
    else:
        assert not tables.assignments.any()


@given(PASTS, st.integers(1, 16))
@settings(max_examples=40, deadline=None)
def test_requests_that_all_decode(pasts: list[int], tokens: int) -> None:
    tables = checked_tables(pasts, [tokens] * len(pasts), len(pasts), CPU)
    assert len(tables.jobs) == len(pasts) * row_tiles(tokens) and len(tables.begins) == len(pasts)
    block_tables_by_numpy(tables)
    stored = {at: slot for at, slot in enumerate(tables.slots.tolist()) if slot >= 0}
    assert places_of(tables) == stored


@pytest.mark.parametrize("arch", architectures())
def test_the_kernel_compiles(arch: str) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "block_tables/block_tables.cu").read_text() + (
        f"{same_struct(Params)}"
        f"static_assert(MAX_ROWS == {MAX_ROWS} && FIELDS == {FIELDS});\n"
        f"static_assert(HEAD == {HEAD} && CENTER_TOKENS == {CENTER_TOKENS} && TILE == {TILE});\n"
        f"static_assert(SEGMENT_ITEMS == {SEGMENT_ITEMS} && ROUND_ITEMS == {ROUND_ITEMS});\n"
        f"static_assert(MANY_SEGMENTS == {MANY_SEGMENTS} && SHORT_ITEMS == {SHORT_ITEMS});\n"
        f"static_assert(WARP_SEGMENT_ITEMS == {WARP_SEGMENT_ITEMS});\n"
        f"static_assert(WORKING_WARPS[0] == {WORKING_WARPS[0]});\n"
        f"static_assert(WORKING_WARPS[1] == {WORKING_WARPS[1]});\n"
        f"static_assert(FEWEST_ITEMS == {FEWEST_ITEMS} && NOTHING == {NOTHING + 1} - 1);\n"
    )
    report = compile_once("block_tables/block_tables.cu", text, arch, {})["block_tables"]
    assert report.spill_stores == report.spill_loads == 0


@pytest.mark.gpu
def test_the_kernel_writes_the_same() -> None:
    verdict = BlockTablesKernel.checked.check(None, torch.device("cuda:0"))
    assert verdict.agrees, verdict
