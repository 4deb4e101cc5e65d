"""Caches that share a store: forks, closing, accounting; no cache reads another's tokens."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from oscar_mm import InputError, KVPolicy, OscarCache
from oscar_mm.cache import page_store as store_module
from oscar_mm.cache.block_table import ModalityTable, SequenceTable, SlotSet
from oscar_mm.cache.page_store import PageStore, Pool
from oscar_mm.policy import PLAIN, Bits
from tests.cache.invariants import POLICIES, attend_oscar, chunk, filled, random_ids
from tests.cache.numbers import check_slots
from tests.pairs import pairs

IDS = random_ids(3, 60, 400, 50, 300)
PAGES = ("channel", "stream")
"""Policies with whole pages, and with stream pages."""


def used(store: PageStore) -> dict[Bits, int]:
    store.collect()
    return {bits: slots.used for bits, slots in store.allocators.items()}


def test_a_store_may_be_joined_while_its_caches_are_walked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, _ = filled("channel", IDS)
    store, slot_set, renumber = cache.store, SlotSet.of, SequenceTable.renumber
    joined, walks = [], set()

    def slow_streams(streams: Iterable[ModalityTable]) -> Iterator[ModalityTable]:
        for stream in streams:
            walks.add("streams")
            joined.append(OscarCache("channel", store=store))
            yield stream

    def slow_renumber(sequence: SequenceTable, bits: Bits, ids: dict[int, int]) -> None:
        walks.add(bits)
        joined.append(OscarCache("channel", store=store))
        renumber(sequence, bits, ids)

    cache.crop(-500)  # leaves slots to trim
    monkeypatch.setattr(SlotSet, "of", lambda streams: slot_set(slow_streams(streams)))
    monkeypatch.setattr(SequenceTable, "renumber", slow_renumber)
    assert store.bytes_by_modality()["text"] > 0
    store.trim()
    assert walks == {"streams", *store.allocators} and len(joined) > 2


def test_a_cache_may_go_while_slots_get_other_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = filled("channel", IDS)
    others, store, renumber = [cache.fork()], cache.store, SequenceTable.renumber
    attend_oscar(others[0], chunk(1, 300))

    def last_renumber(sequence: SequenceTable, bits: Bits, ids: dict[int, int]) -> None:
        others.clear()
        gc.collect()
        renumber(sequence, bits, ids)

    cache.crop(-500)
    others[0].crop(-700)
    monkeypatch.setattr(SequenceTable, "renumber", last_renumber)
    store.trim()
    assert not others
    gc.collect()
    store.collect()
    check_slots(store, [cache.kv_manager])


@pytest.mark.parametrize("policy", PAGES)
def test_a_fork_costs_tables_only_and_inherits_the_balancing(policy: str) -> None:
    cache, _ = filled(POLICIES[policy], IDS)
    before = used(cache.store)
    for twin in (cache.fork(), copy.copy(cache), copy.deepcopy(cache)):
        assert used(cache.store) == before and twin.store is cache.store
        assert twin.layers[0].sigma is cache.layers[0].sigma is not None
        assert twin.layers[0].cache is twin
        for found, expected in zip(twin.unpacked(0), cache.unpacked(0), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("kept", "end", "policy"),
    pairs((0, 1, 60, 333, 460, 810), ("closed", "dropped", "goes on"), PAGES),
)
def test_a_prefix_snapshot_goes_on_whatever_its_parent_does(
    kept: int, end: str, policy: str
) -> None:
    """The snapshot equals the parent cropped to its length, bit for bit."""
    parent, _ = filled(POLICIES[policy], IDS)
    expected = copy.deepcopy(parent)
    expected.crop(-(810 - kept))
    snapshot = parent.fork()
    snapshot.crop(-(810 - kept))
    if end == "closed":
        parent.close()
    elif end == "goes on":
        attend_oscar(parent, chunk(9, 200))
        parent.forget(0, 900)
    del parent
    for seed, tokens in enumerate((1, 200, 1)):
        new = chunk(seed, tokens)
        assert torch.equal(attend_oscar(snapshot, new), attend_oscar(expected, new))
    assert torch.equal(snapshot.unpacked(0)[0], expected.unpacked(0)[0])


def test_a_token_goes_to_a_copy_of_a_page_that_others_have() -> None:
    """Two caches that share a page fill the same places, each in its own copy of the page."""
    cache, _ = filled(POLICIES["stream"], torch.zeros(1, 200, dtype=torch.int64))
    twins = [cache, cache.fork(), cache.fork()]
    bits = Bits(3, 2)
    [page] = [stream.pages[-1] for stream in cache.kv_manager.streams() if stream.pages]
    assert cache.store.allocators[bits].owners(page) == 3
    before, alone = cache.unpacked(0), []
    for seed, twin in enumerate(twins):
        expected, _ = filled(POLICIES["stream"], torch.zeros(1, 200, dtype=torch.int64))
        for step in range(3):
            new = chunk(10 * seed + step, 1)
            assert torch.equal(attend_oscar(twin, new), attend_oscar(expected, new))
        alone.append(expected.unpacked(0))
    for twin, expected in zip(twins, alone, strict=True):
        for found, own, old in zip(twin.unpacked(0), expected, before, strict=True):
            assert torch.equal(found, own)
            # What was packed before is as it was.
            assert torch.equal(found[:, :, :168], old[:, :, :168])
    # The last one has the page alone, and no copy is made.
    lasts = {
        stream.pages[-1] for twin in twins for stream in twin.kv_manager.streams() if stream.pages
    }
    assert len(lasts) == 3 and page in lasts
    assert all(cache.store.allocators[bits].owners(one) == 1 for one in lasts)
    check_slots(cache.store, [twin.kv_manager for twin in twins])


@pytest.mark.parametrize("policy", PAGES)
def test_slots_come_back_when_a_cache_is_reset_closed_or_gone(policy: str) -> None:
    store = PageStore(POLICIES[policy])
    caches = [OscarCache(store.policy, store=store) for _ in range(4)]
    for seed, cache in enumerate(caches):
        attend_oscar(cache, chunk(seed, 810), ids=IDS)
    caches.append(caches[0].fork())
    alone = {bits: count // 4 for bits, count in used(store).items()}
    assert all(alone.values())
    pools = store.memory().pool_bytes
    caches[1].close()
    caches[1].close()
    caches[2].reset()
    gc.disable()  # Without it too: a cache is in no cycle of references.
    try:
        del cache
        caches.pop(3)
        assert used(store) == alone
    finally:
        gc.enable()
    # The parent goes, its fork stays.
    caches.pop(0)
    assert used(store) == alone
    attend_oscar(caches[-1], chunk(7, 100))
    assert store.memory().pool_bytes == pools
    caches[-1].close()
    assert not any(used(store).values())
    assert store.memory().used_bytes == 0
    store.trim()
    assert store.memory().pool_bytes == 0


def test_a_closed_cache_takes_nothing() -> None:
    cache, _ = filled("channel", IDS)
    cache.close()
    assert cache.get_seq_length() == 0 and cache.memory().kv_bytes == 0
    with pytest.raises(RuntimeError, match="closed"):
        attend_oscar(cache, chunk(0, 5))
    with pytest.raises(RuntimeError, match="closed"):
        attend_oscar(cache.fork(), chunk(0, 5))


def test_reset_of_a_cache_of_a_given_store_stays_there() -> None:
    store = PageStore("channel")
    cache = OscarCache("channel", store=store)
    attend_oscar(cache, chunk(0, 300))
    cache.reset()
    assert cache.store is store
    attend_oscar(cache, chunk(1, 300))
    expected = OscarCache("channel")
    attend_oscar(expected, chunk(1, 300))
    assert torch.equal(cache.unpacked(0)[0], expected.unpacked(0)[0])


@pytest.mark.parametrize("operation", ["fork", "forget"])
def test_not_within_a_forward_pass(operation: str) -> None:
    cache = OscarCache("channel")
    for layer in range(2):
        attend_oscar(cache, chunk(0, 200), layer=layer)
    attend_oscar(cache, chunk(1, 5))
    with pytest.raises(RuntimeError, match="did not reach layer 1"):
        cache.fork() if operation == "fork" else cache.forget(0, 5)
    attend_oscar(cache, chunk(1, 5), layer=1)
    assert cache.fork().get_seq_length() == 205


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("policy", PAGES)
def test_an_interrupted_turn_is_undone_by_a_fork(policy: str, tokens: int) -> None:
    """A chat forks before each turn, and continues with the fork if the turn fails midway."""
    cache = OscarCache(POLICIES[policy])
    for layer in range(2):
        attend_oscar(cache, chunk(layer, 810), ids=IDS, layer=layer)
    before = [cache.unpacked(layer)[0] for layer in range(2)]
    twin = cache.fork()
    attend_oscar(cache, chunk(5, tokens))  # layer 1 never comes
    cache.close()
    attend_oscar(other := OscarCache(cache.policy, store=twin.store), chunk(6, 500))
    for layer in range(2):
        assert torch.equal(twin.unpacked(layer)[0], before[layer])
    check_slots(twin.store, [twin.kv_manager, other.kv_manager])


@pytest.mark.parametrize("memory", [True, False])
def test_a_pool_that_grew_ahead_does_not_grow_in_a_step(
    memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that grows a pool cannot be launched early. If there is no memory, pools stay as they
    are."""
    cache, _ = filled("standard", IDS)
    store, text = cache.store, np.zeros((1, 1), np.int8)
    store.trim()
    assert cache.kv_manager.planned(text) is None
    store.grow_ahead(dict.fromkeys(store.allocators, 40))
    assert not any(slots.free for slots in store.allocators.values())  # On a CPU.
    monkeypatch.setattr(PageStore, "is_on_cpu", False)
    with monkeypatch.context() as full:
        if not memory:
            full.setattr(store.layers[0].recent, "reserve", out_of_memory)
        store.grow_ahead(dict.fromkeys(store.allocators, 40))
    for bits, slots in store.allocators.items():
        grew = memory or bits != PLAIN
        assert slots.free == 40 * grew
        assert all(
            layer.by_bits[bits].capacity >= slots.capacity for layer in store.layers.values()
        )
    assert (cache.kv_manager.planned(text) is not None) == memory
    before = store.allocators[PLAIN].capacity
    attend_oscar(cache, chunk(1, 1))
    assert (store.allocators[PLAIN].capacity == before) == memory


@pytest.mark.parametrize("plenty", [True, False])
def test_a_pool_grows_beyond_what_is_needed_where_memory_is_plenty(
    plenty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the next requests need no growth, each of which maps memory in every layer."""
    cache, _ = filled("standard", IDS)
    store = cache.store
    store.trim()
    recents = store.allocators[PLAIN]
    monkeypatch.setattr(PageStore, "is_on_cpu", False)
    spare = recents.capacity // 8
    left = 16 * store.bytes_of({PLAIN: spare}) - (not plenty)
    monkeypatch.setattr(store_module, "_free_bytes", lambda device: left)
    store.grow_ahead({PLAIN: 1}, spares=True)
    grown = recents.capacity
    assert spare > 1 and recents.free == (spare if plenty else 1)
    store.grow_ahead({PLAIN: recents.free}, spares=True)
    assert recents.capacity == grown == store.layers[0].recent.capacity


def out_of_memory(capacity: int) -> None:
    raise torch.OutOfMemoryError("the GPU is full")


def test_caches_that_do_not_fit_a_store() -> None:
    store = PageStore("channel")
    with pytest.raises(InputError, match="its store has"):
        OscarCache("oscar", store=store)
    with pytest.raises(InputError, match="its store has"):
        OscarCache(KVPolicy.preset("channel", window=64), store=store)
    attend_oscar(OscarCache("channel", store=store), chunk(0, 5))
    for shape in ({"head_dim": 32}, {"kv_heads": 1}):
        with pytest.raises(InputError, match="layer 0: the store has 2 KV heads of 64 channels"):
            attend_oscar(OscarCache("channel", store=store), chunk(0, 5, **shape))


@pytest.mark.parametrize("policy", PAGES)
def test_bytes_that_caches_share_are_in_both_reports(policy: str) -> None:
    cache, _ = filled(POLICIES[policy], IDS)
    alone = cache.memory()
    assert alone.shared_bytes == 0 and alone.by_kind["unused"] == 0
    twin = cache.fork()
    whole = cache.memory()
    assert whole == twin.memory()
    assert str(whole).endswith("KB") and "shared with other caches" in str(whole)
    assert whole.kv_bytes == alone.kv_bytes
    slots = sum(whole.by_kind[kind] for kind in ("codes", "scales", "norms", "tails"))
    assert whole.shared_bytes == slots == cache.store.memory().used_bytes
    attend_oscar(twin, chunk(1, 300))
    grown, store = twin.memory(), cache.store.memory()
    assert cache.memory().by_kind["unused"] == grown.by_kind["unused"] == 0
    assert grown.kv_bytes > whole.kv_bytes
    by_modality = cache.store.bytes_by_modality()
    assert sum(by_modality.values()) == store.used_bytes
    for label, held in by_modality.items():
        assert held >= max(cache.memory().by_modality[label], grown.by_modality[label]) > 0
    # Each slot once: what both hold, and what either holds alone.
    reports = (cache.memory(), grown)
    assert reports[0].shared_bytes == reports[1].shared_bytes
    held = sum(sum(r.by_kind[k] for k in ("codes", "scales", "norms", "tails")) for r in reports)
    assert store.used_bytes == held - reports[0].shared_bytes
    # Free slots are in the store's report, and in a cache's once it is alone.
    twin.close()
    cache.forget(0, 400)
    last, store = cache.memory(), cache.store.memory()
    assert last.by_kind["unused"] == store.free_bytes > 0
    assert last.shared_bytes == 0
    pools = cache.store.layers[0].by_bits.values()
    assert store.pool_bytes == sum(pool.storage.nbytes for pool in pools)
    cache.store.trim()
    assert cache.memory().by_kind["unused"] == cache.store.memory().free_bytes == 0


def test_pools_are_looked_at_when_there_are_other_slots_or_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, _ = filled("channel", IDS)
    store, looks, reserve = cache.store, [], Pool.reserve

    def counted(pool: Pool, capacity: int) -> None:
        looks.append(pool)
        reserve(pool, capacity)

    monkeypatch.setattr(Pool, "reserve", counted)

    def count() -> int:
        looks.clear()
        store.reserve()
        found = len(looks)
        store.reserve()
        assert len(looks) == found, "a second time there is nothing to do"
        slots = [store.allocators[bits].capacity for bits in store.allocators]
        for pools in store.layers.values():
            assert [len(pools.by_bits[bits].storage) for bits in store.allocators] == slots
        return found

    count()
    assert count() == 0
    for slots in store.allocators.values():
        taken = slots.allocate(slots.free + 1)
        assert count() == len(store.allocators)
        slots.release(taken)
        assert count() == 0
    store.trim()
    count()
    store.layer(1, 2, 64, torch.float32, torch.device("cpu"))
    assert count() == 2 * len(store.allocators)


@pytest.mark.parametrize("policy", ["stream", "channel", "bf16"])
def test_a_cache_shrinks_after_an_answer_and_goes_on(policy: str) -> None:
    plain, shrunk = (
        OscarCache(POLICIES[policy]),
        OscarCache(POLICIES[policy]),
    )
    for turn in range(3):
        for seed, tokens in enumerate((50, *[1] * 40), 100 * turn):
            new = chunk(seed, tokens)
            assert torch.equal(attend_oscar(plain, new), attend_oscar(shrunk, new))
        shrunk.shrink()
        report = shrunk.memory()
        assert report.by_kind["unused"] == shrunk.store.memory().free_bytes == 0
        if shrunk.policy.packs:  # Else all is in the model's dtype, which is float32.
            assert report.kv_bytes - report.by_kind["tables"] <= report.bf16_bytes
        check_slots(shrunk.store, [shrunk.kv_manager])
    assert plain.memory().by_kind["unused"] > 0 and plain.store.trims == 0


def test_with_others_a_cache_gives_back_what_it_had_to_spare_alone() -> None:
    store = PageStore("standard")
    cache, other = (OscarCache("standard", store=store) for _ in range(2))
    for seed, tokens in enumerate((40, 1, 1)):
        for one in (cache, other):
            attend_oscar(one, chunk(seed, tokens))
    free = [slots.free for slots in store.allocators.values()]
    spare = other.kv_manager.spare
    assert cache.kv_manager.spare and spare
    cache.shrink()
    assert cache.memory().by_kind["unused"] == cache.kv_manager.spare == 0
    assert other.kv_manager.spare == spare and store.trims == 0
    assert [slots.free for slots in store.allocators.values()] > free
    check_slots(store, [cache.kv_manager, other.kv_manager])


def test_more_is_moved_after_an_answer_where_it_gains_and_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, _ = filled("channel", IDS)
    store, now = cache.store, [0.0]
    monkeypatch.setattr(store_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(store_module, "_SMALL_BYTES", 0)

    def trims(removed: int) -> bool:
        cache.crop(-removed)
        before = store.trims
        cache.shrink()
        return store.trims > before

    trim = store.trim

    def slow_trim() -> None:
        trim()
        now[0] += 1.0

    monkeypatch.setattr(store, "trim", slow_trim)
    assert not trims(1)
    assert trims(200)
    now[0] += 40
    assert not trims(100)
    now[0] += 20
    assert trims(0)


def test_free_slots_return_before_prompts_in_a_small_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, ticks = KVPolicy.of(POLICIES["channel"]), [0.0]

    def clock() -> float:
        ticks[0] += 0.1
        return ticks[0]

    monkeypatch.setattr(store_module, "time", SimpleNamespace(perf_counter=clock))
    store = PageStore(policy)

    def left(soon: int, later: float = 0) -> int:
        """Bytes of the pools after a cache was closed, and ``trim_surplus``."""
        cache = OscarCache(policy, store=store)
        attend_oscar(cache, chunk(1, 300))
        cache.close()
        ticks[0] += later
        store.trim_surplus(soon)
        return store.memory().pool_bytes

    assert left(soon=1) == 0
    assert left(soon=1) > 0, "a trim of 0.1 s is made every 5 s"
    assert left(soon=0) == 0
    assert left(soon=1, later=10) == 0


def test_surplus_stays_in_the_pools_for_ten_seconds_while_requests_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(store_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    store = PageStore(KVPolicy.of(POLICIES["channel"]))

    def is_empty(seconds: float, *, busy: bool) -> bool:
        """Whether the pools are empty after a cache was closed ``seconds`` later."""
        cache = OscarCache(store.policy, store=store)
        attend_oscar(cache, chunk(1, 300))
        cache.close()
        now[0] += seconds
        store.trim_surplus(busy=busy)
        return not store.memory().pool_bytes

    assert is_empty(0, busy=True)
    assert not is_empty(4, busy=True)
    assert not is_empty(5, busy=True)
    assert is_empty(2, busy=True)
    assert is_empty(1, busy=False), "nothing runs that needs the memory again"
    assert not is_empty(1, busy=True)
    store.trim_if_skipped()
    assert not store.memory().pool_bytes, "requests have ended"
