"""Ledger: which token is where. Host-side, once for all layers; layers only move bytes.

A forward pass brings every layer the keys and values of the same new tokens. The ledger decides
once what is to happen to them (a ``Step``: slots to fill, slots to write) and every layer carries
it out on its own pools. New tokens are in 16 bit. A token that has left the window is packed: it
takes the next slot of its stream's last page or, where pages are packed as a whole, waits until a
page is full.
Crop, fork, beam reordering, forgetting tokens and reset are changes of the ledger alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import NamedTuple

import numpy as np

from oscar_mm.cache.rows import NOWHERE, SINK, Row, Stream
from oscar_mm.cache.slot_allocator import SlotAllocator
from oscar_mm.cache.slot_growth import most_spare, packed_of
from oscar_mm.cache.step import Filling, Step
from oscar_mm.cache.store import PageStore
from oscar_mm.errors import InputError
from oscar_mm.modality import PADDING, Modality
from oscar_mm.ops.store_torch import CENTER_TOKENS
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import PLAIN, Bits, KVPolicy

Indices = np.ndarray | list[int]
_NUMBERS = itertools.count()
_SMALL_WINDOW = 4
"""A smaller one has too few keys for a page's center."""


class Ledger:
    """Sequences of a batch and the slots that hold them.

    Args:
        store: that the slots are of.
        owns_slots: False where other ledgers have the same sequences and give the slots back.

    Attributes:
        number: of this ledger, which no other one has.
        changes: grows with every change of a sequence. ``PageStore.trim`` counts its own.
    """

    def __init__(self, store: PageStore, *, owns_slots: bool = True) -> None:
        self.store, self.policy, self.allocators = store, store.policy, store.allocators
        # Always the same list: the store takes its slots back once the ledger is gone.
        self.sequences: list[Row] = []
        self.number, self.changes = next(_NUMBERS), 0
        self._foretold: _Foretold | None = None
        if owns_slots:
            store.register(self)

    def fork(self) -> Ledger:
        """A ledger of the same sequences, over the same slots; what it adds is its own."""
        twin = Ledger(self.store)
        twin.hold([sequence.copy() for sequence in self.sequences])
        return twin

    def hold(self, sequences: list[Row]) -> None:
        """Put these sequences in the place of those before, as an owner of all their slots."""
        old = self.sequences[:]
        self.changes += 1
        # In this order, so that whatever interrupts it no slot is given back twice.
        self.store.share(sequences)
        self.sequences[:] = sequences
        self.store.release(old)

    @property
    def length(self) -> int:
        """Tokens of a row, padding included; the same for all rows."""
        return len(self.sequences[0].codes) if self.sequences else 0

    @property
    def version(self) -> tuple[int, ...]:
        """The same as long as the sequences and the ids of their slots are."""
        return self.number, self.changes, self.store.trims

    def advance(self, modalities: np.ndarray | Sequence[np.ndarray]) -> Step:
        """Take in new tokens: (batch, tokens) modality ids, -1 for padding.

        Args:
            modalities: a list of (tokens,) instead for rows of unequal length, whose new tokens
                come one row after the other as a batch of one.
        """
        self.store.collect()
        version = self.version
        foretold, self._foretold = self._foretold, None
        self.changes += 1
        if not self.sequences:
            self.sequences += [Row() for _ in range(len(modalities))]
        if (
            foretold is not None
            and isinstance(modalities, np.ndarray)
            and foretold.holds(modalities, self.sequences, version, self.store)
        ):
            return foretold.take_place(modalities, self.sequences, self.allocators)
        return _Advance(self.policy, self.allocators).of(self.sequences, modalities)

    def foretold(self, modalities: np.ndarray) -> Step | None:
        """The ``Step`` of ``advance`` for (batch, 1) tokens, if it needs no more room.

        No sequence changes, and nobody sees what the step writes before ``advance``, whose step
        names this one as ``foretold`` if it does the same. Slots that were free may be foretold to
        others too (``SlotAllocator.promises``).

        Returns:
            None where a page would be copied or a pool grown, or no token stored.
        """
        self.store.collect()
        self._foretold = None
        free = {bits: _Unchanged(slots) for bits, slots in self.allocators.items()}
        rows = [sequence.before() for sequence in self.sequences]
        for row, sequence in zip(rows, self.sequences, strict=True):
            row.spare = sequence.spare.copy()
        before = [_Before.of(row) for row in rows]
        advance = _Advance(self.policy, free)
        try:
            step = advance.of(rows, modalities)
            codes = [row.codes[-1] for row in rows]
        except _NoRoomError:
            return None
        finally:
            for row, (length, *_) in zip(rows, before, strict=True):
                del row.codes[length:]  # They are the sequence's own.
        step.past = self.sequences
        if step.copies or not (step.writes is not None or step.fillings):
            return None
        given = {bits: slots.given for bits, slots in free.items() if slots.given}
        owners = {
            (bits, slot): self.allocators[bits].owners(slot)
            for bits, slots in free.items()
            for slot in slots.counted
        }
        self._foretold = _Foretold(
            *(step, self.version, self.store.promises, before, modalities.copy()),
            *(codes, rows, step.fillings, given, advance.freed, owners),
        )
        return step

    def crop(self, count: int) -> None:
        """Remove the last ``count`` tokens of every row."""
        if not 0 <= count <= self.length:
            raise ValueError(f"cannot remove {count} tokens from a cache of {self.length}")
        self.changes += 1
        for sequence in self.sequences if count else ():
            removed = np.frombuffer(bytes(sequence.codes[-count:]), dtype=np.uint8)
            for code, stream in sequence.streams.items():
                pages, slots = stream.drop_last(int((removed == code).sum()))
                self.allocators[PLAIN].release(slots)
                if pages:
                    self.allocators[stream.bits].release(pages)
            sequence.stored -= int((removed != NOWHERE).sum())
            del sequence.codes[-count:]

    def select(self, rows: Sequence[int]) -> None:
        """Make the batch these rows of it, in this order, with repetition: slots are shared."""
        for row in rows:
            if not 0 <= row < len(self.sequences):
                raise IndexError(f"row {row} of a cache of {len(self.sequences)} sequences")
        self.hold([self.sequences[row].copy() for row in rows])

    def forget(self, row: int, start: int, stop: int) -> None:
        """Take the tokens start to stop - 1 of a row out; its length and positions stay."""
        if not 0 <= row < len(self.sequences):
            raise InputError(f"forget: row {row} of a cache of {len(self.sequences)} sequences")
        if not 0 <= start <= stop <= self.length:
            raise InputError(
                f"forget: tokens {start} to {stop} of a cache of {self.length}; "
                "start <= stop, counted from 0"
            )
        self.changes += 1
        sequence = self.sequences[row]
        codes = np.frombuffer(bytes(sequence.codes[:stop]), dtype=np.uint8)
        before, gone = codes[:start], codes[start:]
        for code in np.unique(gone[gone != NOWHERE]).tolist():
            stream = sequence.streams[code]
            first = int((before == code).sum())
            last = first + int((gone == code).sum())
            sequence.stored -= last - first
            packed = stream.packed
            if first < packed:
                cut, left = stream.cut_pages(first, min(last, packed))
                self.allocators[stream.bits].share(left)
                self.allocators[stream.bits].release(cut)
            if last > packed:
                out = slice(max(first - packed, 0), last - packed)
                self.allocators[PLAIN].release(stream.slots[out])
                del stream.slots[out]
        sequence.codes[start:stop] = bytes([NOWHERE]) * (stop - start)

    def clear(self) -> None:
        """Forget all sequences."""
        self.select([])

    def streams(self) -> Iterator[Stream]:
        """All streams of all rows."""
        for sequence in self.sequences:
            yield from sequence.streams.values()

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables: one per token, four per slot of 16 bit, eight per page's entry."""
        ids = sum(2 * len(stream.pages) + len(stream.slots) for stream in self.streams())
        return sum(len(sequence.codes) for sequence in self.sequences) + 4 * ids


class _NoRoomError(Exception):
    """A pool would have to grow."""


class _Unchanged:
    """Tells the slots that a ``SlotAllocator`` would give, and takes none back.

    Attributes:
        given: the slots that were told.
        counted: slots whose owners were asked for.
    """

    def __init__(self, slots: SlotAllocator) -> None:
        self._slots = slots
        self.given, self.counted = list[int](), list[int]()

    def allocate(self, count: int) -> list[int]:
        taken = len(self.given)
        found = [self._slots.foretell(taken + index) for index in range(count)]
        given = [slot for slot in found if slot is not None]
        if len(given) < count:
            raise _NoRoomError
        self.given += given
        return given

    def release(self, slots: Sequence[int]) -> None:
        pass

    def is_shared(self, slot: int) -> bool:
        self.counted.append(slot)
        return self._slots.is_shared(slot)

    def owners(self, slot: int) -> int:
        return self._slots.owners(slot)


class _Before(NamedTuple):
    """A sequence as it is, to be compared later.

    Attributes:
        length: of the sequence.
        stored: tokens.
        streams: in whose place a step puts others where it changes them.
    """

    length: int
    stored: int
    streams: list[Stream]

    @classmethod
    def of(cls, row: Row) -> _Before:
        return cls(len(row.codes), row.stored, list(row.streams.values()))

    def is_of(self, row: Row) -> bool:
        """Whether the sequence has not changed since."""
        return (
            (len(row.codes), row.stored) == self[:2]
            and len(row.streams) == len(self.streams)
            and all(map(is_, row.streams.values(), self.streams))
        )


class _Foretold(NamedTuple):
    """What ``Ledger.advance`` is to do if it comes as foretold.

    Attributes:
        step: that was foretold.
        version: ``Ledger.version`` then.
        promises: ``PageStore.promises`` once all was foretold.
        before: the step, each sequence.
        modalities: (batch, 1) ids of the tokens.
        codes: stream code of each row's token.
        rows: the sequences after the step, but for their codes.
        fillings: of the step.
        given: slots that the step takes.
        freed: slots of 16 bit that each row gives up.
        owners: how many owners slots have that the step writes to or empties.
    """

    step: Step
    version: tuple[int, ...]
    promises: int
    before: list[_Before]
    modalities: np.ndarray
    codes: list[int]
    rows: list[Row]
    fillings: list[Filling]
    given: dict[Bits, list[int]]
    freed: dict[int, list[int]]
    owners: dict[tuple[Bits, int], int]

    def holds(
        self,
        modalities: np.ndarray,
        sequences: list[Row],
        version: tuple[int, ...],
        store: PageStore,
    ) -> bool:
        """Whether these tokens do what was foretold; rows that have ended since do nothing."""
        if modalities.shape != self.modalities.shape:
            return False
        changed = modalities != self.modalities
        if changed.any() and (self.given or (modalities[changed] != PADDING).any()):
            return False
        if version != self.version or (self.given and store.promises != self.promises):
            return False
        for row, before, goes_on in zip(sequences, self.before, modalities != PADDING, strict=True):
            if goes_on and not before.is_of(row):
                return False
        return all(
            store.allocators[bits].owners(slot) == owners
            for (bits, slot), owners in self.owners.items()
        )

    def take_place(
        self,
        modalities: np.ndarray,
        sequences: list[Row],
        allocators: Mapping[Bits, SlotAllocator],
    ) -> Step:
        """Change the sequences and allocators as foretold, and give the step that does it."""
        step = Step(foretold=self.step, real=_real_tokens(modalities))
        step.past = [Row(row.codes, row.streams, row.stored) for row in sequences]
        goes_on = (modalities[:, 0] != PADDING).tolist()
        for bits, slots in self.given.items():
            allocators[bits].claim(slots)
        for place, sequence in enumerate(sequences):
            if not goes_on[place]:
                sequence.codes.append(NOWHERE)
                continue
            row = self.rows[place]
            sequence.codes.append(self.codes[place])
            sequence.streams, sequence.stored = row.streams, row.stored
            sequence.spare = row.spare
            allocators[PLAIN].release(self.freed.get(place, ()))
        step.fillings = [filling for filling in self.fillings if goes_on[filling.row]]
        if (writes := self.step.writes) is not None:
            step.writes = writes[:, [goes_on[row] for row in writes[0].tolist()]]
            step.writes = step.writes if step.writes.size else None
        return step


def _real_tokens(modalities: np.ndarray) -> list[np.ndarray] | None:
    """For each row the indices of its tokens that are not padding; None if all are real."""
    real = modalities != PADDING
    if real.all():
        return None
    if real.shape[1] == 1:
        one, none = np.arange(1), np.arange(0)
        return [one if there else none for there in real[:, 0].tolist()]
    return [np.flatnonzero(row) for row in real]


class _Advance:
    """How new tokens change sequences, and what every layer is to do.

    Attributes:
        freed: slots of 16 bit that each row gives up, once all rows have theirs, so that none
            depends on what another one packs.
    """

    def __init__(
        self, policy: KVPolicy, allocators: Mapping[Bits, SlotAllocator | _Unchanged]
    ) -> None:
        self._policy, self._allocators, self._recent = policy, allocators, allocators[PLAIN]
        self._step = Step()
        # Rows, indices of new tokens, slots.
        self._writes = list[int](), list[int](), list[int]()
        self.freed: dict[int, list[int]] = {}

    def of(self, sequences: list[Row], modalities: np.ndarray | Sequence[np.ndarray]) -> Step:
        """Take modality ids into the sequences, as of ``Ledger.advance``."""
        step = self._step
        step.past = [sequence.before() for sequence in sequences]
        if isinstance(modalities, np.ndarray):
            step.real = _real_tokens(modalities)
        else:
            step.lengths = [len(row) for row in modalities]
        for row, (sequence, ids) in enumerate(zip(sequences, modalities, strict=True)):
            if len(ids) > 1:
                self._take_many(row, sequence, ids)
            else:
                self._take_one(row, sequence, int(ids[0]))
        for slots in self.freed.values():
            self._recent.release(slots)
        if self._writes[0]:
            step.writes = np.array(self._writes)
        if step.lengths is not None:
            self._line_up(np.cumsum([0, *step.lengths]))
        return step

    def _line_up(self, starts: np.ndarray) -> None:
        """Name new tokens as those of a batch of one, where each row begins at its start."""

        def lined_up(source: np.ndarray, row: int) -> np.ndarray:
            return np.where(source >= 0, source + starts[row], source)

        for filling in self._step.fillings:
            filling.source = lined_up(filling.source, filling.row)
            filling.begins = {
                page: lined_up(source, filling.row) for page, source in filling.begins.items()
            }
            filling.row = 0
        if (writes := self._step.writes) is not None:
            writes[1] += starts[writes[0]]
            writes[0] = 0

    def _stream_code(self, sequence: Row, modality: int, stored: int) -> int:
        """Stream code of a token that comes after so many stored ones."""
        sink = stored < self._policy.sinks and self._policy.bits_for(Modality(modality)).packed
        return modality + SINK if sink else modality

    def _take_one(self, row: int, sequence: Row, modality: int) -> None:
        """A token of a decode step. It gets a spare slot, and the token that leaves the window
        leaves its own: nothing is allocated at most steps."""
        if modality == PADDING:
            sequence.codes.append(NOWHERE)
            return
        code = self._stream_code(sequence, modality, sequence.stored)
        sequence.codes.append(code)
        sequence.stored += 1
        spare, window = sequence.spare, self._policy.window
        stream = self._own_stream(sequence, code)
        new, emptied = [0], list[int]()
        recent = sequence.recent(window + 1)
        if len(recent) > window and (leaving := recent[0]) in sequence.streams:
            in_window = recent.count(leaving, 1)
            if leaving == code:
                emptied, new = self._pack(row, sequence, code, new, in_window)
            else:
                self._own_stream(sequence, leaving)
                emptied, _ = self._pack(row, sequence, leaving, [], in_window)
        before = sequence.in_16_bit + len(emptied)
        most = most_spare(self._policy, stream.bits, before, begun=bool(stream.pages))
        if new:
            if not spare:
                spare += self._recent.allocate(most)
            self._write(row, stream, new, [spare.pop()])
        own = [slot for slot in emptied if not self._recent.is_shared(slot)]
        kept = own[: max(0, most - len(spare))]
        if freed := [slot for slot in emptied if slot not in kept] + spare[most:]:
            self.freed[row] = freed
        spare[most:] = []
        spare += kept

    def _take_many(self, row: int, sequence: Row, ids: np.ndarray) -> None:
        codes = ids.astype(np.uint8)  # PADDING, -1, becomes NOWHERE, 255
        real = np.flatnonzero(ids != PADDING)
        for stored, index in enumerate(real.tolist()[: self._policy.sinks], sequence.stored):
            codes[index] = self._stream_code(sequence, int(ids[index]), stored)
        sequence.stored += len(real)
        sequence.codes += codes.tobytes()
        self._recent.release(sequence.spare)
        sequence.spare = []
        for code in sorted({*sequence.streams, *np.unique(codes[codes != NOWHERE]).tolist()}):
            self._own_stream(sequence, code)
        recent = sequence.recent(self._policy.window)
        left = []
        for code, stream in sequence.streams.items():
            new = np.flatnonzero(codes == code)
            emptied, unpacked = self._pack(row, sequence, code, new, recent.count(code))
            self._recent.release(emptied)
            if len(unpacked):
                left.append((stream, unpacked))
        # At once, so that the pool grows to what is needed and no further.
        slots = self._recent.allocate(sum(len(new) for _, new in left)) if left else []
        for stream, new in left:
            self._write(row, stream, new, slots[: len(new)])
            slots = slots[len(new) :]

    def _own_stream(self, sequence: Row, code: int) -> Stream:
        """The stream of a code, which the step may change: the one before it stays as it is. A new
        one if the sequence has none."""
        stream = sequence.streams.get(code)
        if stream is None:
            modality = Modality(code % SINK)
            bits = PLAIN if code >= SINK else self._policy.bits_for(modality)
            stream = Stream(modality, bits)
        sequence.streams[code] = own = stream.copy()
        return own

    def _write(self, row: int, stream: Stream, new: Indices, slots: list[int]) -> None:
        """Put new tokens into slots of 16 bit."""
        for column, entries in zip(self._writes, ([row] * len(new), new, slots), strict=True):
            column.extend(entries)
        stream.slots += slots

    def _pack(
        self, row: int, sequence: Row, code: int, new: Indices, in_window: int
    ) -> tuple[list[int], Indices]:
        """Pack what is to be packed of a stream, old and new tokens together.

        Returns:
            slots of 16 bit that are free then, and the new tokens that are left.
        """
        stream, policy = sequence.streams[code], self._policy
        waiting = max(0, len(stream.slots) + len(new) - in_window)
        count = packed_of(policy, stream.bits, waiting, begun=bool(stream.pages))
        if not count:
            return [], new
        slots = self._allocators[stream.bits]
        room = stream.room if policy.by_token else 0
        in_last = min(room, count)
        pages = [self._own_last_page(stream, slots)] if in_last else []
        begun = slots.allocate(-(-(count - in_last) // PAGE_TOKENS))
        emptied, old = stream.slots[:count], np.array(stream.slots, np.int64)
        source = np.concatenate([~old, new]) if len(new) else ~old
        first = PAGE_TOKENS - room if in_last else 0
        filling = Filling(row, stream.bits, pages + begun, first, source[:count], {})
        if policy.center and begun:
            self._begin(filling, sequence, code, source, in_last, begun)
        self._step.fillings.append(filling)
        stream.fill(in_last, begun, count - in_last)
        stream.slots = stream.slots[count:]
        return emptied, new[count - len(emptied) :]

    def _own_last_page(self, stream: Stream, slots: SlotAllocator | _Unchanged) -> int:
        """The last page, or its copy if others have it too."""
        page = stream.pages[-1]
        # A page out of whose middle tokens were forgotten has two entries, both of this stream.
        if slots.is_shared(page) and slots.owners(page) > stream.pages.count(page):
            [own] = slots.allocate(1)
            self._step.copies.append((stream.bits, page, own))
            slots.release([page])
            stream.move_last_page(own)
        return stream.pages[-1]

    def _begin(
        self,
        filling: Filling,
        sequence: Row,
        code: int,
        source: np.ndarray,
        first: int,
        pages: list[int],
    ) -> None:
        """Choose the tokens whose mean is the center of pages that begin.

        They are a page's first one, and those of its stream that are in the window when that one
        leaves it: the same ones whether tokens come one by one or together. A small window has too
        few: the tokens are 32 of those that come together, or of the page before.

        Args:
            source: of the stream's tokens, those in 16 bit and new ones.
            first: of them the first that goes to the first of the pages.
        """
        starts = first + PAGE_TOKENS * np.arange(len(pages))
        stops = np.minimum(starts + CENTER_TOKENS, len(source))
        if self._policy.window >= _SMALL_WINDOW:
            places = sequence.stored_positions(code)[-len(source) :]
            after = np.searchsorted(places, places[starts] + self._policy.window, side="right")
            stops = np.minimum(stops, after)
        elif len(source) >= CENTER_TOKENS:
            starts = np.minimum(starts, stops - CENTER_TOKENS)
        elif (stream := sequence.streams[code]).stores_center:
            filling.before, stops = stream.pages[-1], starts
        filling.begins = {
            page: source[start:stop]
            for page, start, stop in zip(pages, starts.tolist(), stops.tolist(), strict=True)
        }
