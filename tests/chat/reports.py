"""What reports of memory say, against the tensors that are there."""

from __future__ import annotations

from collections import Counter

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.cache.page_store import PageStore
from oscar_mm.chat.chat import Chat
from oscar_mm.policy import PLAIN, Bits


def cache_of(chat: Chat) -> OscarCache | None:
    """What a chat holds in the store; None while that is on disk."""
    return chat._spillable.conversation.kv


def check_store(store: PageStore) -> int:
    """A store's report counts its pools' tensors; their bytes."""
    stored = sum(
        pool.device_bytes for layer in store.layers.values() for pool in layer.by_bits.values()
    )
    assert store.memory().pool_bytes == stored
    return stored


def check_report(report: MemoryReport, cache: OscarCache, store: PageStore) -> None:
    """A cache's report counts the slots that it names, its tables and, of a store that nobody
    else uses, the free slots."""
    held = bytes_of_slots(store, cache)
    whole = store.memory()
    if held == whole.used_bytes and any(layer.is_initialized for layer in cache.layers):
        held += whole.free_bytes
    for layer in filter(lambda layer: layer.is_initialized, cache.layers):
        held += layer.overflow.nbytes + (0 if layer.sigma is None else layer.sigma.nbytes)
    held += cache.kv_manager.table_bytes
    assert report.kv_bytes == held
    assert sum(report.by_kind.values()) == sum(report.by_modality.values()) == held
    assert min(*report.by_kind.values(), *report.by_modality.values()) >= 0


def bytes_of_slots(store: PageStore, *caches: OscarCache) -> int:
    """Return the bytes of all slots in the caches' tables, each counted once."""
    named: dict[Bits, set[int]] = {bits: set() for bits in store.allocators}
    for cache in caches:
        for sequence in cache.kv_manager.sequences:
            named[PLAIN].update(sequence.spare)
        for stream in cache.kv_manager.streams():
            named[PLAIN].update(stream.slots)
            named[stream.bits].update(stream.pages)
    sizes: Counter[int] = Counter()
    for layer in store.layers.values():
        sizes.update({bits: pool.slot_bytes for bits, pool in layer.by_bits.items()})
    return sum(len(slots) * sizes[bits] for bits, slots in named.items())
