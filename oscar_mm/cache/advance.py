"""Advance: which slots new tokens take, and what every layer is to do with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from oscar_mm.cache.rows import NOWHERE, SINK, Row, Stream
from oscar_mm.cache.slot_growth import most_spare, packed_of
from oscar_mm.cache.slots import SlotAllocator
from oscar_mm.cache.step import Filling, Step
from oscar_mm.modality import PADDING, Modality
from oscar_mm.ops.store_torch import CENTER_TOKENS
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import PLAIN, Bits, KVPolicy

Indices = np.ndarray | list[int]
_SMALL_WINDOW = 4
"""A smaller one has too few keys for a page's center."""


class NoRoomError(Exception):
    """A pool would have to grow."""


class UnchangedSlots:
    """Tells the slots that a ``SlotAllocator`` would give, and takes none back.

    Attributes:
        given: the slots that were told.
        counted: slots whose owners were asked for.
    """

    def __init__(self, slots: SlotAllocator) -> None:
        self._slots = slots
        self.given, self.counted = list[int](), list[int]()

    def allocate(self, count: int) -> list[int]:
        """The slots that would be given next."""
        taken = len(self.given)
        found = [self._slots.foretell(taken + index) for index in range(count)]
        given = [slot for slot in found if slot is not None]
        if len(given) < count:
            raise NoRoomError
        self.given += given
        return given

    def release(self, slots: Sequence[int]) -> None:
        """Nothing is given back."""

    def is_shared(self, slot: int) -> bool:
        """Whether a slot has more than one owner."""
        self.counted.append(slot)
        return self._slots.is_shared(slot)

    def owners(self, slot: int) -> int:
        """How many owners a slot has."""
        return self._slots.owners(slot)


def real_tokens(modalities: np.ndarray) -> list[np.ndarray] | None:
    """For each row the indices of its tokens that are not padding; None if all are real."""
    real = modalities != PADDING
    if real.all():
        return None
    if real.shape[1] == 1:
        one, none = np.arange(1), np.arange(0)
        return [one if there else none for there in real[:, 0].tolist()]
    return [np.flatnonzero(row) for row in real]


class Advance:
    """How new tokens change sequences, and what every layer is to do.

    Attributes:
        freed: slots of 16 bit that each row gives up, once all rows have theirs, so that none
            depends on what another one packs.
    """

    def __init__(
        self, policy: KVPolicy, allocators: Mapping[Bits, SlotAllocator | UnchangedSlots]
    ) -> None:
        self._policy, self._allocators, self._recent = policy, allocators, allocators[PLAIN]
        self._step = Step()
        # Rows, indices of new tokens, slots.
        self._writes = list[int](), list[int](), list[int]()
        self.freed: dict[int, list[int]] = {}

    def of(self, sequences: list[Row], modalities: np.ndarray | Sequence[np.ndarray]) -> Step:
        """Take modality ids into the sequences, as of ``Ledger.advance``."""
        step = self._step
        if isinstance(modalities, np.ndarray):
            step.real = real_tokens(modalities)
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

    def _own_last_page(self, stream: Stream, slots: SlotAllocator | UnchangedSlots) -> int:
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
