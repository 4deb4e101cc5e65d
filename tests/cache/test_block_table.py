"""Slots of streams are counted once, however many tables refer to them."""

import torch

from oscar_mm.cache.block_table import SlotSet
from oscar_mm.modality import Modality
from oscar_mm.policy import PLAIN, Bits
from tests.cache.invariants import filled, random_ids

TWO = Bits(2, 2)
IDS = random_ids(3, 60, 400, 50, 300)


def test_forks_hold_the_same_slots() -> None:
    cache, _ = filled("channel", IDS)
    store, streams = cache.store, [*cache.kv_manager.streams()]
    held = SlotSet.of(streams)
    assert held.counts == {bits: slots.used for bits, slots in store.allocators.items()}
    pages = [page for stream in streams for page in stream.pages]
    assert len(pages) > 1 and held.slots(TWO) == pages
    assert store.bytes_of(held.counts) == store.memory().used_bytes
    assert not +held.shared(store.allocators)
    twin = cache.fork()
    both = SlotSet.of([*streams, *twin.kv_manager.streams()])
    assert both.counts == held.counts and not +both.shared(store.allocators)
    assert held.shared(store.allocators) == held.counts
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert store.bytes_of(held.counts, cpu) == store.memory().used_bytes
    assert store.bytes_of(held.counts, meta) == 0


def test_a_page_with_a_gap_is_one_slot() -> None:
    """Such a page has two entries."""
    cache, _ = filled("channel", IDS)
    before = SlotSet.of(cache.kv_manager.streams())
    [row] = cache.kv_manager.sequences
    code = next(code for code, stream in row.streams.items() if stream.pages)
    places = row.positions(code)
    cache.forget(int(places[20]), int(places[30]))
    after = SlotSet.of(cache.kv_manager.streams())
    assert sum(len(stream.pages) for stream in cache.kv_manager.streams()) == before.counts[TWO] + 1
    assert after.counts[TWO] == before.counts[TWO] and not +after.shared(cache.store.allocators)


def test_slots_by_modality() -> None:
    cache, _ = filled("channel", IDS)
    held = SlotSet.of(cache.kv_manager.streams())
    for bits in (TWO, PLAIN):
        by_modality = held.by_modality(bits)
        assert by_modality.total() == held.counts[bits]
        assert {*by_modality} <= {modality.label for modality in Modality}
    assert not SlotSet.of([]).counts and not held.slots(Bits(8, 8))
