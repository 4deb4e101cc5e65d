"""The ledger keeps every token once, in order, whatever comes in; carried out on token numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm import InputError, KVPolicy
from oscar_mm.cache.layout import BLOCK_TOKENS, PAGE_TOKENS
from oscar_mm.cache.ledger import Ledger
from oscar_mm.cache.store import PageStore
from oscar_mm.modality import PADDING, Modality
from tests.cache.numbers import Numbers, check_slots

MODALITIES = st.sampled_from([PADDING, *Modality])
POLICIES = st.builds(
    KVPolicy,
    bits=st.sampled_from([2, 16, {"text": 4}, {"image": 16, "video": 4}]),
    window=st.sampled_from([0, 1, 32, 100, 300]),
    sinks=st.sampled_from([0, 1, 4, 150]),
)


@st.composite
def chunks(draw: st.DrawFn, batch: int) -> np.ndarray:
    """(batch, tokens): runs of modalities, cut to one length."""
    tokens = draw(st.sampled_from([1, 2, 31, 32, 128, 150, 300]))
    rows = []
    for _ in range(batch):
        runs = draw(st.lists(st.tuples(MODALITIES, st.integers(1, 200)), min_size=1, max_size=5))
        row = [modality for modality, count in runs for _ in range(count)]
        rows.append((row * tokens)[:tokens])
    return np.array(rows)


@settings(max_examples=120, deadline=None)
@given(st.data(), POLICIES, st.integers(1, 3))
def test_any_chunks(data: st.DataObject, policy: KVPolicy, batch: int) -> None:
    numbers = Numbers(policy)
    for _ in range(data.draw(st.integers(1, 6))):
        numbers.advance(data.draw(chunks(batch)))
        numbers.check()
        numbers.check_window_and_sinks()
        check_slots(numbers.contents.store, [numbers.ledger])


@settings(max_examples=150, deadline=None)
@given(st.data(), POLICIES)
def test_any_operations_on_caches_of_one_store(data: st.DataObject, policy: KVPolicy) -> None:
    first = Numbers(policy)
    store, caches = first.contents.store, [first]
    first.advance(data.draw(chunks(2)))
    del first
    operations = ["advance", "advance", "advance", "forget", "forget", "crop", "select", "fork"]
    for _ in range(data.draw(st.integers(1, 10))):
        cache = caches[data.draw(st.integers(0, len(caches) - 1))]
        batch, length = len(cache.rows), cache.ledger.length
        operation = data.draw(st.sampled_from([*operations, "foretell", "clear", "drop"]))
        if operation == "advance":
            cache.advance(data.draw(chunks(batch or 1)))
        elif operation == "foretell" and batch:
            tokens = np.array(data.draw(st.lists(MODALITIES, min_size=batch, max_size=batch)))
            told = cache.foretell(tokens[:, None])
            check_all(store, caches)  # Nobody sees what was written there.
            if data.draw(st.booleans()):
                cache.advance(tokens[:, None])
                step = cache.ledger.last
                assert told is None or np.array_equal(step.writes, told)
                assert told is None or not (step.packs or step.copies)
        elif operation == "forget" and batch:
            start = data.draw(st.integers(0, length))
            stop = data.draw(st.integers(start, min(length, start + 300)))
            cache.forget(data.draw(st.integers(0, batch - 1)), start, stop)
        elif operation == "crop":
            cache.crop(data.draw(st.integers(0, min(length, 400))))
        elif operation == "select" and batch:
            row = st.integers(0, batch - 1)
            cache.select(data.draw(st.lists(row, min_size=1, max_size=4)))
        elif operation == "fork":
            caches.append(cache.fork())
        elif operation == "clear":
            cache.select([])
        elif operation == "drop" and len(caches) > 1:
            caches.remove(cache)
        del cache  # So that a dropped one is gone.
        check_all(store, caches)


def check_all(store: PageStore, caches: list[Numbers]) -> None:
    for cache in caches:
        cache.check()
    check_slots(store, [cache.ledger for cache in caches])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=150, max_size=400), st.sampled_from([0, 32]))
def test_decoding_token_by_token(sizes: list[int], window: int) -> None:
    numbers = Numbers(KVPolicy(window=window))
    for size in sizes:
        numbers.advance(np.zeros((1, size), dtype=int))
    numbers.check()
    numbers.check_window_and_sinks()
    stream = numbers.ledger.sequences[0].streams[0]
    assert len(stream.pages) == (sum(sizes) - 4 - window) // PAGE_TOKENS
    # Blocks of packed pages are used again.
    most = PAGE_TOKENS + window + 3
    assert numbers.ledger.allocators[16].capacity <= 2 + -(-most // BLOCK_TOKENS) + 4


def test_copy_on_write_between_forks() -> None:
    numbers = Numbers(KVPolicy(window=0, sinks=0))
    numbers.advance(np.zeros((1, 140), dtype=int))
    numbers.select([0, 0, 0])
    assert numbers.ledger.allocators[16].used == 1
    numbers.advance(np.zeros((3, 1), dtype=int))
    numbers.check()
    assert numbers.ledger.allocators[16].used == 3
    assert numbers.ledger.allocators[2].used == 1


def test_past_of_a_step_is_the_state_before_it() -> None:
    ledger = Ledger(PageStore(KVPolicy(window=0, sinks=0)))
    ledger.advance(np.zeros((1, 100), dtype=np.int8))
    step = ledger.advance(np.zeros((1, 60), dtype=np.int8))
    [past], [now] = step.past, ledger.sequences
    assert (past.streams[0].tail, past.streams[0].pages) == (100, ())
    assert (now.streams[0].tail, len(now.streams[0].pages)) == (32, 1)
    assert past.stored == 100 and now.stored == 160


def test_forget_frees_pages_at_once_and_splits_one() -> None:
    numbers = Numbers(KVPolicy(window=0, sinks=0))
    numbers.advance(np.repeat([[0, 1, 0, 1]], [100, 700, 100, 300], axis=1))
    slots, stream = numbers.ledger.allocators, numbers.ledger.sequences[0].streams[1]
    assert (slots[2].used, stream.tail) == (8, 104)
    numbers.forget(0, 100, 800)
    # Of the 700 tokens five pages and 60 tokens of a sixth.
    assert slots[2].used == 3 and stream.starts == (60, 0)
    numbers.forget(0, 950, 960)
    assert slots[2].used == 3 and stream.pages[0] == stream.pages[1]
    assert list(zip(stream.starts, stream.stops, strict=True)) == [(60, 110), (120, 128), (0, 128)]
    assert slots[2].owners(stream.pages[0]) == 2
    numbers.check()
    numbers.forget(0, 0, 1200)
    numbers.check()
    assert slots[2].used == slots[16].used == numbers.ledger.sequences[0].stored == 0
    numbers.advance(np.ones((1, 300), dtype=int))
    numbers.check()


def test_tokens_of_a_tail_move_up_and_blocks_are_freed() -> None:
    numbers = Numbers(KVPolicy(bits=16, window=0, sinks=0))
    numbers.advance(np.zeros((1, 1000), dtype=int))
    twin = numbers.fork()
    twin.forget(0, 40, 700)
    slots = numbers.ledger.allocators[16]
    # Only the first block is still common: the others were copied before tokens moved into them.
    assert slots.used == 32 + 10
    numbers.forget(0, 40, 700)
    assert slots.used == 11 + 10
    twin.ledger.clear()
    assert slots.used == 11
    numbers.check()


def test_decoding_after_a_long_gap_finds_the_window() -> None:
    """A window of tokens from before what was forgotten, or from before padding."""
    numbers = Numbers(KVPolicy(window=100, sinks=0))
    numbers.advance(np.zeros((1, 200), dtype=int))
    numbers.advance(np.ones((1, 3000), dtype=int))
    numbers.forget(0, 200, 3200)
    numbers.advance(np.zeros((1, 30), dtype=int))
    numbers.check()
    # 230 text tokens, of which the last 100 are recent.
    assert numbers.ledger.sequences[0].streams[0].packed == 128
    assert (numbers.ledger.sequences[0].recent(100) == 0).sum() == 100


def test_clear_gives_back_all_slots() -> None:
    numbers = Numbers(KVPolicy())
    numbers.advance(np.random.default_rng(0).integers(-1, 4, (3, 900)))
    numbers.ledger.clear()
    assert numbers.ledger.length == 0
    assert all(slots.used == 0 for slots in numbers.ledger.allocators.values())


def test_impossible_requests() -> None:
    ledger = Ledger(PageStore(KVPolicy()))
    ledger.advance(np.zeros((2, 5), dtype=np.int8))
    for count in (6, -1):
        with pytest.raises(ValueError, match=f"{count} tokens from a cache of 5"):
            ledger.crop(count)
    for rows in ([2], [-1], [0, 5]):
        with pytest.raises(IndexError, match="2 sequences"):
            ledger.select(rows)
    for row, start, stop in ((2, 0, 1), (-1, 0, 1), (0, 3, 2), (0, -1, 2), (0, 0, 6)):
        with pytest.raises(InputError, match=r"forget: (row|tokens) .* of a cache of"):
            ledger.forget(row, start, stop)
    assert len(ledger.sequences) == 2
    with pytest.raises(ValueError):
        ledger.advance(np.zeros((3, 5), dtype=np.int8))


@pytest.mark.parametrize("window", [0, 1, 32, 100])
@pytest.mark.parametrize("bits", [2, {"text": 16, "image": 2}])
def test_single_tokens_are_planned_as_many_are(bits, window: int, monkeypatch) -> None:
    """The short way of a decode step against the long one, rows with forks and padding included."""
    policy = KVPolicy(bits=bits, window=window, sinks=3)
    ledgers = [Ledger(PageStore(policy)) for _ in range(2)]
    generator = np.random.default_rng(window)
    prompt = generator.choice([-1, 0, 0, 1], (3, 150)).astype(np.int8)
    short, long = ledgers
    for ledger in ledgers:
        ledger.advance(prompt)
    forks = [ledger.fork() for ledger in ledgers]
    taken = Ledger._take_token
    quick = foretold = 0
    for _ in range(300):
        token = generator.choice([-1, 0, 0, 0, 0, 1], (3, 1)).astype(np.int8)
        monkeypatch.setattr(Ledger, "_take_token", taken)
        told, capacity = short.foretold(token), short.store.allocators[16].capacity
        mine = short.advance(token)
        if told is None:
            grown = short.store.allocators[16].capacity > capacity
            assert grown or mine.packs or mine.copies or mine.writes is None
        else:
            foretold += 1
            assert np.array_equal(told, mine.writes) and not (mine.packs or mine.copies)
        monkeypatch.setattr(Ledger, "_take_token", lambda *_: False)
        theirs = long.advance(token)
        quick += not (mine.packs or mine.copies)
        assert mine.copies == theirs.copies and mine.past == theirs.past
        assert [job.pages for job in mine.packs] == [job.pages for job in theirs.packs]
        assert (mine.writes is None) == (theirs.writes is None)
        if mine.writes is not None:
            assert np.array_equal(mine.writes, theirs.writes)
        assert short.sequences == long.sequences
    assert quick > 200 and foretold > 200
    assert short.store.allocators[16].used == long.store.allocators[16].used
    assert len(forks) == 2
