"""PageStore: the slots that caches keep their pages in, and the bytes under them in every layer.

All layers of a model store the same tokens, so slots are allocated once for all of them: a
``SlotPool`` hands out the ids, each layer's ``Pool`` has the bytes of its layer under them.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from oscar_mm.cache.block_table import SequenceTable, SlotPool, SlotSet
from oscar_mm.errors import InputError
from oscar_mm.kernels.address_range import AddressRange
from oscar_mm.modality import Modality
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import DEFAULT, PLAIN, Bits, KVPolicy
from oscar_mm.tensor_parallel import TPGroup
from oscar_mm.threads import FairLock

_TRIMMING = 0.02
"""Most of the time that goes into moving slots together."""
_SMALL_BYTES = 1 << 26
"""Bytes that a CPU moves in some 20 ms."""
_GAIN = 128
"""Most bytes that are moved after an answer for one that is free then."""
_COPY_BYTES = 1 << 26
"""Bytes that are copied at once where a pool is compacted in place."""


class Pool:
    """The slots of one layer, on a GPU at an address that stays where the driver can do that.

    Attributes:
        storage: (capacity, *slot_shape), uninitialized until written; another tensor after each
            change of the capacity.
        capacity: slots.
        bytes_each: bytes of a slot, whether there is one or not.
        moves: how often the storage has got another address.
    """

    def __init__(
        self, slot_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = self.moves = 0
        self.bytes_each = math.prod(slot_shape) * dtype.itemsize
        self._range: AddressRange | None = None
        # A pool that is made in inference mode must be writable outside of it too.
        with torch.inference_mode(False):
            self.storage = torch.empty((0, *slot_shape), dtype=dtype, device=device)

    def reserve(self, capacity: int) -> None:
        """Grow to ``capacity`` slots, keeping what is stored.

        Raises:
            torch.OutOfMemoryError: the device has no room; the pool is as before.
        """
        before, moves = self.capacity, self._range is None
        if capacity <= before:
            return
        if not before and self._range is None:
            self._range = AddressRange.reserve(self.storage.device)
        if self._range is not None:
            self._resize(self._range, capacity)
        else:
            with torch.inference_mode(False):
                grown = self.storage.new_empty((capacity, *self.storage.shape[1:]))
            grown[:before] = self.storage
            self.storage, self.capacity = grown, capacity
        self.moves += moves

    def keep(self, slots: list[int]) -> None:
        """Shrink to these slots, which ascend."""
        if self._range is None:
            with torch.inference_mode(False):
                self.storage, self.capacity = self.storage[slots], len(slots)
            self.moves += 1
            return
        count = max(1, _COPY_BYTES // max(1, self.slot_bytes))
        for start in range(0, len(slots), count):
            run = slots[start : start + count]
            # No later slot is overwritten, as slots only move to lower ids.
            if run[-1] >= start + len(run):
                self.storage[start : start + len(run)] = self.storage[run]
        self._resize(self._range, len(slots))

    def _resize(self, addresses: AddressRange, capacity: int) -> None:
        shape, dtype = (capacity, *self.storage.shape[1:]), self.storage.dtype
        addresses.resize(math.prod(shape) * dtype.itemsize)
        with torch.inference_mode(False):
            self.storage, self.capacity = addresses.tensor(shape, dtype), capacity

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot; 0 as long as there is none."""
        return self.bytes_each if self.capacity else 0

    @property
    def device_bytes(self) -> int:
        """Bytes that the pool takes of its device, also what no slot uses of its last piece."""
        return self.storage.nbytes if self._range is None else self._range.nbytes

    def free_bytes(self, used: int) -> int:
        """Bytes of all slots but so many, as far as the device gets them back without these slots:
        of a GPU's pieces only whole ones."""
        kept = used * self.slot_bytes
        free = self.storage.nbytes - kept
        return free if self._range is None else min(free, self._range.surplus(kept))


def unpacked_dtype(policy: KVPolicy, dtype: torch.dtype) -> torch.dtype:
    """Dtype of tokens that are not packed, of a model of a dtype: 16 bit, unless a policy packs
    nothing at all."""
    return torch.bfloat16 if policy.packs and dtype == torch.float32 else dtype


class LayerShape(NamedTuple):
    """What one layer of a model stores for every token."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        """In words."""
        return f"{self.kv_heads} KV heads of {self.head_dim} channels in {self.dtype}"


class LayerPools:
    """The pools of one layer of a model.

    Attributes:
        recent: tokens in 16-bit precision, (slots, 2, KV heads, head_dim) of ``unpacked_dtype``.
        pages: bits -> pages, (slots, page_bytes) uint8.
        by_bits: all pools; ``PLAIN`` for tokens in 16-bit precision.
        formats: bits -> layout of the pages, ascending.
    """

    def __init__(
        self,
        policy: KVPolicy,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.kv_heads, self.head_dim, self.dtype, self.device = kv_heads, head_dim, dtype, device
        self.recent = Pool((2, kv_heads, head_dim), unpacked_dtype(policy, dtype), device)
        self.formats = {
            bits: PageFormat.of(policy, bits, kv_heads, head_dim) for bits in policy.packed_bits
        }
        self.pages = {
            bits: Pool((page_format.page_bytes,), torch.uint8, device)
            for bits, page_format in self.formats.items()
        }
        self.by_bits: dict[Bits, Pool] = {**self.pages, PLAIN: self.recent}

    def reserve(self, allocators: Mapping[Bits, SlotPool]) -> None:
        """Let the pools hold all slots that were given out."""
        for bits, pool in self.by_bits.items():
            pool.reserve(allocators[bits].capacity)


@dataclass(frozen=True)
class StoreReport:
    """Bytes of a store's pools, each once, whoever holds them.

    Attributes:
        used_bytes: of slots that some cache holds.
        free_bytes: of slots that nobody holds, as far as ``PageStore.trim`` gives them back; they
            are used again before the pools grow.
        rounding_bytes: all else that the pools take: a GPU gives a pool memory in pieces (2 MiB),
            and slots in use do not fill the last one. Reports of a cache leave them out.
    """

    used_bytes: int
    free_bytes: int
    rounding_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        """What the pools take on their devices."""
        return self.used_bytes + self.free_bytes + self.rounding_bytes


class SlotOwner(Protocol):
    """Has slots of a store."""

    @property
    def sequences(self) -> list[SequenceTable]:
        """Its rows; always the same list, which the store releases once the owner is gone."""
        ...


class PageStore:
    """Slots and pools that the caches of one model share::

        store = PageStore("compact")
        chats = [OscarCache("compact", store=store) for _ in range(3)]

    Caches have pages in common only by ``OscarCache.fork``: pages are in the basis (balancing) of
    the cache that packed them, and a fork inherits it. Slots that a cache no longer needs go back
    to the store, and are used again before its pools grow; ``trim`` gives them back to the device.

    Threads: one forward pass at a time. Whoever uses caches of one store from several threads
    holds ``lock`` for a whole forward pass and for each operation on a cache (fork, forget, crop,
    close, save, load). A cache may be garbage-collected at any time in any thread.

    Args:
        policy: of all its caches: a KVPolicy or a preset's name.
        lock: by default one of its own.
        ranks: the processes of which each stores other heads; by default one.

    Attributes:
        allocators: bits -> slots of that kind, the same ids in every layer.
        layers: layer index -> its pools, made by the first cache that reaches the layer.
        lock: that a thread holds while it uses one of the caches.
        trims: how often slots have got other ids.
        paused: forward passes that stand between two layers; slots keep their ids meanwhile.
    """

    def __init__(
        self,
        policy: str | KVPolicy = DEFAULT,
        lock: FairLock | None = None,
        ranks: TPGroup | None = None,
    ) -> None:
        self.policy = KVPolicy.of(policy)
        self.allocators = {bits: SlotPool() for bits in (*self.policy.packed_bits, PLAIN)}
        self.layers: dict[int, LayerPools] = {}
        self.lock = FairLock() if lock is None else lock
        self.ranks = TPGroup() if ranks is None else ranks
        self.trims, self._next_trim = 0, 0.0
        self.paused = 0
        self._pools: list[Pool] = []
        self._reserved: tuple[int, ...] = ()
        """Pools and slots at the last ``reserve``."""
        self._owners: weakref.WeakSet[SlotOwner] = weakref.WeakSet()
        self._joining = threading.Lock()  # held for an instant: a new cache waits for no pass
        self._dropped: deque[list[SequenceTable]] = deque()

    def register(self, owner: SlotOwner) -> None:
        """Take in an owner, whose slots come back when it is gone.

        A finalizer runs between any two steps of any thread, so it only leaves a note, and
        ``collect`` gives the slots back.
        """
        with self._joining:
            self._owners.add(owner)
        weakref.finalize(owner, self._dropped.append, owner.sequences).atexit = False

    def _registered(self) -> list[SlotOwner]:
        """The owners that are there now; others may join while somebody goes through them."""
        with self._joining:
            return list(self._owners)

    def layer(
        self,
        index: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerPools:
        """The pools of a layer, made at the first call.

        Raises:
            InputError: they exist and are for keys of another shape, dtype or device.
        """
        wanted = (kv_heads, head_dim, dtype, device)
        pools = self.layers.get(index)
        if pools is None:
            pools = self.layers[index] = LayerPools(self.policy, *wanted)
            self._pools += pools.by_bits.values()
        there = (pools.kv_heads, pools.head_dim, pools.dtype, pools.device)
        if there != wanted:
            raise InputError(
                f"layer {index}: the store holds {_describe(*there)}, the new keys are "
                f"{_describe(*wanted)}: caches of different models cannot share a store"
            )
        return pools

    def reserve(self) -> None:
        """Let all pools hold the slots that were given out: at once, before a forward pass, as a
        GPU that gets memory waits for the work on its way. Most steps find that they do."""
        slots = [allocator.capacity for allocator in self.allocators.values()]
        wanted = len(self._pools), self.trims, *slots
        if wanted == self._reserved:
            return
        for pools in self.layers.values():
            pools.reserve(self.allocators)
        self._reserved = wanted

    def share(self, sequences: Iterable[SequenceTable]) -> None:
        """Add an owner to every slot of the sequences."""
        self._change_owners(sequences, SlotPool.share)

    def release(self, sequences: Iterable[SequenceTable]) -> None:
        """Take an owner from every slot of the sequences."""
        self._change_owners(sequences, SlotPool.release)

    def _change_owners(
        self, sequences: Iterable[SequenceTable], change: Callable[[SlotPool, list[int]], None]
    ) -> None:
        for sequence in sequences:
            for stream in sequence.streams.values():
                if stream.pages:
                    change(self.allocators[stream.bits], list(stream.pages))
                change(self.allocators[PLAIN], stream.slots)
            change(self.allocators[PLAIN], sequence.spare)

    def collect(self) -> None:
        """Take back the slots of caches that were garbage-collected."""
        while self._dropped:
            self.release(self._dropped.popleft())

    def trim(self) -> None:
        """Give free slots back to the device. Between forward passes only, as slots get other ids:
        where one is ``paused``, nothing happens.

        A pool whose address stays is compacted in place; of others one at a time is copied, so that
        much memory is needed on the way.
        """
        if self.paused:
            return
        owners = self._registered()  # None goes from here on, and comes back with old ids.
        self.collect()
        for bits, slots in self.allocators.items():
            if not slots.free:
                continue
            self.trims += 1
            for pools in self.layers.values():
                # Of a forward pass that was interrupted a pool may not have all slots yet.
                pools.by_bits[bits].reserve(slots.capacity)
            kept = slots.compact()
            for pools in self.layers.values():
                pools.by_bits[bits].keep(kept)
            new_ids = {old: new for new, old in enumerate(kept)}
            for sequence in (row for owner in owners for row in owner.sequences):
                sequence.renumber(bits, new_ids)

    def trim_surplus(self, soon: int = 0) -> None:
        """``trim`` where it is worth moving the slots that are in use, and in a small share of all
        time: a server gives up caches all the time.

        Args:
            soon: bytes of slots that the next prompts take.
        """
        report = self.memory()
        is_time = self._is_time or not report.used_bytes  # Nothing is moved then.
        if report.free_bytes - soon > (report.used_bytes + soon) // 4 and is_time:
            self._trim_timed()

    @property
    def is_on_cpu(self) -> bool:
        """Whether all pools are: on a GPU most free slots lie in pieces of memory that others are
        in."""
        return all(pools.device.type == "cpu" for pools in self.layers.values())

    def trim_after_answer(self) -> None:
        """``trim`` where little is in use, or where it gains and takes a small share of all
        time."""
        report = self.memory()
        if not report.free_bytes:
            return
        gains = report.used_bytes < _GAIN * report.free_bytes
        if report.used_bytes <= _SMALL_BYTES or (gains and self._is_time):
            self._trim_timed()

    @property
    def _is_time(self) -> bool:
        return time.perf_counter() >= self._next_trim

    def _trim_timed(self) -> None:
        start = time.perf_counter()
        self.trim()
        self._next_trim = start + (time.perf_counter() - start) / _TRIMMING

    @property
    def version(self) -> int:
        """The same as long as no pool has moved; a pool that needs to grow moves when it does."""
        return sum([pool.moves for pool in self._pools])

    @property
    def epoch(self) -> int:
        """How often slots were given out or foretold; ``SlotPool`` says what that tells."""
        return sum(slots.epoch for slots in self.allocators.values())

    def bytes_by_modality(self) -> dict[str, int]:
        """Bytes of the slots in use by modality, each once, whoever holds them."""
        self.collect()
        owners = self._registered()
        rows = (row for owner in owners for row in owner.sequences)
        held = SlotSet.of(stream for row in rows for stream in row.streams.values())
        found = {modality.label: 0 for modality in Modality}
        for bits in self.allocators:
            for label, count in held.by_modality(bits).items():
                found[label] += self.bytes_of({bits: count})
        return found

    def bytes_of(self, counts: Mapping[Bits, int], device: torch.device | None = None) -> int:
        """Bytes of so many slots of each kind, in all layers or in those of a device."""
        return sum(
            count * pools.by_bits[bits].slot_bytes
            for pools in self.layers.values()
            if device is None or pools.device == device
            for bits, count in counts.items()
        )

    def memory(self) -> StoreReport:
        """Bytes of the pools, used and free, whoever holds them; each once."""
        self.collect()
        used = free = total = 0
        for pools in self.layers.values():
            for bits, pool in pools.by_bits.items():
                slots = min(self.allocators[bits].used, pool.capacity)
                used += slots * pool.slot_bytes
                free += pool.free_bytes(slots)
                total += pool.device_bytes
        return StoreReport(used, free, total - used - free)


def _describe(kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    return f"{LayerShape(kv_heads, head_dim, dtype)} on {device}"
