"""The KV cache manager stores every token once, in order, whatever arrives; tested on token
numbers."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm import InputError, KVPolicy
from oscar_mm.cache.block_table import SequenceTable, SlotPool, SlotSet, min_page_tokens
from oscar_mm.cache.kv_manager import KVCacheManager
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.placement import TokenPlacer
from oscar_mm.cache.step_plan import AttentionShape, StepPlan
from oscar_mm.modality import PADDING, Modality
from oscar_mm.ops.decode_tables import arrays_of
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import PLAIN, Bits
from tests.cache.invariants import STREAM
from tests.cache.numbers import Numbers, check_slots
from tests.pairs import pairs

MODALITIES = st.sampled_from([PADDING, *Modality])
WHOLE = {"key_axis": "channel", "key_group": 128, "token_scaling": "per_head", "center": False}
TWO = Bits(2, 2)
RECENT = {
    "window": st.sampled_from([0, 1, 32, 100, 300]),
    "sinks": st.sampled_from([0, 1, 4, 150]),
}
WHOLE_PAGES = st.builds(
    KVPolicy,
    bits=st.sampled_from([2, 16, {"text": 4}, {"image": 16, "video": 4}]),
    key_axis=st.just("channel"),
    key_group=st.just(128),
    center=st.just(False),
    **RECENT,
)
STREAM_PAGES = st.builds(
    KVPolicy,
    bits=st.sampled_from([2, (3, 2), {"text": (4, 2)}, {"image": 16, "video": 4}]),
    key_axis=st.just("token"),
    token_scaling=st.none(),
    center=st.booleans(),
    **RECENT,
)
POLICIES = WHOLE_PAGES | STREAM_PAGES


@st.composite
def chunks(draw: st.DrawFn, batch: int) -> np.ndarray:
    """Return (batch, tokens) ids with runs of modalities, cut to one length."""
    tokens = draw(st.sampled_from([1, 2, 31, 32, 128, 150, 300]))
    rows = []
    for _ in range(batch):
        runs = draw(st.lists(st.tuples(MODALITIES, st.integers(1, 200)), min_size=1, max_size=5))
        row = [modality for modality, count in runs for _ in range(count)]
        rows.append((row * tokens)[:tokens])
    return np.array(rows)


@settings(max_examples=60, deadline=None)
@given(st.data(), POLICIES, st.integers(1, 3))
def test_any_chunks(data: st.DataObject, policy: KVPolicy, batch: int) -> None:
    numbers = Numbers(policy)
    for _ in range(data.draw(st.integers(1, 6))):
        numbers.advance(data.draw(chunks(batch)))
        numbers.check()
        numbers.check_window_and_sinks()
        check_slots(numbers.contents.store, [numbers.kv_manager])


@settings(max_examples=80, deadline=None)
@given(st.data(), POLICIES)
def test_any_operations_on_caches_of_one_store(data: st.DataObject, policy: KVPolicy) -> None:
    first = Numbers(policy)
    store, caches = first.contents.store, [first]
    first.advance(data.draw(chunks(2)))
    del first
    operations = ["advance", "advance", "advance", "forget", "forget", "crop", "select", "fork"]
    for _ in range(data.draw(st.integers(1, 10))):
        cache = caches[data.draw(st.integers(0, len(caches) - 1))]
        batch, length = len(cache.rows), cache.kv_manager.length
        operation = data.draw(st.sampled_from([*operations, "plan_ahead", "clear", "drop"]))
        if operation == "advance":
            cache.advance(data.draw(chunks(batch or 1)))
        elif operation == "plan_ahead" and batch:
            tokens = np.array(data.draw(st.lists(MODALITIES, min_size=batch, max_size=batch)))
            told = cache.plan_ahead(tokens[:, None])
            check_all(store, caches)  # Nobody sees what was written there.
            if data.draw(st.booleans()):
                ended = data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
                cache.advance(np.where(ended, PADDING, tokens)[:, None])
                assert cache.last.planned is told or all(ended)
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


def is_same(step: StepPlan, other: StepPlan, slots: bool = True) -> bool:
    """Whether two step plans are equal: the same tokens and, with ``slots``, the same slots."""
    ours, theirs = (
        [
            (
                *(x.row, x.bits, len(x.pages), x.first, len(x.source)),
                *(len(source) for source in x.begins.values()),
                (x.pages, x.source.tolist(), x.before) if slots else None,
                [(page, y.tolist()) for page, y in x.begins.items()] if slots else None,
            )
            for x in some.all_jobs
        ]
        for some in (step, other)
    )
    reals = [None if x.real is None else [row.tolist() for row in x.real] for x in (step, other)]
    nothing = np.zeros((3, 0))
    written = [
        (nothing if x.writes is None else x.writes)[: 3 if slots else 2] for x in (step, other)
    ]
    copies = [x.copies if slots else len(x.copies) for x in (step, other)]
    # The codes of a row before the step may already have the new token.
    past = [
        [SequenceTable(streams=x.streams, stored=x.stored) for x in y.past] for y in (step, other)
    ]
    return (
        (ours, copies[0]) == (theirs, copies[1])
        and np.array_equal(*written)
        and reals[0] == reals[1]
        and are_same(*past, slots)
    )


def are_same(ours: list[SequenceTable], theirs: list[SequenceTable], slots: bool) -> bool:
    """Whether sequences are equal: same tokens and, with ``slots``, in the same slots."""
    if slots:  # The codes of a snapshot may have grown since.
        found = [
            [(row.codes[: row.end], *row.fields[1:]) for row in rows] for rows in (ours, theirs)
        ]
        return found[0] == found[1]
    found = [
        [
            (
                *(row.codes, row.stored, len(row.spare)),
                *((code, x.starts, x.stops, len(x.slots)) for code, x in row.streams.items()),
            )
            for row in rows
        ]
        for rows in (ours, theirs)
    ]
    return found[0] == found[1]


def check_all(store: PageStore, caches: list[Numbers]) -> None:
    for cache in caches:
        cache.check()
    check_slots(store, [cache.kv_manager for cache in caches])


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=150, max_size=400),
    st.sampled_from([0, 32]),
    st.booleans(),
)
def test_decoding_token_by_token(sizes: list[int], window: int, by_token: bool) -> None:
    policy = KVPolicy(window=window, **(STREAM if by_token else WHOLE))
    numbers = Numbers(policy)
    for size in sizes:
        numbers.advance(np.zeros((1, size), dtype=int))
    numbers.check()
    numbers.check_window_and_sinks()
    stream = numbers.kv_manager.sequences[0].streams[0]
    left = sum(sizes) - 4 - window
    least = min_page_tokens(policy, TWO) if by_token else PAGE_TOKENS
    assert len(stream.pages) == left // PAGE_TOKENS + (left % PAGE_TOKENS >= least)
    # Slots of packed tokens are used again.
    most = window + 4 + least + 3
    assert numbers.kv_manager.allocators[PLAIN].capacity <= most + most // 4 + 4


def test_a_decode_step_of_stream_pages_seldom_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step allocates while the page has free places: the token that leaves the window frees its
    slot. Each token that waits for a page takes another slot; several are allocated at once."""
    numbers = Numbers(KVPolicy(**STREAM))
    numbers.advance(np.zeros((2, 300), dtype=int))
    calls, allocate = list[int](), SlotPool.allocate

    def noted(slots: SlotPool, count: int, **options: bool) -> list[int]:
        calls.extend([count] * (count > 0))
        return allocate(slots, count, **options)

    monkeypatch.setattr(SlotPool, "allocate", noted)
    allocated = []
    for _ in range(300):
        numbers.advance(np.zeros((2, 1), dtype=int))
        allocated.append(len(calls))
        calls.clear()
    numbers.check()
    # Two rows; the first step has no spare slots yet, and tokens wait for two pages.
    assert allocated[0] >= 2 and sum(map(bool, allocated)) <= 12


def test_centers_do_not_depend_on_how_tokens_come() -> None:
    """At once, in chunks or one by one, tokens take the same places of pages, and centers are the
    means of the same tokens."""
    policy = KVPolicy(bits={"text": (3, 2), "image": 2}, sinks=3, window=20, **STREAM)
    generator = np.random.default_rng(0)
    ids = np.repeat([[0, 1, 0, 1, 0]], [90, 217, 60, 150, 340], axis=1)
    found = []
    for most in (ids.size, 100, 1):
        numbers, start = Numbers(policy), 0
        while start < ids.size:
            stop = start + int(generator.integers(1, most + 1))
            numbers.advance(ids[:, start:stop])
            start = stop
        numbers.check()
        contents, streams = numbers.contents, numbers.kv_manager.sequences[0].streams
        found.append(
            {
                code: [
                    (stop, contents.centers[stream.bits, page])
                    for page, stop in zip(stream.pages, stream.stops, strict=True)
                ]
                for code, stream in streams.items()
            }
        )
    assert found[0] == found[1] == found[2]
    centers = [center for _, center in found[0][0]]
    assert len(centers) == 4 and all(1 <= len(center) <= 21 for center in centers)


@pytest.mark.parametrize("how", [{}, {"key_axis": "token", "token_scaling": None, "center": True}])
def test_copy_on_write_between_forks(how: dict) -> None:
    numbers = Numbers(KVPolicy(window=0, sinks=0, **how))
    numbers.advance(np.zeros((1, 160 if how else 140), dtype=int))
    numbers.select([0, 0, 0])
    slots = numbers.kv_manager.allocators
    before = slots[PLAIN].used, slots[TWO].used
    assert before == ((0, 2) if how else (12, 1))
    numbers.advance(np.zeros((3, 1), dtype=int))
    numbers.check()
    # Tokens in 16-bit precision have slots of their own, some of them to spare; of a page that is
    # not full each row has a copy then.
    assert (slots[PLAIN].used, slots[TWO].used) == ((0, 4) if how else (12 + 3 * 9, 1))
    [step] = [numbers.last]
    assert len(step.copies) == (2 if how else 0)


def test_past_of_a_step_is_the_state_before_it() -> None:
    kv_manager = KVCacheManager(PageStore(KVPolicy(window=0, sinks=0, **WHOLE)))
    kv_manager.advance(np.zeros((1, 100), dtype=np.int8))
    step = kv_manager.advance(np.zeros((1, 60), dtype=np.int8))
    [past], [now] = step.past, kv_manager.sequences
    assert (len(past.streams[0].slots), past.streams[0].pages) == (100, ())
    assert (len(now.streams[0].slots), len(now.streams[0].pages)) == (32, 1)
    assert past.stored == 100 and now.stored == 160


def test_forget_frees_pages_at_once_and_splits_one() -> None:
    numbers = Numbers(KVPolicy(window=0, sinks=0, **WHOLE))
    numbers.advance(np.repeat([[0, 1, 0, 1]], [100, 700, 100, 300], axis=1))
    slots, stream = numbers.kv_manager.allocators, numbers.kv_manager.sequences[0].streams[1]
    assert (slots[TWO].used, len(stream.slots)) == (8, 104)
    numbers.forget(0, 100, 800)
    # Of the 700 tokens five pages and 60 tokens of a sixth.
    assert slots[TWO].used == 3 and stream.starts == (60, 0)
    numbers.forget(0, 950, 960)
    assert slots[TWO].used == 3 and stream.pages[0] == stream.pages[1]
    assert list(zip(stream.starts, stream.stops, strict=True)) == [(60, 110), (120, 128), (0, 128)]
    assert slots[TWO].owners(stream.pages[0]) == 2
    numbers.check()
    numbers.forget(0, 0, 1200)
    numbers.check()
    assert slots[TWO].used == slots[PLAIN].used == numbers.kv_manager.sequences[0].stored == 0
    numbers.advance(np.ones((1, 300), dtype=int))
    numbers.check()


def test_free_places_of_a_page_are_filled_again_after_a_crop() -> None:
    numbers = Numbers(KVPolicy(window=0, sinks=0, **STREAM))
    numbers.advance(np.zeros((1, 200), dtype=int))
    streams = numbers.kv_manager.sequences[0].streams
    stream, pages = streams[0], streams[0].pages
    numbers.crop(150)
    assert (stream.pages, stream.stops) == (pages[:1], (50,))
    numbers.advance(np.zeros((1, 70), dtype=int))
    numbers.check()
    stream = streams[0]
    assert (stream.pages, stream.stops) == (pages[:1], (120,))


def test_forgetting_in_the_middle_of_the_last_page_costs_no_page() -> None:
    numbers = Numbers(KVPolicy(window=0, sinks=0, **STREAM))
    for turn in range(10):
        numbers.advance(np.zeros((1, 60), dtype=int))
        numbers.forget(0, 60 * turn + 20, 60 * turn + 40)
        numbers.check()
        assert not numbers.last.copies
    assert numbers.kv_manager.allocators[TWO].used == -(-600 // PAGE_TOKENS)
    # Another owner is one more.
    twin = numbers.fork()
    numbers.advance(np.zeros((1, 1), dtype=int))
    assert len(numbers.last.copies) == 1
    numbers.check()
    twin.check()


def test_forgotten_tokens_in_16_bit_free_their_slots() -> None:
    numbers = Numbers(KVPolicy.preset("channel", bits=16, window=0, sinks=0))
    numbers.advance(np.zeros((1, 1000), dtype=int))
    twin = numbers.fork()
    twin.forget(0, 40, 700)
    slots = numbers.kv_manager.allocators[PLAIN]
    assert slots.used == 1000
    numbers.forget(0, 40, 700)
    assert slots.used == 340
    numbers.check()
    twin.check()


def test_decoding_after_a_long_gap_finds_the_window() -> None:
    """The window has tokens from before forgotten tokens, or from before padding."""
    numbers = Numbers(KVPolicy.preset("channel", window=100, sinks=0))
    numbers.advance(np.zeros((1, 200), dtype=int))
    numbers.advance(np.ones((1, 3000), dtype=int))
    numbers.forget(0, 200, 3200)
    numbers.advance(np.zeros((1, 30), dtype=int))
    numbers.check()
    # 230 text tokens, of which the last 100 are recent.
    assert numbers.kv_manager.sequences[0].streams[0].packed == 128
    assert numbers.kv_manager.sequences[0].recent(100) == bytes(100)


def test_clear_gives_back_all_slots() -> None:
    numbers = Numbers(KVPolicy.preset("channel"))
    numbers.advance(np.random.default_rng(0).integers(-1, 4, (3, 900)))
    numbers.kv_manager.clear()
    assert numbers.kv_manager.length == 0
    assert all(slots.used == 0 for slots in numbers.kv_manager.allocators.values())


def test_impossible_requests() -> None:
    kv_manager = KVCacheManager(PageStore(KVPolicy.preset("channel")))
    kv_manager.advance(np.zeros((2, 5), dtype=np.int8))
    for count in (6, -1):
        with pytest.raises(ValueError, match=f"{count} tokens from a cache of 5"):
            kv_manager.crop(count)
    for rows in ([2], [-1], [0, 5]):
        with pytest.raises(IndexError, match="2 sequences"):
            kv_manager.select(rows)
    for row, start, stop in ((2, 0, 1), (-1, 0, 1), (0, 3, 2), (0, -1, 2), (0, 0, 6)):
        with pytest.raises(InputError, match=r"forget: (row|tokens) .* out of range"):
            kv_manager.forget(row, start, stop)
    assert len(kv_manager.sequences) == 2
    with pytest.raises(ValueError):
        kv_manager.advance(np.zeros((3, 5), dtype=np.int8))


@pytest.mark.parametrize(
    ("window", "bits", "by_token"),
    pairs((0, 1, 32, 100), (2, {"text": 16, "image": 2}), (False, True)),
)
def test_a_step_is_as_it_was_planned(bits, window: int, by_token: bool) -> None:
    """A step equals its plan, and that of a KV cache manager that plans nothing ahead, with forks,
    modalities and padding; some rows end after planning. Steps that are not planned ahead need
    memory."""
    how = STREAM if by_token else WHOLE
    policy = KVPolicy(bits=bits, window=window, sinks=3, **how)
    kv_manager, other = KVCacheManager(PageStore(policy)), KVCacheManager(PageStore(policy))
    generator = np.random.default_rng(window)
    prompt = generator.choice([-1, 0, 0, 1], (3, 150)).astype(np.int8)
    for one in (kv_manager, other):
        one.advance(prompt)
        for pool in one.allocators.values():
            pool.ensure_free(9)  # For the copies of pages that the forks share.
    forks, taken, copied, slots = [kv_manager.fork(), other.fork()], 0, 0, True
    shared = by_token and any(stream.room for stream in kv_manager.streams())
    for _ in range(300):
        token = generator.choice([-1, 0, 0, 0, 0, 1], (3, 1)).astype(np.int8)
        capacities = [slots.capacity for slots in kv_manager.allocators.values()]
        told = kv_manager.planned(token)
        ended = generator.random((3, 1)) < 0.1
        if told is not None:  # The slots planned for a row that ends stay free.
            planned = kv_manager._planned[0].rows
            slots &= not any(
                ended[row] and planned_row.slots.given for row, planned_row in planned.items()
            )
        step = kv_manager.advance(np.where(ended, PADDING, token).astype(np.int8))
        expected = other.advance(np.where(ended, PADDING, token).astype(np.int8))
        assert is_same(step, expected, slots)
        assert are_same(kv_manager.sequences, other.sequences, slots)
        for bits_of, pool in kv_manager.allocators.items():
            assert pool.free == other.allocators[bits_of].free
        if told is None:
            grown = [pool.capacity for pool in kv_manager.allocators.values()] != capacities
            assert grown or ended.any() or (token == PADDING).all()
        taken += step.planned is not None
        copied += step.planned is not None and bool(step.copies)
        assert step.planned is told
    assert taken > 230 and bool(copied) == shared
    assert forks[0].length == forks[1].length == 150


@pytest.mark.parametrize(
    ("bits", "window", "by_token"),
    [
        (16, 32, False),
        (2, 32, False),
        (2, 1, True),
        (2, 100, True),
        ({"text": 2, "image": 16}, 32, True),
    ],
)
def test_steady_steps_store_tokens_where_single_steps_do(bits, window: int, by_token: bool) -> None:
    """Over several pages; in between, rows pause, change places and are forked."""
    how = STREAM if by_token else WHOLE
    policy = KVPolicy(bits=bits, window=window, sinks=3, **how)
    numbers, other = Numbers(policy), KVCacheManager(PageStore(policy))
    generator = np.random.default_rng(window)
    prompt = generator.choice([0, 0, 1], (4, 250)).astype(np.int8)
    prompt[:, 150:] = Modality.TEXT
    numbers.advance(prompt)
    other.advance(prompt)
    forks, steady, planned = [], 0, 0
    first, second, *_ = *policy.packed_bits, None, None
    shape = AttentionShape((first, second), 2, 2, 4)
    for step in range(500):
        ids = np.zeros((4, 1), np.int8)
        numbers.plan_ahead(ids)
        if step in (120, 121, 333):  # A row pauses after its step was planned.
            ids[step % 4] = PADDING
        elif step in (200, 201):
            ids[1] = Modality.IMAGE
        elif step == 260:
            forks.append((numbers.fork(), other.fork()))
        elif step == 300:
            numbers.select([2, 0, 3, 1])
            other.select([2, 0, 3, 1])
        elif step == 400:
            numbers.check()
        numbers.advance(ids)
        other.advance(ids)
        if step % 23 == 0:  # Attention's tables, made of arrays and of the rows' tables.
            past, now = numbers.last.past, numbers.last.steady
            if now is not None and len(now.rows) == 4:  # No table is read if all is inside.
                shape._replace(window=5000).over([None] * 4, now)
            for inside in (None, 1, 2, 20, 130, 200, 500, 5000):
                part = shape._replace(window=inside)
                made = [part.over(past, now), part.over(list(past))]
                found, expected = (arrays_of(*one) for one in made)
                assert all(map(np.array_equal, found, expected))
        steady += 0 if numbers.last.steady is None else len(numbers.last.steady.rows)
        planned += numbers.last.planned is not None
    assert steady > 1200 and planned > 450
    numbers.check()
    numbers.check_window_and_sinks()
    [(fork, other_fork)] = forks
    fork.check()
    assert are_same(numbers.kv_manager.sequences, other.sequences, slots=False)
    assert are_same(fork.kv_manager.sequences, other_fork.sequences, slots=False)
    check_slots(numbers.contents.store, [numbers.kv_manager, fork.kv_manager])


def unsafe(kv_manager: KVCacheManager, step: StepPlan) -> set[object]:
    """Slots and places in pages that a chained step overwrites although they have a stored token,
    which the sequence needs if drafts are rejected, or although another row reads them."""
    [sequence] = kv_manager.sequences
    streams = sequence.streams.values()
    taken = {slot for stream in streams for slot in stream.slots}
    last = {
        (stream.bits, page): stop
        for stream in streams
        for page, stop in zip(stream.pages, stream.stops, strict=True)
    }
    found: set[object] = set(step.written) & (taken | step.sources()[PLAIN])
    assert len(set(step.written)) == len(step.past)
    for row, past in enumerate(step.past):
        read = {slot for stream in past.streams.values() for slot in stream.slots} - taken
        found |= read - set(step.written[:row])
    for job in step.pack_jobs:
        found |= {page for page in job.pages[:1] if job.first < last.get((job.bits, page), 0)}
    return found


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("by_token", [False, True])
def test_a_planned_chain_takes_effect_token_by_token(window: int, by_token: bool) -> None:
    """The plans of tokens that come take effect, and nothing is left of the others, nor of ordinary
    steps that were planned in between."""
    policy = KVPolicy(bits=2, window=window, sinks=3, **(STREAM if by_token else WHOLE))
    kv_manager, other = (KVCacheManager(PageStore(policy)) for _ in range(2))
    generator, token = np.random.default_rng(window), np.zeros((1, 1), np.int8)
    prompt = generator.choice([0, 1], (1, 150)).astype(np.int8)
    for one in (kv_manager, other):
        one.advance(prompt)
    complete = steady = 0
    for _ in range(100):
        # Steps as in a batch, of which the last does not come.
        for comes in generator.random(3) < 0.3:
            told = kv_manager.planned(token)
            steady += told is not None and told.steady is not None
            if not comes:
                break
            assert kv_manager.advance(token).planned is told
            other.advance(token)
        chain = kv_manager.planned_chain(4)
        complete += chain is not None
        assert chain is None or not unsafe(kv_manager, chain)
        for place in range(generator.integers(1, 5)):
            assert kv_manager.holds_plan or chain is None
            step, _ = kv_manager.advance(token), other.advance(token)
            if chain is not None and step.planned is not None:
                assert step.written == chain.written[place : place + 1]
                assert are_same(step.past, chain.past[place : place + 1], slots=True)
            assert step.planned is not None or chain is None
            ours, theirs = (
                [
                    (row.codes, row.stored, code, x.starts, x.stops, len(x.slots))
                    for row in one.sequences
                    for code, x in row.streams.items()
                ]
                for one in (kv_manager, other)
            )
            assert ours == theirs
    assert complete > (95 if window or not by_token else 10)
    assert steady > 20 or not window
    for one in (kv_manager, other):
        one.release_spare()
    assert {bits: pool.used for bits, pool in kv_manager.allocators.items()} == {
        bits: pool.used for bits, pool in other.allocators.items()
    }


@pytest.mark.parametrize("count", range(1, 7))
def test_a_chain_holds_while_others_release_slots(count: int) -> None:
    """Between two plans, another sequence of the same store gives its slots back."""
    store = PageStore(KVPolicy(bits=2, window=8, sinks=3, **STREAM))
    kv_manager, token = KVCacheManager(store), np.zeros((1, 1), np.int8)
    kv_manager.advance(np.zeros((1, 5), np.int8))
    for _ in range(40):
        other = KVCacheManager(store)
        other.advance(np.zeros((1, count), np.int8))
        if kv_manager.planned_chain(4) is None:
            kv_manager.advance(token)
            continue
        other.clear()
        kv_manager.plan_further(7)
        for _ in range(4):
            assert kv_manager.holds_plan
            assert kv_manager.advance(token).planned is not None


def begun(window: int = 32) -> KVCacheManager:
    """Return two rows of 200 text tokens, packed by token, whose next step the tests plan ahead."""
    kv_manager = KVCacheManager(PageStore(KVPolicy(bits=2, window=window, sinks=3, **STREAM)))
    kv_manager.advance(np.zeros((2, 200), np.int8))
    kv_manager.advance(np.zeros((2, 1), np.int8))
    for slots in kv_manager.allocators.values():  # Leave free slots in the pools.
        slots.release(slots.allocate(100))
    return kv_manager


@pytest.mark.parametrize("change", ["nothing", "others", "row ends", "other rows"])
def test_a_step_comes_as_planned(change: str) -> None:
    kv_manager, tokens = begun(), np.zeros((2, 1), np.int8)
    told = kv_manager.planned(tokens)
    assert told is not None
    if change == "others":
        kv_manager.allocators[PLAIN].release(kv_manager.allocators[PLAIN].allocate(3))
    elif change == "row ends":
        tokens[0] = PADDING
    elif change == "other rows":  # A padding row takes the place of a row.
        tokens[0], kv_manager.sequences[0] = PADDING, SequenceTable()
    step = kv_manager.advance(tokens)
    assert step.planned is told
    rows = {pack_job.row for pack_job in step.all_jobs}
    assert rows == set(step.writes[0].tolist()) == set(np.flatnonzero(tokens[:, 0] != PADDING))


@pytest.mark.parametrize(
    "change", ["another token", "crop", "forget", "fork", "a fork of a row", "trim", "row's own"]
)
def test_a_step_that_comes_otherwise_than_planned(change: str) -> None:
    kv_manager, tokens = begun(), np.zeros((2, 1), np.int8)
    twin = kv_manager.fork()  # Shares all pages but those that are written to.
    kv_manager.advance(tokens)
    told = kv_manager.planned(tokens)
    assert told is not None
    forks = []
    if change == "another token":
        tokens[1] = Modality.IMAGE
    elif change == "crop":
        kv_manager.crop(1)
    elif change == "forget":
        kv_manager.forget(0, 3, 7)
    elif change == "fork":
        forks.append(kv_manager.fork())
    elif change == "a fork of a row":
        forks.append(kv_manager.fork())
        forks[0].select([1])
    elif change == "trim":
        twin.clear()
        kv_manager.store.trim()
    else:
        rows, view = kv_manager.sequences, KVCacheManager(kv_manager.store, owns_slots=False)
        view.sequences[:] = rows
        told = view.planned(tokens)
        kv_manager.crop(2)
        kv_manager = view
    step = kv_manager.advance(tokens)
    assert step.planned is None
    assert bool(step.copies) == bool(forks)


@pytest.mark.parametrize("window", [32, 300])
@pytest.mark.parametrize("change", ["another token", "as before"])
def test_a_row_that_others_change_to_the_same_length(change: str, window: int) -> None:
    """A view plans a step of the row, then the row's own manager replaces a token, or adds tokens,
    for which it releases its spare slots, and drops them."""
    kv_manager, tokens = begun(window), np.zeros((2, 1), np.int8)
    view = KVCacheManager(kv_manager.store, owns_slots=False)
    view.sequences[:] = kv_manager.sequences
    assert view.planned(tokens) is not None
    if change == "another token":
        kv_manager.crop(1)
        kv_manager.advance(np.full((2, 1), Modality.IMAGE, np.int8))
    else:
        kv_manager.advance(np.zeros((2, 2), np.int8))
        kv_manager.crop(2)
    assert view.advance(tokens).planned is None
    assert sum(stream.tokens for stream in kv_manager.streams()) == 2 * (200 + 1 + 1)
    check_slots(kv_manager.store, [kv_manager])


def test_a_row_whose_page_has_room_keeps_one_spare_slot() -> None:
    """While a page is full, a row has several; they are released once it fills the next page."""
    kv_manager = KVCacheManager(PageStore(KVPolicy(bits=2, window=64, sinks=3, **STREAM)))
    kv_manager.advance(np.zeros((1, 200), np.int8))
    [row], most = kv_manager.sequences, 0
    for _ in range(300):
        kv_manager.advance(np.zeros((1, 1), np.int8))
        most = max(most, len(row.spare))
        assert len(row.spare) == 1 or not row.streams[Modality.TEXT].room
    assert most > 4


@pytest.mark.parametrize("reads", [False, True], ids=["nobody reads", "a thread reads"])
def test_rows_are_steady_while_a_fork_shares_their_window(reads: bool) -> None:
    """They write to none of the shared slots. A token that leaves the window leaves its slot to the
    fork if it is shared, and otherwise passes it on."""
    kv_manager, tokens = begun(), np.zeros((2, 1), np.int8)
    twin, steady = kv_manager.fork(), 0
    before = [table.copy() for table in twin.tables]
    shared = {slot for row in before for stream in row.streams.values() for slot in stream.slots}
    for step in range(60):
        told = kv_manager.planned(tokens)
        assert told is not None
        steady += told.steady is not None and len(told.steady.rows) == 2
        assert kv_manager.advance(tokens).planned is told
        assert told.writes is not None and not shared & {*told.writes[2].tolist()}
        if reads and step == 20:
            with ThreadPoolExecutor(1) as pool:  # Ends the steady steps.
                assert pool.submit(lambda: len(kv_manager.sequences[0].codes)).result() == 222
    assert steady > 50
    assert twin.sequences == before
    check_slots(kv_manager.store, [kv_manager, twin])
    kv_manager.hold([])
    assert twin.sequences == before
    check_slots(kv_manager.store, [twin])


@pytest.mark.parametrize("change", ["nothing", "a fork", "spare slots released"])
def test_a_steady_row_whose_slots_change(change: str) -> None:
    """A plan that passes a packed token's slot on to the next token holds only as long as the page
    and the slots are the row's own."""
    policy = KVPolicy(bits=2, window=32, sinks=3, **STREAM)
    kv_manager, tokens = KVCacheManager(PageStore(policy)), np.zeros((1, 1), np.int8)
    for count in (200, 1, 1):
        kv_manager.advance(np.zeros((1, count), np.int8))
    view = KVCacheManager(kv_manager.store, owns_slots=False)
    view.sequences[:] = kv_manager.sequences
    told, forks = view.planned(tokens), []
    assert told is not None and view._planned
    assert told.steady is not None and not view._planned[0].rows
    if change == "a fork":
        forks.append(kv_manager.fork())
    elif change == "spare slots released":
        kv_manager.release_spare()
    step = view.advance(tokens)
    assert (step.planned is told) == (change == "nothing")
    assert bool(step.copies) == bool(forks)
    check_slots(kv_manager.store, [kv_manager, *forks])


def test_a_planned_row_whose_spare_slots_are_released() -> None:
    """With an image in its window, the row is not steady."""
    kv_manager = KVCacheManager(PageStore(KVPolicy(bits=2, window=32, sinks=3, **STREAM)))
    prompt, token = np.zeros((1, 200), np.int8), np.zeros((1, 1), np.int8)
    prompt[:, 190] = Modality.IMAGE
    for ids in (prompt, token, token):
        kv_manager.advance(ids)
    view = KVCacheManager(kv_manager.store, owns_slots=False)
    view.sequences[:] = kv_manager.sequences
    told = view.planned(token)
    assert told is not None and told.steady is None
    kv_manager.release_spare()
    assert view.advance(token).planned is not told
    check_slots(kv_manager.store, [kv_manager])


def test_tables_read_by_another_thread() -> None:
    """Steady steps begin and end meanwhile; no reader sees a part of them."""
    kv_manager = KVCacheManager(PageStore(KVPolicy(bits=2, window=32, sinks=3, **STREAM)))
    kv_manager.advance(np.zeros((4, 200), np.int8))
    token, counts, wrong = np.zeros((4, 1), np.int8), [200], list[tuple[int, ...]]()

    def read() -> None:
        while counts[-1] >= 0:
            first, row = counts[-1], kv_manager.sequences[0]
            seen, held = row.length, len(row.peek().codes)
            last = counts[-1]
            if last >= 0 and not first <= seen <= held <= last + 1:
                wrong.append((first, seen, held, last))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=read)
    try:
        thread.start()
        for step in range(1500):
            kv_manager.planned(token)
            kv_manager.advance(token)
            counts.append(counts[-1] + 1)
            if step % 7 == 0:
                kv_manager.sequences[0].settle()
    finally:
        counts.append(-1)
        thread.join()
        sys.setswitchinterval(before)
    assert not wrong
    check_slots(kv_manager.store, [kv_manager])


@pytest.mark.parametrize("chained", [False, True])
def test_a_planned_token_is_not_read_yet(chained: bool, monkeypatch) -> None:
    """What another thread would read of the sequence after each token that is placed for a plan."""
    kv_manager = KVCacheManager(PageStore(KVPolicy(bits=2, window=32, sinks=3, **STREAM)))
    kv_manager.advance(np.zeros((1, 200), np.int8))
    kv_manager.release_spare()  # Without a spare slot, the next step is not steady.
    for pool in kv_manager.allocators.values():
        pool.ensure_free(4)  # Planning does not grow pools.
    [row], seen = kv_manager.sequences, list[tuple[int, int, bytes]]()
    before, place_one = bytes(row.codes), TokenPlacer.place_one

    def placing(placer: TokenPlacer, *arguments: Any) -> None:
        place_one(placer, *arguments)
        seen.append((row.length, len(row.peek().codes), bytes(row.codes)))

    monkeypatch.setattr(TokenPlacer, "place_one", placing)
    for _ in range(2):  # The second chain begins with plans of the first one.
        made = (
            kv_manager.planned_chain(3 + len(seen))
            if chained
            else kv_manager.planned(np.zeros((1, 1), np.int8))
        )
        assert made is not None
    assert len(seen) >= 2 and set(seen) == {(200, 200, before)}
    kv_manager.advance(np.zeros((1, 1), np.int8))
    assert row.length == 201
    check_slots(kv_manager.store, [kv_manager])


@pytest.mark.parametrize(
    "between", ["nothing", "released", "a prompt", "planned", "given", "given back"]
)
def test_a_page_that_was_planned(between: str) -> None:
    """A planned page is taken whatever was released since, and although a prompt took other pages,
    unless the page was planned for or given to another row."""
    policy = KVPolicy(bits=2, window=32, sinks=3, **STREAM)
    kv_manager = KVCacheManager(PageStore(policy))
    pages = kv_manager.allocators[TWO]
    others = pages.allocate(4)
    pages.release(others[:2])
    twin, tokens = KVCacheManager(kv_manager.store), np.zeros((1, 1), np.int8)
    for one in (kv_manager, twin):
        one.advance(np.zeros((1, 35 + 128 + min_page_tokens(policy, TWO) - 3), np.int8))
    pages.release(pages.allocate(6))  # Leave free slots in the pool.
    prompt = KVCacheManager(kv_manager.store)
    for _ in range(2):
        kv_manager.advance(tokens)
        twin.advance(tokens)
    told = kv_manager.planned(tokens)
    assert told is not None and told.pack_jobs[0].begins
    if between == "released":
        pages.release(others[2:])
    elif between == "planned":
        other = twin.planned(tokens)
        assert other is not None and other.pack_jobs[0].pages == told.pack_jobs[0].pages
    elif between == "given":
        others += pages.allocate(1)
        assert others[-1:] == told.pack_jobs[0].pages
    elif between == "given back":  # The row that had it in between may have written to it.
        pages.release(pages.allocate(1))
    elif between == "a prompt":
        prompt.advance(np.zeros((1, 300), np.int8))
        assert prompt.sequences[0].streams[0].pages
    step = kv_manager.advance(tokens)
    assert (step.planned is told) == (between in ("nothing", "released", "a prompt"))
    assert (step.pack_jobs[0].pages == told.pack_jobs[0].pages) == (between != "given")
    assert step.pack_jobs[0].pages != twin.advance(tokens).pack_jobs[0].pages
    slots = SlotSet.of(stream for one in (kv_manager, twin, prompt) for stream in one.streams())
    left = 2 - 2 * (between == "released") + (between == "given")
    assert pages.used == slots.counts[TWO] + left
