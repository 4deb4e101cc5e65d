"""Page store: the slots of several caches, and their bytes in every layer.

All layers of a model store the same tokens, so each slot is allocated once for all layers: a
``SlotPool`` allocates the id, and the ``Pool`` of each layer stores that layer's bytes.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple, Protocol

import torch

from oscar_mm.cache.block_table import SequenceTable, SlotPool, SlotSet
from oscar_mm.cache.states import Marks, held_bytes
from oscar_mm.cache.steady_rows import SteadyRows
from oscar_mm.cache.step_plan import StepPlan
from oscar_mm.cache.window_pages import ZEROS, SlotCounts, WindowPages, begun, reach_of, read
from oscar_mm.errors import InputError
from oscar_mm.kernels.address_range import AddressRange
from oscar_mm.modality import Modality
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import DEFAULT, PLAIN, Bits, KVPolicy
from oscar_mm.tensor_parallel import TPGroup

_TRIMMING = 0.02
"""Maximum share of the time that may be spent on compaction."""
_PAUSE_S = 10.0
"""Minimum seconds between two compactions of ``trim_surplus`` while requests run, which soon need
the slots again."""
_SMALL_BYTES = 1 << 26
"""Maximum number of bytes in use for a compaction after every answer; a CPU moves this number of
bytes in about 20 ms."""
_GAIN = 128
"""Maximum number of bytes that may be moved after an answer per byte freed."""
_COPY_BYTES = 1 << 26
"""Number of bytes copied at a time while a pool is compacted in place."""
_SPARE = 1 / 8
"""Share of its slots by which a pool grows at least where memory is plenty. ``trim_surplus`` allows
a larger share of free slots, so it does not undo this."""
_SPARE_MEMORY = 1 / 16
"""Maximum share of a device's free memory that the spare slots of one growth may take."""


def _free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU in bytes; 0 for other devices."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


class Pool:
    """Memory for one layer's slots of one kind.

    On a GPU, the address of a pool is fixed if the driver supports it.

    Attributes:
        storage: (capacity, *slot_shape), uninitialized until written; replaced by another tensor
            when the capacity changes.
        capacity: number of slots.
        bytes_each: bytes per slot, even while the pool has no slots.
        moves: number of address changes of the storage.
    """

    def __init__(
        self, slot_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = self.moves = 0
        self.bytes_each = math.prod(slot_shape) * dtype.itemsize
        self._range: AddressRange | None = None
        # A pool made in inference mode must be writable outside of it too.
        with torch.inference_mode(False):
            self.storage = torch.empty((0, *slot_shape), dtype=dtype, device=device)

    def reserve(self, capacity: int) -> None:
        """Grow the pool to ``capacity`` slots; the stored bytes are kept.

        Raises:
            torch.OutOfMemoryError: if the device has too little memory; the pool is unchanged.
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

    def keep_address(self) -> None:
        """Give a slot to a pool whose slots have all been removed.

        A tensor without elements has no address, so a CUDA graph that is captured with it would
        read from nowhere once the pool has grown again at its fixed address.
        """
        if self._range is not None and not self.capacity:
            self._resize(self._range, 1)

    def keep(self, slots: list[int]) -> None:
        """Shrink the pool to these slots, which must be in ascending order."""
        if self._range is None:
            with torch.inference_mode(False):
                self.storage, self.capacity = self.storage[slots], len(slots)
            self.moves += 1
            return
        count = max(1, _COPY_BYTES // max(1, self.slot_bytes))
        for start in range(0, len(slots), count):
            run = slots[start : start + count]
            # Slots only move to lower ids, so no slot still to be read is overwritten.
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
        """Bytes per slot; 0 while the pool has no slots."""
        return self.bytes_each if self.capacity else 0

    @property
    def device_bytes(self) -> int:
        """Device memory of the pool in bytes, including the unused rest of the last chunk."""
        return self.storage.nbytes if self._range is None else self._range.nbytes

    def free_bytes(self, used: int) -> int:
        """Return how many bytes would return to the device if only ``used`` slots were kept.

        On a GPU, only full chunks are returned.
        """
        kept = used * self.slot_bytes
        free = self.storage.nbytes - kept
        return free if self._range is None else min(free, self._range.surplus(kept))


def unpacked_dtype(policy: KVPolicy, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of unpacked tokens for a model's dtype.

    This is a 16-bit dtype, unless the policy packs no tokens at all.
    """
    return torch.bfloat16 if policy.packs and dtype == torch.float32 else dtype


class LayerShape(NamedTuple):
    """Shape and dtype of the keys and values that one layer stores per token."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        """Return a description such as "8 KV heads of 128 channels in torch.bfloat16"."""
        return f"{self.kv_heads} KV heads of {self.head_dim} channels in {self.dtype}"


class LayerPools:
    """The pools of one layer of a model.

    Attributes:
        recent: tokens in 16-bit precision, (slots, 2, KV heads, head_dim) of ``unpacked_dtype``.
        pages: bits -> pages, (slots, page_bytes) uint8.
        by_bits: bits -> pool; ``PLAIN`` -> ``recent``.
        formats: bits -> layout of the pages, in ascending order of bits.
        places: places of the pages in a layer with a sliding window; None if each page is at its
            id.
    """

    def __init__(
        self,
        policy: KVPolicy,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        places: WindowPages | None = None,
    ) -> None:
        self.places = places
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
        self._shape = f"{_describe(kv_heads, head_dim, dtype, device)} {id(places)}"

    def reserve(self, allocators: Mapping[Bits, SlotPool]) -> None:
        """Grow the pools to the capacity of the slot allocators."""
        for bits, pool in self.by_bits.items():
            before, capacity = pool.capacity, self.capacity(bits, allocators)
            pool.reserve(capacity)
            if self.places is not None and bits in self.places and before <= ZEROS < capacity:
                pool.storage[: ZEROS + 1] = 0

    def capacity(self, bits: Bits, allocators: Mapping[Bits, SlotPool]) -> int:
        """Return the number of slots of a kind that the layer must have."""
        if self.places is not None and bits in self.places:
            return self.places.capacity(bits)
        return allocators[bits].capacity

    @property
    def size(self) -> tuple[Hashable, ...]:
        """Value that is equal for layers whose slots have the same sizes, numbers and places."""
        return self._shape, *[pool.capacity for pool in self.by_bits.values()]


def alike(layers: Iterable[LayerPools]) -> list[tuple[LayerPools, int]]:
    """Return one layer of each size with the number of such layers.

    Most layers of a model are alike, so measuring one of each size takes a fraction of the time.
    """
    found: dict[tuple[Hashable, ...], list[LayerPools]] = {}
    for pools in layers:
        found.setdefault(pools.size, []).append(pools)
    return [(group[0], len(group)) for group in found.values()]


@dataclass(frozen=True)
class StoreReport:
    """Memory usage of a store's pools; a slot that caches share is counted once.

    Attributes:
        used_bytes: bytes of slots that some cache owns.
        free_bytes: bytes of slots without an owner that ``PageStore.trim`` would return to the
            device; they are reused before the pools grow.
        rounding_bytes: remaining bytes of the pools. A GPU allocates memory for a pool in chunks of
            2 MiB, and the slots in use do not fill the last chunk. Reports of caches exclude them.
        state_bytes: bytes of the states of linear-attention layers, which are outside of the pools.
    """

    used_bytes: int
    free_bytes: int
    rounding_bytes: int = 0
    state_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        """Total device memory of the pools."""
        return self.used_bytes + self.free_bytes + self.rounding_bytes


_NO_MARKS = Marks()


class StateHolder(Protocol):
    """Interface of a cache with states."""

    @property
    def states(self) -> list[torch.Tensor]:
        """Tensors of the states, with all copies."""
        ...


class PageStore:
    """Slots and pools that the caches of one model share::

        store = PageStore("compact")
        chats = [OscarCache("compact", store=store) for _ in range(3)]

    Caches share pages only after ``OscarCache.fork``: pages are in the basis (query-key balancing)
    of the cache that packed them, and a fork inherits that basis. Slots that a cache no longer
    needs return to the store and are reused before its pools grow; ``trim`` returns their memory to
    the device.

    Only one thread at a time may use the store and its caches; pipelines use both only in their
    engine thread. But a cache may be created and garbage-collected at any time in any thread.

    Args:
        policy: policy of all caches: a KVPolicy or a preset's name.
        ranks: tensor-parallel processes, each of which stores some of the heads; by default, only
            this process.

    Attributes:
        allocators: page format, or ``PLAIN`` -> allocator of its slots, whose ids are the same in
            every layer.
        steady: rows whose decode steps are planned together.
        windows: layer index -> size of its sliding window, if the layer stores only what it
            reaches.
        window_pages: places of the pages in these layers, one for each size.
        layers: layer index -> pools, created by the first cache that reaches the layer.
        trims: number of times that slots were renumbered.
        paused: number of forward passes suspended between two layers; slots keep their ids
            meanwhile.
    """

    def __init__(
        self,
        policy: str | KVPolicy = DEFAULT,
        ranks: TPGroup | None = None,
    ) -> None:
        self.policy = KVPolicy.of(policy)
        self.allocators = {bits: SlotPool() for bits in (*self.policy.packed_bits, PLAIN)}
        self.window_pages: list[WindowPages] = []
        self._dropped: deque[list[SequenceTable]] = deque()
        self.steady = SteadyRows(
            self.policy, self.allocators, self._dropped.append, self.window_pages
        )
        self.windows: dict[int, int] = {}
        self._places: dict[int, WindowPages] = {}
        self.layers: dict[int, LayerPools] = {}
        self.ranks = TPGroup() if ranks is None else ranks
        self.trims, self._last_trim, self._next_trim = 0, -math.inf, 0.0
        self._skipped_trim = False
        self.paused = 0
        self._pools: list[Pool] = []
        self._alike: tuple[list[int], list[tuple[LayerPools, int]]] = [], []
        """Capacities of all pools, and the result of ``alike`` while the pools have them."""
        self._reserved: tuple[int, ...] = ()
        """Number of pools and of slots at the last ``reserve``."""
        self._keeps_addresses = False
        """Whether all pools have had an address since then."""
        self._owners: weakref.WeakKeyDictionary[object, list[SequenceTable]] = (
            weakref.WeakKeyDictionary()
        )
        self._with_states: weakref.WeakSet[StateHolder] = weakref.WeakSet()
        self._joining = threading.Lock()  # held briefly: a new cache need not wait for a pass

    def free_outside_windows(self, windows: Mapping[int, int]) -> None:
        """Let layers with sliding windows store only the pages that windows reach.

        Call this before the first tokens. Attention in these layers must not read tokens outside of
        the windows.

        Args:
            windows: layer index -> size of its window in tokens, see ``windows_of``.
        """
        by_size = {size: WindowPages(size, self.allocators) for size in sorted({*windows.values()})}
        self.windows = dict(windows)
        self.window_pages += by_size.values()
        self._places = {index: by_size[size] for index, size in windows.items()}

    def begin_pages(
        self,
        step: StepPlan,
        rows: Sequence[SequenceTable] | None = None,
        past: Iterable[SequenceTable] = (),
    ) -> None:
        """Assign places to the pages that a step begins.

        Args:
            step: the step.
            rows: the sequences after the step, if windows may not reach all new pages.
            past: these sequences before the step.
        """
        if not self.window_pages or not (step.pack_jobs or step.copies):
            return
        pages: dict[Bits, list[int]] = {}
        for bits, page in begun(step.pack_jobs, step.copies):
            pages.setdefault(bits, []).append(page)
        sources = list(read(step.pack_jobs, step.copies))
        marks = {id(row): found for row, found in self._rows()} if rows is not None else {}
        for places in self.window_pages if pages else ():
            sweep = None if self.paused else partial(self._sweep, places, past, sources)
            reached = None
            if rows is not None:
                reached = places.reached(
                    reach_of(row, marks.get(id(row), ()), places.window) for row in rows
                )
            for bits, of_bits in pages.items():
                wanted = None if reached is None else reached[bits]
                places.begin(bits, of_bits, wanted, sweep)

    def place_saved(
        self,
        ids: Mapping[Bits, list[int]],
        saved: Mapping[int, Mapping[Bits, torch.Tensor]],
    ) -> None:
        """Assign places to saved pages; a page of zeros in all layers had none when it was saved.

        Args:
            ids: new ids of the slots by kind.
            saved: layer index -> contents of the slots by kind.
        """
        for places in self.window_pages:
            mine = [saved[index] for index in saved if self._places.get(index) is places]
            for bits in [bits for bits in ids if bits in places and mine]:
                stored = torch.stack([one[bits].any(1).cpu() for one in mine]).any(0).tolist()
                kept = {page for page, any_ in zip(ids[bits], stored, strict=True) if any_}
                places.begin(bits, ids[bits], kept, None)

    def _sweep(
        self,
        places: WindowPages,
        past: Iterable[SequenceTable] = (),
        sources: Iterable[tuple[Bits, int]] = (),
    ) -> None:
        """Take the places of pages that no window of a sequence reaches, except ``sources``."""
        reaches = [reach_of(row.peek(), marks, places.window) for row, marks in self._rows()]
        places.sweep([*reaches, *(reach_of(row, (), places.window) for row in past)], sources)

    def _rows(self) -> Iterator[tuple[SequenceTable, Iterable[int]]]:
        """Yield all sequences and the lengths to which they may be cropped."""
        for owner, rows in self._registered():
            marks = getattr(owner, "marks", _NO_MARKS).kept
            yield from ((row, marks) for row in rows)

    def sweep(self) -> None:
        """Free what layers with sliding windows store outside of the windows; this does nothing
        while a pass is ``paused``."""
        for places in () if self.paused else self.window_pages:
            self._sweep(places)

    def register(self, owner: object, sequences: list[SequenceTable]) -> None:
        """Register an owner of sequences; their slots are released when it is garbage-collected.

        A finalizer can run at any point in any thread, so it only queues the sequences; ``collect``
        releases the slots.

        Args:
            owner: owner of the sequences.
            sequences: the owner's rows, always the same list; must not refer to the owner.
        """
        with self._joining:
            self._owners[owner] = sequences
        weakref.finalize(owner, self._dropped.append, sequences).atexit = False

    def count_states_of(self, holder: StateHolder) -> None:
        """Count the states of a cache in ``memory`` as long as the cache exists."""
        with self._joining:
            self._with_states.add(holder)

    def _registered(self) -> list[tuple[object, list[SequenceTable]]]:
        """Return the current owners and their sequences; other threads may register more while the
        caller iterates."""
        with self._joining:
            return list(self._owners.items())

    def layer(
        self,
        index: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerPools:
        """Return the pools of a layer; the first call creates them.

        Raises:
            InputError: if the pools already exist, for keys of another shape, dtype or device.
        """
        wanted = (kv_heads, head_dim, dtype, device)
        pools = self.layers.get(index)
        if pools is None:
            places = self._places.get(index)
            pools = self.layers[index] = LayerPools(self.policy, *wanted, places)
            self._pools += pools.by_bits.values()
        there = (pools.kv_heads, pools.head_dim, pools.dtype, pools.device)
        if there != wanted:
            raise InputError(
                f"layer {index}: the store has {_describe(*there)}, but the new keys are "
                f"{_describe(*wanted)}: caches of different models cannot share a store"
            )
        return pools

    def reserve(self, *, for_graph: bool = False) -> None:
        """Grow all pools to the capacity of the slot allocators.

        This is called once before a forward pass, since a GPU allocation waits for queued work. In
        most steps, no pool needs to grow.

        Args:
            for_graph: whether the pass is captured or replayed, see ``Pool.keep_address``.
        """
        slots = [allocator.capacity for allocator in self.allocators.values()]
        slots += [x for places in self.window_pages for x in places.capacities]
        wanted = len(self._pools), self.trims, *slots
        if wanted != self._reserved:
            for pools in self.layers.values():
                pools.reserve(self.allocators)
            self._reserved, self._keeps_addresses = wanted, False
        if for_graph and not self._keeps_addresses:
            for pool in self._pools:
                pool.keep_address()
            self._keeps_addresses = True

    def grow_ahead(self, counts: Mapping[Bits, int], *, spares: bool = False) -> None:
        """Grow pools until ``counts[bits]`` slots of each kind are free, as far as there is memory.

        A step for which a pool must grow cannot be launched early, so that the device waits for the
        host. Call this earlier, while the device is busy. Nothing grows on a CPU, where no step is
        launched early, and with several ranks, whose pools must stay the same.

        Args:
            counts: minimum number of free slots by kind.
            spares: whether a pool that must grow grows by at least an eighth of its slots
                (``_SPARE``), if these take at most a sixteenth of the free memory. Each growth maps
                memory in every layer, which takes longer than mapping some more of it.
        """
        if self.is_on_cpu or self.ranks.count > 1:
            return
        self.collect()
        for bits, count in counts.items():
            slots = self.allocators[bits]
            if count <= slots.free:
                continue
            if spares:
                spare = self._affordable(bits, int(slots.capacity * _SPARE))
                count = max(count, slots.free + spare)
            with suppress(torch.OutOfMemoryError):
                for pools in self.layers.values():
                    if pools.places is None or bits not in pools.places:
                        pools.by_bits[bits].reserve(slots.used + count)
                slots.make_free(count)

    def _affordable(self, bits: Bits, count: int) -> int:
        """Return ``count`` if this many more slots take at most ``_SPARE_MEMORY`` of the free
        memory of each device; otherwise 0."""
        devices = {pools.device for pools in self.layers.values()}
        fits = all(
            self.bytes_of({bits: count}, device) <= _SPARE_MEMORY * _free_bytes(device)
            for device in devices
        )
        return count if fits else 0

    def share(self, sequences: Iterable[SequenceTable]) -> None:
        """Add an owner to every slot of the sequences."""
        self._change_owners(sequences, SlotPool.share)

    def release(self, sequences: Iterable[SequenceTable]) -> None:
        """Remove an owner from every slot of the sequences."""
        self._change_owners(sequences, SlotPool.release)

    def _change_owners(
        self, sequences: Iterable[SequenceTable], change: Callable[[SlotPool, Iterable[int]], None]
    ) -> None:
        for sequence in sequences:
            for stream in sequence.streams.values():
                if stream.pages:
                    change(self.allocators[stream.bits], list(stream.pages))
                change(self.allocators[PLAIN], stream.slots)
            change(self.allocators[PLAIN], sequence.spare)

    def collect(self) -> None:
        """Release the slots of garbage-collected caches, and those that steady rows have left."""
        while self._dropped:
            self.release(self._dropped.popleft())

    def trim(self) -> None:
        """Return free slots to the device.

        Slots are renumbered, so call this only between forward passes; it does nothing while a pass
        is ``paused``. Pools at a fixed address are compacted in place; others are copied one at a
        time, which temporarily needs memory for the copy.
        """
        if self.paused:
            return
        owners = self._registered()  # Strong references, so that no owner is collected meanwhile.
        for _, sequences in owners:
            for sequence in sequences:
                sequence.settle()  # Steady rows that end leave slots, which ``collect`` releases.
        self.collect()
        self.sweep()
        for bits, slots in self.allocators.items():
            if not slots.capacity:
                self._release_addresses(bits)
            placed = [places for places in self.window_pages if bits in places]
            if not slots.free and not any(places.counts()[bits].free for places in placed):
                continue
            self.trims += 1
            for pools in self.layers.values():
                # After an interrupted forward pass a pool may lack some slots.
                pools.reserve(self.allocators)
            kept = slots.compact()
            kept_of: dict[WindowPages | None, list[int]] = {
                places: places.compact(bits, kept) for places in placed
            }
            for pools in self.layers.values():
                pools.by_bits[bits].keep(kept_of.get(pools.places, kept))
            new_ids = {old: new for new, old in enumerate(kept)}
            for _, sequences in owners:
                for sequence in sequences:
                    sequence.renumber(bits, new_ids)

    def _release_addresses(self, bits: Bits) -> None:
        """Return the memory of pools that have a slot only for the sake of their address."""
        for pools in self.layers.values():
            if pools.by_bits[bits].capacity:
                pools.by_bits[bits].keep([])
        self._keeps_addresses = False

    def trim_surplus(self, soon: int = 0, *, busy: bool = False) -> None:
        """Run ``trim`` if enough slots are free and trimming takes only a small share of the time.

        A server closes caches too often to trim after each of them.

        Args:
            soon: bytes of slots that the next prompts will need.
            busy: whether requests run; then the last ``trim`` must be at least 10 s ago, and
                otherwise ``trim_if_skipped`` makes up for this call.
        """
        if busy and time.perf_counter() < self._last_trim + _PAUSE_S:
            self._skipped_trim = True
            return
        report = self.memory()
        # Shrinking pools without used slots copies nothing, so it always has time, unless the next
        # prompts need slots: the pools would have to grow again.
        is_time = self._is_time or not (report.used_bytes or soon)
        if report.free_bytes - soon > (report.used_bytes + soon) // 4 and is_time:
            self._trim_timed()

    def trim_if_skipped(self) -> None:
        """Run ``trim_surplus`` if it did nothing because requests ran; call this once none run."""
        if self._skipped_trim:
            self._skipped_trim = False
            self.trim_surplus()

    @property
    def is_on_cpu(self) -> bool:
        """Whether all pools are on the CPU.

        Callers return free slots after an answer only if this is true: on a GPU, most free slots
        are in memory chunks that also contain used slots.
        """
        return all(pools.device.type == "cpu" for pools in self.layers.values())

    def trim_after_answer(self) -> None:
        """Run ``trim`` if few bytes are in use, or if it frees enough and trimming takes only a
        small share of the time."""
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
        start = self._last_trim = time.perf_counter()
        self.trim()
        self._next_trim = start + (time.perf_counter() - start) / _TRIMMING

    @property
    def version(self) -> int:
        """Value that changes whenever a pool moves; pools without a fixed address move when they
        grow."""
        return sum([pool.moves for pool in self._pools])

    def alike(self) -> list[tuple[LayerPools, int]]:
        """Return one layer of each size with the number of such layers; any thread may call this
        while the first prompt creates the pools."""
        capacities = [pool.capacity for pool in list(self._pools)]
        known, found = self._alike
        if capacities != known:
            found = alike(list(self.layers.values()))
            self._alike = capacities, found
        return found

    def bytes_by_modality(self) -> dict[str, int]:
        """Return modality -> bytes of the slots in use; a shared slot is counted once."""
        self.collect()
        owners = self._registered()
        rows = (row.peek() for _, sequences in owners for row in sequences)
        held = SlotSet.of(stream for row in rows for stream in row.streams.values())
        found = {modality.label: 0 for modality in Modality}
        by_modality = cache(held.by_modality)
        for pools, layers in self.alike():
            for bits, pool in pools.by_bits.items():
                for label, count in by_modality(bits, pools.places).items():
                    found[label] += layers * count * pool.slot_bytes
        return found

    def bytes_of_slots(
        self, slots: SlotSet, device: torch.device | None = None, *, own: bool = False
    ) -> int:
        """Return the bytes that layers store in slots.

        Args:
            slots: the slots.
            device: device of the layers; by default, all layers.
            own: whether to leave out slots that also have owners outside of the set.
        """

        def counts(places: WindowPages | None) -> Counter[Bits]:
            found = slots.counts_in(places)
            return found - slots.shared(self.allocators, places) if own else found

        return self._bytes(counts, device)

    def reached_bytes(self, rows: Sequence[SequenceTable], marks: Iterable[int]) -> int:
        """Return the bytes of the slots of sequences; in layers with sliding windows, of those that
        windows at their ends and marks reach.

        Args:
            rows: the sequences, for reading only.
            marks: lengths to which they may be cropped.
        """
        slots = SlotSet.of(stream for row in rows for stream in row.streams.values()).counts

        def counts(places: WindowPages | None) -> Mapping[Bits, int]:
            if places is None:
                return slots
            reached = places.reached(reach_of(row, marks, places.window) for row in rows)
            return slots | {bits: len(pages) for bits, pages in reached.items()}

        return self._bytes(counts, None)

    def used_bytes(self, device: torch.device) -> int:
        """Return the bytes of slots with an owner in the layers on a device."""
        return self._bytes(
            lambda places: {bits: one.used for bits, one in self._slots(places).items()}, device
        )

    def free_bytes(self, device: torch.device) -> int:
        """Return the bytes of slots without an owner in the layers on a device."""
        return self._bytes(
            lambda places: {bits: one.free for bits, one in self._slots(places).items()}, device
        )

    def bytes_of(self, counts: Mapping[Bits, int], device: torch.device | None = None) -> int:
        """Return the bytes of ``counts[bits]`` slots of each kind, summed over all layers or over
        the layers on a device."""
        return self._bytes(lambda _: counts, device)

    def _bytes(
        self,
        counts: Callable[[WindowPages | None], Mapping[Bits, int]],
        device: torch.device | None,
    ) -> int:
        """Return the bytes of slots, summed over all layers or over the layers on a device.

        Args:
            counts: function that returns the number of slots by kind in layers that store pages at
                these places; called once for all such layers.
            device: the device; None for all layers.
        """
        counts = cache(counts)
        return sum(
            layers * count * pools.by_bits[bits].slot_bytes
            for pools, layers in self.alike()
            if device is None or pools.device == device
            for bits, count in counts(pools.places).items()
        )

    def _slots(self, places: WindowPages | None) -> dict[Bits, SlotCounts]:
        """Return the numbers of slots by kind in layers that store pages at these places."""
        found = {
            bits: SlotCounts(one.capacity, one.used, one.free)
            for bits, one in self.allocators.items()
        }
        return found if places is None else found | places.counts()

    def memory(self) -> StoreReport:
        """Return the bytes of pools and states; a shared slot or state is counted once."""
        self.collect()
        used = free = 0
        total = sum(pool.device_bytes for pool in self._pools)
        slots = cache(self._slots)
        for pools, layers in self.alike():
            for bits, pool in pools.by_bits.items():
                counts = slots(pools.places)[bits]
                used += layers * min(counts.used, pool.capacity) * pool.slot_bytes
                kept = min(counts.capacity - counts.free, pool.capacity)
                free += layers * pool.free_bytes(kept)
        with self._joining:
            holders = list(self._with_states)
        states = held_bytes(state for holder in holders for state in holder.states)
        return StoreReport(used, free, total - used - free, states)


def _describe(kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    return f"{LayerShape(kv_heads, head_dim, dtype)} on {device}"
