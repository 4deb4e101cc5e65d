"""Tokens stay in 16-bit precision until a page that starts with them takes no more bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm import KVPolicy
from oscar_mm.cache.block_table import min_page_tokens
from oscar_mm.cache.kv_manager import KVCacheManager
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.placement import packed_count
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.policy import PLAIN
from tests.cache.invariants import STREAM
from tests.cache.numbers import Numbers
from tests.cache.test_kv_manager import STREAM_PAGES, TWO, chunks
from tests.pairs import pairs

POLICY = KVPolicy(bits=2, window=32, sinks=4, **STREAM)
LEAST = min_page_tokens(POLICY, TWO)


def text(tokens: int) -> np.ndarray:
    return np.zeros((1, tokens), dtype=int)


def held(numbers: Numbers) -> dict[int, tuple[list, list[int]]]:
    """Return, for each stream, tokens and centers of its pages, and its 16-bit tokens."""
    contents, policy, found = numbers.contents, numbers.kv_manager.policy, {}
    has_centers = policy.center and policy.window >= 4  # Below that, they are of keys at hand.
    for code, stream in numbers.kv_manager.sequences[0].streams.items():
        pages = [
            (
                contents.pages[stream.bits, page][start:stop].tolist(),
                contents.centers.get((stream.bits, page)) if has_centers else None,
            )
            for page, start, stop in zip(stream.pages, stream.starts, stream.stops, strict=True)
        ]
        found[code] = pages, [contents.recent[slot] for slot in stream.slots]
    return found


@settings(max_examples=30, deadline=None)
@given(st.data(), STREAM_PAGES)
def test_it_does_not_matter_how_tokens_come(data: st.DataObject, policy: KVPolicy) -> None:
    """Tokens arrive at once, one by one or in any pieces; also after others were forgotten."""
    caches, forked = [Numbers(policy) for _ in range(3)], list[Numbers]()
    for _ in range(data.draw(st.integers(1, 4))):
        ids = data.draw(chunks(1))
        count = ids.size
        some = data.draw(st.lists(st.integers(0, count), max_size=6))
        for cache, cuts in zip(caches, ([], sorted(some), range(count)), strict=True):
            for piece in np.split(ids, list(cuts), axis=1):
                if piece.size:
                    cache.advance(piece)
        length = caches[0].kv_manager.length
        change = data.draw(st.sampled_from(["", "crop", "forget", "forget"]))
        start = data.draw(st.integers(0, length))
        stop = data.draw(st.integers(start, length))
        first, *others = map(held, caches)
        assert others == [first, first]
        if data.draw(st.booleans()):
            forked += caches
            caches = [cache.fork() for cache in caches]
        for cache in caches:
            if change == "crop":
                cache.crop(stop - start)
            elif change == "forget":
                cache.forget(0, start, stop)
            cache.check()
    for cache in forked:
        cache.check()


def test_the_rule() -> None:
    """Computed by hand: free places of the last page, whole pages, and the start of a last page."""
    expected = {0: 0, 1: 1, 5: 5, 5 + LEAST - 1: 5, 5 + LEAST: 5 + LEAST, 132: 132, 133: 133}
    expected |= {133 + LEAST - 1: 133, 133 + LEAST: 133 + LEAST, 133 + 2 * PAGE_TOKENS - 1: 388}
    waiting = np.array(list(expected))
    assert packed_count(POLICY, TWO, waiting, 5).tolist() == list(expected.values())
    assert [packed_count(POLICY, TWO, int(count), 5) for count in waiting] == [*expected.values()]


@pytest.mark.parametrize(
    ("bits", "head_dim", "groups"), pairs((2, (3, 2), (4, 2), 4), (64, 128), (32, 64, 128))
)
def test_a_page_that_begins_takes_no_more_than_its_tokens(bits, head_dim: int, groups: int) -> None:
    """With heads of 64 channels, one token less would take less than the page."""
    for center in (False, True):
        how = STREAM | {"center": center, "key_group": groups, "value_group": groups}
        policy = KVPolicy(bits=bits, **how)
        page = PageFormat.of(policy, policy.bits.text, 2, head_dim).page_bytes
        least, token = min_page_tokens(policy, policy.bits.text), 2 * 2 * 2 * head_dim
        assert page <= least * token
        assert head_dim > 64 or page > (least - 1) * token


def test_a_page_begins_with_the_tokens_that_waited() -> None:
    """The slots of these tokens become free, and the next token takes one of them."""
    numbers = Numbers(POLICY)
    numbers.advance(text(4 + 32 + PAGE_TOKENS + LEAST - 1))
    slots = numbers.kv_manager.allocators
    stream = numbers.kv_manager.sequences[0].streams[0]
    assert (stream.packed, len(stream.slots)) == (PAGE_TOKENS, 32 + LEAST - 1)
    numbers.advance(text(1))
    stream = numbers.kv_manager.sequences[0].streams[0]
    assert (stream.stops, len(stream.slots)) == ((PAGE_TOKENS, LEAST), 32)
    assert slots[PLAIN].used == 4 + 32 + 1
    for _ in range(PAGE_TOKENS - LEAST):
        numbers.advance(text(1))
        assert slots[PLAIN].used == 4 + 32 + 1
    numbers.check()
    numbers.check_window_and_sinks()


def test_a_fork_while_tokens_wait() -> None:
    """Cache and fork each pack these tokens; the slots of the other do not change."""
    numbers = Numbers(POLICY)
    numbers.advance(text(4 + 32 + PAGE_TOKENS + LEAST - 2))
    twin, slots = numbers.fork(), numbers.kv_manager.allocators
    for one, pages in ((numbers, 2), (twin, 3)):
        for _ in range(2):
            one.advance(text(1))
        assert not one.last.copies
        assert slots[TWO].used == pages
        numbers.check()
        twin.check()


def test_a_crop_among_tokens_that_wait() -> None:
    """Tokens wait again for as many as were dropped; tokens already in a page stay there."""
    numbers = Numbers(POLICY)
    numbers.advance(text(4 + 32 + PAGE_TOKENS + LEAST - 1))
    numbers.crop(10)
    for count in (10, 1):
        assert len(numbers.kv_manager.sequences[0].streams[0].pages) == 1
        for _ in range(count):
            numbers.advance(text(1))
    stream = numbers.kv_manager.sequences[0].streams[0]
    assert stream.stops == (PAGE_TOKENS, LEAST)
    numbers.crop(32 + 5)
    stream = numbers.kv_manager.sequences[0].streams[0]
    assert (stream.stops, list(stream.slots)) == ((PAGE_TOKENS, LEAST - 5), [])
    for _ in range(40):
        numbers.advance(text(1))
        numbers.check()
    assert numbers.kv_manager.sequences[0].streams[0].stops == (PAGE_TOKENS, LEAST - 5 + 40 - 32)


def test_tokens_that_were_forgotten_leave_places_to_those_that_wait() -> None:
    """Waiting tokens take the free places when the next one leaves the window."""
    found = []
    for together in (False, True):
        numbers = Numbers(POLICY)
        numbers.advance(text(4 + 32 + PAGE_TOKENS + LEAST - 1))
        numbers.forget(0, 4 + 100, 4 + PAGE_TOKENS + 3)
        assert numbers.kv_manager.sequences[0].streams[0].stops == (100,)
        for piece in (30, 5):
            for count in [piece] if together else [1] * piece:
                numbers.advance(np.full((1, count), 1))
            numbers.advance(text(1))
        numbers.check()
        found.append(held(numbers))
    assert found[0] == found[1]
    [(page, _), *_], _ = found[0][0]
    assert len(page) == PAGE_TOKENS


@pytest.mark.parametrize(("tokens", "least"), [(300, 2.8), (1000, 4.1), (8192, 5.4)])
def test_any_mixture_of_text_and_pictures_saves(tokens: int, least: float) -> None:
    """With the default policy and heads of 128 channels, partly filled last pages cost nothing."""
    policy = KVPolicy.preset("standard")
    bits, token = policy.bits.text, 2 * 2 * 8 * 128
    page = PageFormat.of(policy, bits, 8, 128).page_bytes
    for text_tokens in range(0, tokens, tokens // 50):
        for before in (0, text_tokens // 2, text_tokens):
            counts = [before, tokens - text_tokens, text_tokens - before]
            kv_manager = KVCacheManager(PageStore(policy))
            kv_manager.advance(np.repeat([[0, 1, 0]], counts, axis=1).astype(np.int8))
            pages, recent = (kv_manager.allocators[kind].used for kind in (bits, PLAIN))
            assert tokens * token >= least * (
                pages * page + recent * token + kv_manager.table_bytes
            )
