"""Block tables and slot pools: which slots are free, and which store the tokens of a sequence.

A slot stores a page, or a single token in 16-bit precision. ``SlotPool`` has the free list and the
reference counts. A ``SequenceTable`` describes one row of the batch; it has a ``ModalityTable`` (a
stream) for the tokens of each modality. ``SlotSet`` is the union of the slots of several streams.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from typing import Any, Protocol

import numpy as np

from oscar_mm.modality import Modality
from oscar_mm.ops.decode_tables import INT32, SECOND, START, Entries
from oscar_mm.ops.store_torch import STORED_CENTER
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.policy import PLAIN, Bits, KVPolicy


class SlotPool:
    """Free list and reference counts of slots. Forks of a sequence share slots.

    Decode steps take slots from the end of the free list, and prompts take them from its beginning:
    a prompt seldom takes a slot that was planned for the step in flight.
    """

    def __init__(self) -> None:
        self._references: list[int] = []
        self._uses: list[int] = []
        self._free: list[int] = []

    @property
    def capacity(self) -> int:
        """Number of slots that a layer's pool must have."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Number of slots without an owner."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of slots with at least one owner."""
        return self.capacity - self.free

    def allocate(self, count: int, *, for_prompt: bool = False) -> list[int]:
        """Return ``count`` slots with one owner each; the pool grows if necessary."""
        if not count:
            return []
        self.ensure_free(count)
        if for_prompt:
            slots = self._free[:count][::-1]
            del self._free[:count]
        else:
            slots = [self._free.pop() for _ in range(count)]
        self._own(slots)
        return slots

    def ensure_free(self, count: int) -> None:
        """Grow the pool if it has fewer than ``count`` free slots; steps take the new ones first.

        It grows to the required size, but by at least 1/32 of its capacity: a prompt wastes no
        memory, and a long answer seldom moves the pool.
        """
        missing = count - len(self._free)
        if missing > 0:
            self._free += self._grown(max(missing, self.capacity // 32))

    def make_free(self, count: int) -> None:
        """Grow the pool until exactly ``count`` slots are free, unless there are more; prompts take
        the new ones first, so that planned steps keep theirs."""
        self._free[:0] = self._grown(max(0, count - self.free))

    def _grown(self, count: int) -> list[int]:
        """Add ``count`` slots without owners, and return them in the order of the free list."""
        grown = range(self.capacity, self.capacity + count)
        self._references += [0] * count
        self._uses += [0] * count
        return list(reversed(grown))

    def plan_ahead(self, place: int, planned: Container[int]) -> tuple[int, int] | None:
        """Return the slot that would be allocated next if the planned ones were allocated, and the
        place after it; None if the pool would have to grow.

        Args:
            place: place in the free list, counted from its end, before which all slots are planned.
            planned: planned slots. Others may have been released after a plan, and then come
                before its slots.
        """
        while place < len(self._free):
            slot = self._free[-1 - place]
            place += 1
            if slot not in planned:
                self._uses[slot] += 1
                return slot, place
        return None

    def uses(self, slot: int) -> int:
        """Return how often a slot has been allocated or planned; if the number has changed since a
        plan, others may have written to the slot."""
        return self._uses[slot]

    def claim(self, slots: Sequence[int]) -> None:
        """Allocate planned slots, which must not have been allocated or planned for others
        since."""
        claimed = set(slots)
        left, place = len(claimed), len(self._free)
        # Planned slots are near the end, before those that have been released since.
        while left:
            place -= 1
            left -= self._free[place] in claimed
        self._free[place:] = [slot for slot in self._free[place:] if slot not in claimed]
        self._own(slots)

    def _own(self, slots: Iterable[int]) -> None:
        """Give each slot its first owner."""
        for slot in slots:
            self._references[slot] = 1
            self._uses[slot] += 1

    def share(self, slots: Iterable[int]) -> None:
        """Add an owner to each slot."""
        for slot in slots:
            self._references[slot] += 1

    def first_shared(self, slots: Iterable[int]) -> int | None:
        """Return the index of the first slot with several owners; None if there is none."""
        owners = self._references
        return next((index for index, slot in enumerate(slots) if owners[slot] > 1), None)

    def count_shared(self, slots: Iterable[int]) -> int:
        """Return how many slots with several owners come before the first with a single one."""
        owners = self._references
        return sum(1 for _ in takewhile(lambda slot: owners[slot] > 1, slots))

    def release(self, slots: Iterable[int]) -> None:
        """Remove an owner from each slot; a slot without owners becomes free."""
        for slot in slots:
            self._references[slot] -= 1
            if not self._references[slot]:
                self._free.append(slot)

    def retain(self, slots: Iterable[int]) -> None:
        """Add an owner to each slot, including free slots, which leave the free list."""
        kept = set(slots)
        if taken := [slot for slot in kept if not self._references[slot]]:
            self._free = [slot for slot in self._free if slot not in kept]
            for slot in taken:
                self._uses[slot] += 1
        self.share(kept)

    def compact(self) -> list[int]:
        """Remove the free slots and return the old ids of the others; the i-th id becomes id i."""
        kept = [slot for slot, owners in enumerate(self._references) if owners]
        self._references = [self._references[slot] for slot in kept]
        self._uses = [self._uses[slot] for slot in kept]
        self._free = []
        return kept

    def owners(self, slot: int) -> int:
        """Return the number of owners of a slot."""
        return self._references[slot]

    def is_shared(self, slot: int) -> bool:
        """Return whether the slot has more than one owner and so must not be written to."""
        return self._references[slot] > 1


class NoFreeSlotsError(Exception):
    """Error raised if a pool would have to grow for a planned allocation."""


class PlannedSlots:
    """Slots that a planned step uses for one row.

    Attributes:
        given: kind, allocated slot, and its ``SlotPool.uses``.
        owners: kind, slot whose owners were queried, and their number.
        replaced: kind, and shared page that the row replaces by a copy of its own.
    """

    def __init__(self) -> None:
        self.given: list[tuple[Bits, int, int]] = []
        self.owners: list[tuple[Bits, int, int]] = []
        self.replaced: list[tuple[Bits, int]] = []

    def hold(
        self, allocators: Mapping[Bits, SlotPool], earlier: Container[tuple[Bits, int]] = ()
    ) -> bool:
        """Return whether no slot has been used for anything else, or changed its owners, since.

        Args:
            allocators: the pools.
            earlier: (kind, slot) pairs that planned steps before this one will allocate; they have
                no owner yet, so their owners are not compared.
        """
        for bits, slot, uses in self.given:
            if allocators[bits].uses(slot) != uses:
                return False
        return all(
            (bits, slot) in earlier or allocators[bits].owners(slot) == owners
            for bits, slot, owners in self.owners
        )


class DryRunSlots:
    """Dry-run allocator: predicts the allocations of a ``SlotPool`` without making them.

    Args:
        bits: kind of the slots.
        slots: the pool.

    Attributes:
        row: receives the predicted slots; the caller replaces it for each row.
    """

    def __init__(self, bits: Bits, slots: SlotPool) -> None:
        self._bits, self._slots = bits, slots
        self._given, self._place = set[int](), 0
        self.row = PlannedSlots()

    def allocate(self, count: int, *, for_prompt: bool = False) -> list[int]:
        """Return the next ``count`` slots that the pool would allocate for a decode step."""
        assert not for_prompt, "only decode steps are planned ahead"
        given = list[int]()
        for _ in range(count):
            found = self._slots.plan_ahead(self._place, self._given)
            if found is None:
                raise NoFreeSlotsError
            slot, self._place = found
            given.append(slot)
            self.row.given.append((self._bits, slot, self._slots.uses(slot)))
            self.skip(slot)
        return given

    def skip(self, slot: int) -> None:
        """Count a slot as allocated by an earlier plan."""
        self._given.add(slot)

    def release(self, slots: Sequence[int]) -> None:
        """Record pages to release with the step; ``TokenPlacer.freed`` has the 16-bit slots."""
        if self._bits != PLAIN:
            self.row.replaced += [(self._bits, slot) for slot in slots]

    def is_shared(self, slot: int) -> bool:
        """Return whether a slot has more than one owner."""
        owners = 1 if slot in self._given else self._slots.owners(slot)
        self.row.owners.append((self._bits, slot, owners))
        return owners > 1

    def owners(self, slot: int) -> int:
        """Return the number of owners of a slot."""
        return self._slots.owners(slot)

    def count_shared(self, slots: Iterable[int]) -> int:
        """Return how many slots with several owners come before the first with a single one.

        Nothing is recorded: the plan also holds if there are fewer by then.
        """
        return self._slots.count_shared(takewhile(lambda slot: slot not in self._given, slots))


@dataclass(slots=True)
class ModalityTable:
    """Slots of a stream, that is, of the tokens of one modality in sequence order.

    All layers use the same slots. An entry of the stream is a page and the range of its tokens that
    are in use. Tokens are packed once, in order, each into the next position of a page; positions
    that were freed by a crop are written again. A page with forgotten tokens in its middle has two
    consecutive entries.

    Copies share the tuples of their pages, since a long stream is copied at every step.

    Attributes:
        modality: modality of all tokens.
        bits: format of the pages; ``PLAIN`` if all tokens stay in 16-bit precision.
        pages: page id of each entry.
        starts: first used token of each entry's page.
        stops: end of each entry's range, exclusive and greater than its start.
        slots: slot ids of the tokens in 16-bit precision, which follow the packed tokens; int32.
    """

    modality: Modality
    bits: Bits
    pages: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    slots: array[int] = field(default_factory=lambda: array(INT32))
    _known: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, array[int]] | None = (
        field(default=None, repr=False, compare=False)
    )

    @property
    def packed(self) -> int:
        """Number of packed tokens."""
        return sum(self.stops) - sum(self.starts)

    @property
    def tokens(self) -> int:
        """Number of tokens in the stream."""
        return self.packed + len(self.slots)

    def entries(self, flag: int) -> array[int]:
        """Return int32 pairs, one for each entry: page, and stop + ``START`` * start + ``flag``."""
        if self._known is not None:
            pages, starts, stops, known, entries = self._known
            if (
                pages is self.pages
                and starts is self.starts
                and stops is self.stops
                and known == flag
            ):
                return entries
        entries = array(INT32)
        for page, start, stop in zip(self.pages, self.starts, self.stops, strict=True):
            entries.extend((page, stop + START * start + flag))
        self._known = self.pages, self.starts, self.stops, flag, entries
        return entries

    def copy(self) -> ModalityTable:
        """Return a copy that shares the slots; the caller must add an owner to each slot."""
        return ModalityTable(
            self.modality,
            self.bits,
            self.pages,
            self.starts,
            self.stops,
            self.slots[:],
            self._known,
        )

    @property
    def room(self) -> int:
        """Number of free token positions in the last page, after the last packed token."""
        return PAGE_TOKENS - self.stops[-1] if self.pages else 0

    @property
    def stores_center(self) -> bool:
        """Whether the last page, when it is full, contains the tokens ``STORED_CENTER``, all from
        this stream."""
        return bool(self.pages) and self.starts[-1] <= STORED_CENTER.start

    def move_last_page(self, page: int) -> None:
        """Replace the last entry's page with another page that has the same tokens."""
        self.pages = (*self.pages[:-1], page)

    def fill(self, in_last: int, pages: list[int], in_new: int) -> None:
        """Append ``in_last`` packed tokens to the last page and ``in_new`` to the new ``pages``."""
        if in_last:
            # Done at every decode step: update the cached entries instead of rebuilding them.
            flag = 0 if self._known is None else self._known[3]
            entries = self.entries(flag)[:]
            entries[-1] += in_last
            self.stops = (*self.stops[:-1], self.stops[-1] + in_last)
            self._known = self.pages, self.starts, self.stops, flag, entries
        if pages:
            full = len(pages) - 1
            self.pages += tuple(pages)
            self.starts += (0,) * len(pages)
            self.stops += (*(PAGE_TOKENS,) * full, in_new - full * PAGE_TOKENS)

    def drop_last(self, count: int) -> tuple[list[int], array[int]]:
        """Remove the last ``count`` tokens and return the ids of the pages and slots to release.

        If a page is cut, its bytes stay the same and fewer of its tokens are in use; no token is
        quantized again.
        """
        left = len(self.slots) - min(count, len(self.slots))
        count -= len(self.slots) - left
        slots, self.slots = self.slots[left:], self.slots[:left]
        left = len(self.pages)
        while count and count >= (last := self.stops[left - 1] - self.starts[left - 1]):
            left -= 1
            count -= last
        pages, self.pages = self.pages[left:], self.pages[:left]
        self.starts, self.stops = self.starts[:left], self.stops[:left]
        if count:
            self.stops = (*self.stops[:-1], self.stops[-1] - count)
        return list(pages), slots

    def latest(self, count: int) -> ModalityTable:
        """Return a table of the last ``count`` tokens, for reading only: it owns no slots.

        Args:
            count: number of tokens, at most those of the stream.
        """
        slots = self.slots[max(0, len(self.slots) - count) :]
        packed, first = count - len(slots), len(self.pages)
        while packed > 0:
            first -= 1
            packed -= self.stops[first] - self.starts[first]
        starts = self.starts[first:]
        if packed < 0:  # The first page also has earlier tokens.
            starts = (starts[0] - packed, *starts[1:])
        return ModalityTable(
            self.modality, self.bits, self.pages[first:], starts, self.stops[first:], slots
        )

    def cut_pages(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Remove the packed tokens start to stop - 1 of the stream.

        Returns:
            Pages of the removed entries, and pages of the entries that replace them. The caller
            must first add an owner to the latter, then remove an owner from the former.
        """
        ends = np.cumsum(np.subtract(self.stops, self.starts))
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, stop, side="left"))
        # The parts of the first and the last affected entry that remain.
        keep_to = self.stops[first] - int(ends[first] - start)
        keep_from = self.stops[last] - int(ends[last] - stop)
        left = [
            (page, begin, end)
            for page, begin, end in (
                (self.pages[first], self.starts[first], keep_to),
                (self.pages[last], keep_from, self.stops[last]),
            )
            if begin < end
        ]
        before = self.pages[first : last + 1]
        columns = tuple(zip(*left, strict=True)) or ((), (), ())
        self.pages, self.starts, self.stops = (
            (*old[:first], *new, *old[last + 1 :])
            for old, new in zip((self.pages, self.starts, self.stops), columns, strict=True)
        )
        return list(before), list(columns[0])


_CHANNELS = 64


@lru_cache(maxsize=64)
def min_page_tokens(policy: KVPolicy, bits: Bits) -> int:
    """Return the minimum number of tokens to begin a page; 128 if pages are written all at once.

    With heads of 64 channels, a page with this number of tokens takes no more bytes than the tokens
    take in 16-bit precision; with larger heads, it takes fewer.
    """
    page = PageFormat.of(policy, bits, 1, _CHANNELS)
    return page.codec.min_tokens(page.page_bytes, 2 * 2 * _CHANNELS)


SINK = len(Modality)
"""Offset of the stream codes of sinks. A stream's code is its modality; for the sinks of a packed
modality, this offset is added."""
NOWHERE = 255
"""Stream code of padding and forgotten tokens, which have a sequence index but are not stored."""
_NOWHERE = bytes([NOWHERE])


class DeferredSteps(Protocol):
    """Decode steps of a row that its ``SequenceTable`` does not include yet.

    Attributes:
        index: index of the row in ``oscar_mm.cache.steady_rows.SteadyRows``.
    """

    index: int

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Lock that is held while steps are added or the table takes them."""
        ...

    @property
    def count(self) -> int:
        """Number of steps, of one token each."""
        ...

    def after(self, steps: int) -> SequenceTable:
        """Return the table with the first ``steps`` steps."""
        ...

    def end(self) -> SequenceTable:
        """Return the table with all steps; no more of them follow."""
        ...


def _with_all_steps(name: str) -> Any:
    """Return a property for an attribute, which first adds the steps that were deferred."""

    def get(row: SequenceTable) -> Any:
        row.settle()
        return getattr(row, name)

    def set_(row: SequenceTable, value: Any) -> None:
        row.settle()
        setattr(row, name, value)

    return property(get, set_)


class SequenceTable:
    """Block table of one row of the batch: its streams, and which stream each token is in.

    While decode steps are planned for many rows at once (``SteadyRows``), the table lags behind.
    Reading or setting any attribute but ``deferred``, ``end`` and ``length`` first adds the missing
    tokens to the table, and so ends these steps; ``peek`` does not end them.

    Attributes:
        codes: stream code of every token.
        streams: streams by code.
        stored: number of tokens in streams.
        spare: unused 16-bit slots that this sequence owns. If a token leaves the window in a
            decode step, its slot is kept here for later tokens, which take the oldest one.
        keeps: number of spare slots that the sequence keeps where each packed token passes its slot
            on; one for ordinary steps. A pass with drafts needs one for each of its tokens: it must
            not write to a slot that one of its own steps empties, because that step may be
            rejected, and its token then is still in the slot.
        deferred: steps that are not in the table yet; None if the table is complete.
        end: number of tokens of a snapshot (``before``), whose codes may have grown since; None for
            other tables.
    """

    __slots__ = ("_codes", "_spare", "_stored", "_streams", "deferred", "end", "keeps")
    codes: bytearray = _with_all_steps("_codes")
    streams: dict[int, ModalityTable] = _with_all_steps("_streams")
    stored: int = _with_all_steps("_stored")
    spare: list[int] = _with_all_steps("_spare")

    def __init__(
        self,
        codes: bytearray | None = None,
        streams: dict[int, ModalityTable] | None = None,
        stored: int = 0,
        spare: list[int] | None = None,
    ) -> None:
        self.deferred: DeferredSteps | None = None
        self.end: int | None = None
        self._codes = bytearray() if codes is None else codes
        self._streams = {} if streams is None else streams
        self._stored, self._spare = stored, [] if spare is None else spare
        self.keeps = 1

    def __eq__(self, other: object) -> bool:
        """Return whether both tables have the same tokens in the same slots."""
        return isinstance(other, SequenceTable) and self.fields == other.fields

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def settle(self) -> None:
        """Add the deferred steps to the table."""
        if (deferred := self.deferred) is None:
            return
        with deferred.lock:
            if (deferred := self.deferred) is None:  # Another thread was first.
                return
            self._codes, self._streams, self._stored, self._spare = deferred.end().fields
            self.deferred = None

    @property
    def fields(self) -> tuple[bytearray, dict[int, ModalityTable], int, list[int]]:
        """All four of codes, streams, stored and spare; the deferred steps are added once."""
        self.settle()
        return self._codes, self._streams, self._stored, self._spare

    def peek(self) -> SequenceTable:
        """Return a table with all tokens, to be read only; steps may be deferred further."""
        if (deferred := self.deferred) is None:
            return self
        with deferred.lock:
            now = self.deferred
            return self if now is None else now.after(now.count)

    @property
    def length(self) -> int:
        """Number of tokens, padding included."""
        if (deferred := self.deferred) is None:
            return len(self._codes)
        with deferred.lock:
            now = self.deferred
            return len(self._codes) + (0 if now is None else now.count)

    @property
    def in_16_bit(self) -> int:
        """Number of tokens in 16-bit precision."""
        return sum([len(stream.slots) for stream in self.streams.values()])

    def positions(self, code: int) -> np.ndarray:
        """Return the ascending sequence indices of a stream's tokens."""
        return np.flatnonzero(np.frombuffer(self.codes, dtype=np.uint8) == code)

    def real_tokens(self, count: int) -> np.ndarray:
        """Return (count,) bool: whether each of the last ``count`` tokens is stored."""
        return np.frombuffer(bytes(self.codes[-count:]), dtype=np.uint8) != NOWHERE

    def entries(self, bits: tuple[Bits | None, Bits | None]) -> Entries:
        """Return the page entries and the 16-bit slots that attention reads.

        Args:
            bits: first and second page format.
        """
        pages, slots = array(INT32), array(INT32)
        for stream in self._with_text_last():
            slots += stream.slots
            if stream.pages:
                pages += stream.entries(SECOND if stream.bits == bits[1] else 0)
        return pages, slots

    def _with_text_last(self) -> list[ModalityTable]:
        """Return the streams with text last, whose entries ``SteadyRows`` extends in place."""
        text = self.streams.get(Modality.TEXT)
        others = [stream for stream in self.streams.values() if stream is not text]
        return others if text is None else [*others, text]

    def latest(self, count: int) -> SequenceTable:
        """Return a table of the last ``count`` tokens, for reading only: it owns no slots.

        Padding and forgotten tokens count, but are not in the table.
        """
        end = len(self.codes) if self.end is None else self.end
        codes = self.codes[max(0, end - count) : end]
        streams = {code: stream.latest(codes.count(code)) for code, stream in self.streams.items()}
        return SequenceTable(codes, streams, len(codes) - codes.count(NOWHERE))

    def before(self) -> SequenceTable:
        """Return a snapshot of the streams and the spare slots.

        The codes are shared and may grow after the snapshot. A step replaces each stream that it
        changes with a changed copy.
        """
        codes, streams, stored, spare = self.fields
        snapshot = SequenceTable(codes, streams.copy(), stored, spare.copy())
        snapshot.end = len(codes)
        return snapshot

    def copy(self) -> SequenceTable:
        """Return a copy that shares all but the spare slots; the caller must add the owners."""
        streams = {code: stream.copy() for code, stream in self.streams.items()}
        return SequenceTable(self.codes[:], streams, self.stored)

    def stored_positions(self, code: int) -> np.ndarray:
        """Return the ascending indices of a stream's tokens among the stored tokens only."""
        codes = np.frombuffer(self.codes, dtype=np.uint8)
        return np.flatnonzero(codes[codes != NOWHERE] == code)

    def renumber(self, bits: Bits, ids: Mapping[int, int]) -> None:
        """Replace the ids of one kind of slot."""
        for stream in self.streams.values():
            if bits == PLAIN:
                stream.slots = array(INT32, [ids[slot] for slot in stream.slots])
            elif stream.bits == bits:
                stream.pages = tuple(ids[page] for page in stream.pages)
        if bits == PLAIN:
            self.spare[:] = [ids[slot] for slot in self.spare]

    def recent(self, window: int) -> bytes:
        """Return the stream codes of the last ``window`` stored tokens."""
        # The loop repeats only if many consecutive tokens are padding or forgotten.
        size = window + 1
        while True:
            stored = self.codes[-size:].replace(_NOWHERE, b"")
            if len(stored) >= window or size >= len(self.codes):
                return bytes(stored[len(stored) - min(window, len(stored)) :])
            size *= 8


class PagePlaces(Protocol):
    """Interface of ``oscar_mm.cache.window_pages.WindowPages``: which pages a layer stores."""

    def __contains__(self, bits: object, /) -> bool:
        """Return whether it stores only some of the slots of a kind."""
        ...

    def has(self, bits: Bits, page: int) -> bool:
        """Return whether it stores a page."""
        ...


class SlotSet:
    """Set of the slots of several streams: pages by their bits, 16-bit slots under ``PLAIN``.

    Entries of a stream, rows of a batch and forks may refer to the same slot, which is counted
    once.
    """

    def __init__(self) -> None:
        # By bits: slot -> number of references, and slot -> modality of its tokens; in order of
        # first reference.
        self._names = defaultdict[Bits, Counter[int]](Counter)
        self._modalities = defaultdict[Bits, dict[int, str]](dict)

    @classmethod
    def of(cls, streams: Iterable[ModalityTable]) -> SlotSet:
        """Return the slots of streams that belong to the same store."""
        found = cls()
        for stream in streams:
            for bits, slots in ((stream.bits, stream.pages), (PLAIN, stream.slots)):
                if slots:
                    found._names[bits].update(slots)
                    modalities = dict.fromkeys(slots, stream.modality.label)
                    found._modalities[bits].update(modalities)
        return found

    def slots(self, bits: Bits) -> list[int]:
        """Return the ids of the slots of one kind, in order of first reference."""
        return list(self._names.get(bits, ()))

    @property
    def counts(self) -> Counter[Bits]:
        """Bits -> number of slots."""
        return self.counts_in(None)

    def counts_in(self, places: PagePlaces | None) -> Counter[Bits]:
        """Return bits -> number of slots that a layer stores.

        Args:
            places: places of the layer's pages; None if it stores all of them.
        """
        return Counter(
            {
                bits: len(names)
                if places is None or bits not in places
                else sum(places.has(bits, page) for page in names)
                for bits, names in self._names.items()
            }
        )

    def by_modality(self, bits: Bits, places: PagePlaces | None = None) -> Counter[str]:
        """Return modality ("text", "image", ...) -> number of slots of one kind; see
        ``counts_in``."""
        found = self._modalities.get(bits, {})
        if places is None or bits not in places:
            return Counter(found.values())
        return Counter(label for page, label in found.items() if places.has(bits, page))

    def shared(
        self, allocators: Mapping[Bits, SlotPool], places: PagePlaces | None = None
    ) -> Counter[Bits]:
        """Return bits -> number of slots that also have owners outside of this set; see
        ``counts_in``."""
        found = Counter[Bits]()
        for bits, names in self._names.items():
            owners = allocators[bits].owners
            several = [slot for slot, count in names.items() if owners(slot) > count]
            if places is not None and bits in places:
                several = [page for page in several if places.has(bits, page)]
            found[bits] = len(several)
        return found
