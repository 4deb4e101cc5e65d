"""Placement: which slots new tokens take, and a forecast of the slots that a request will take.

``TokenPlacer`` applies the rules to the tokens of a prompt and then to each token of the answer,
and plans what every layer does; ``oscar_mm.cache.steady_rows`` does so for many answers at once,
while their slots do not change. ``slot_forecast`` computes the resulting slot counts in advance,
for every length of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from oscar_mm.cache.block_table import (
    NOWHERE,
    SINK,
    DryRunSlots,
    ModalityTable,
    SequenceTable,
    SlotPool,
    min_page_tokens,
)
from oscar_mm.cache.step_plan import PackJob, StepPlan
from oscar_mm.cache.window_pages import WindowPages, room
from oscar_mm.modality import PADDING, Modality
from oscar_mm.ops.store_torch import CENTER_TOKENS
from oscar_mm.pages.codecs.registry import codec_of
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import PLAIN, Bits, KVPolicy

Count = TypeVar("Count", int, np.ndarray)
MAX_SPARE = 32
"""Maximum number of spare 16-bit slots of a sequence."""
Indices = np.ndarray | list[int]
_SMALL_WINDOW = 4
"""Minimum window size in tokens at which the keys in the window suffice for a page's center."""


def packed_count(policy: KVPolicy, bits: Bits, waiting: Count, room: int) -> Count:
    """Return how many of a stream's tokens outside of the window are packed.

    First, the free positions of the last page are filled. Further tokens fill new pages, and the
    remaining tokens begin a page if there are enough of them (``min_page_tokens``). The result does
    not depend on whether tokens arrive one by one or together.

    Args:
        policy: how keys and values are stored.
        bits: format of the stream's pages.
        waiting: number of the stream's tokens in 16-bit precision outside of the window, or an
            array of such numbers.
        room: number of free positions in the stream's last page; 0 if pages are written all at
            once.
    """
    if bits == PLAIN:
        return waiting * 0
    last = (waiting - room) * (waiting > room) % PAGE_TOKENS
    return waiting - last * (last < min_page_tokens(policy, bits))


@lru_cache
def begins_page_at(policy: KVPolicy) -> int:
    """Return how many text tokens in 16-bit precision a sequence has when its next page begins.

    The tokens in the window count too. The previous page is full.

    Returns:
        0 if pages are written all at once or text is not packed.
    """
    bits = policy.bits_for(Modality.TEXT)
    if not (bits.packed and codec_of(policy).appends_tokens):
        return 0
    return policy.window + min_page_tokens(policy, bits)


def max_spare(in_16_bit: int, room: int, to_page: int = 0, keeps: int = 1, shared: int = 0) -> int:
    """Return the maximum number of spare 16-bit slots of a sequence after a decode step.

    If each packed token passes its slot on to a later token, the maximum is ``keeps``, and more
    while the oldest slots are shared, since those are not passed on. Otherwise, several slots are
    allocated at once, so that other sequences cannot take them from an in-flight step, pools seldom
    grow and most steps are steady. Their maximum is a quarter of the sequence's 16-bit tokens or
    the number of tokens until the next page begins, whichever is more, but no more than
    ``MAX_SPARE``.

    Args:
        in_16_bit: number of the sequence's tokens in 16-bit precision, before the step.
        room: number of free positions in the last page of the new token's stream; 0 if pages are
            written all at once.
        to_page: number of text tokens until the next page begins, see ``begins_page_at``; 0 for a
            stream without pages, since a short sequence would then take more memory than in 16-bit
            precision.
        keeps: see ``SequenceTable``.
        shared: number of the stream's oldest slots that other sequences share.
    """
    return max(keeps, min(1 + shared if room else max(in_16_bit // 4, to_page), MAX_SPARE))


def real_tokens(modalities: np.ndarray) -> list[np.ndarray] | None:
    """Return, for each row, the indices of the tokens that are not padding; None if there is no
    padding."""
    real = modalities != PADDING
    if real.all():
        return None
    if real.shape[1] == 1:
        one, none = np.arange(1), np.arange(0)
        return [one if there else none for there in real[:, 0].tolist()]
    return [np.flatnonzero(row) for row in real]


class TokenPlacer:
    """Adds new tokens to sequences and plans what every layer does.

    Args:
        policy: how keys and values are stored.
        allocators: allocators of the slots, by kind.
        window_pages: see ``room``.

    Attributes:
        freed: row -> 16-bit slots that the row releases. They are released after the tokens of all
            rows have been placed, so that no row's slots depend on what another row packs.
    """

    def __init__(
        self,
        policy: KVPolicy,
        allocators: Mapping[Bits, SlotPool | DryRunSlots],
        window_pages: Sequence[WindowPages] = (),
    ) -> None:
        self._window_pages, self._begun = window_pages, set[tuple[Bits, int]]()
        self._policy, self._allocators, self._recent = policy, allocators, allocators[PLAIN]
        self._appends_tokens = codec_of(policy).appends_tokens
        self._begins_page_at = begins_page_at(policy)
        self._step = StepPlan()
        # Rows, token indices and slots of the new tokens.
        self._writes = list[int](), list[int](), list[int]()
        self.freed: dict[int, list[int]] = {}

    def place(self, row: int, sequence: SequenceTable, ids: np.ndarray) -> None:
        """Add the (tokens,) new tokens of a row to its sequence."""
        if len(ids) > 1:
            self._take_many(row, sequence, ids)
        else:
            self.place_one(row, sequence, int(ids[0]))

    def finish(self, modalities: np.ndarray | Sequence[np.ndarray]) -> StepPlan:
        """Return the plan once all rows have been placed."""
        step = self._step
        if isinstance(modalities, np.ndarray):
            step.real = real_tokens(modalities)
        else:
            step.lengths = [len(row) for row in modalities]
        for slots in self.freed.values():
            self._recent.release(slots)
        if self._writes[0]:
            step.writes = np.array(self._writes)
        if step.lengths is not None:
            self._line_up(np.cumsum([0, *step.lengths]))
        return step

    def _line_up(self, starts: np.ndarray) -> None:
        """Change rows and token indices to those of a single row that concatenates all rows."""

        def lined_up(source: np.ndarray, row: int) -> np.ndarray:
            return np.where(source >= 0, source + starts[row], source)

        for pack_job in self._step.pack_jobs:
            pack_job.source = lined_up(pack_job.source, pack_job.row)
            pack_job.begins = {
                page: lined_up(source, pack_job.row) for page, source in pack_job.begins.items()
            }
            pack_job.row = 0
        if (writes := self._step.writes) is not None:
            writes[1] += starts[writes[0]]
            writes[0] = 0

    def _stream_code(self, sequence: SequenceTable, modality: int, stored: int) -> int:
        """Return the stream code of a token that follows ``stored`` stored tokens."""
        sink = stored < self._policy.sinks and self._policy.bits_for(Modality(modality)).packed
        return modality + SINK if sink else modality

    def place_one(self, row: int, sequence: SequenceTable, modality: int) -> None:
        """Add the token of a decode step to a row's sequence.

        The new token takes a spare slot, and the slot of the token that leaves the window becomes a
        spare slot, so most steps allocate no slots.
        """
        if modality == PADDING:
            sequence.codes.append(NOWHERE)
            return
        code = self._stream_code(sequence, modality, sequence.stored)
        sequence.codes.append(code)
        sequence.stored += 1
        spare, window = sequence.spare, self._policy.window
        stream = self._own_stream(sequence, code)
        in_slots, new, emptied = len(stream.slots), [0], list[int]()
        recent = sequence.recent(window + 1)
        if len(recent) > window and (leaving := recent[0]) in sequence.streams:
            in_window = recent.count(leaving, 1)
            if leaving == code:
                emptied, new = self._pack(row, sequence, code, new, in_window)
            else:
                self._own_stream(sequence, leaving)
                emptied, _ = self._pack(row, sequence, leaving, [], in_window)
        before = sequence.in_16_bit + len(emptied)
        room = self._room(stream)
        shared = self._recent.count_shared(stream.slots)
        to_page = self._begins_page_at - in_slots if stream.pages else 0
        most = max_spare(before, room, to_page, sequence.keeps, shared)
        if new:
            if not spare:
                spare += self._recent.allocate(most)
            self._write(row, stream, new, [spare.pop(0)])
        freed = spare[most:]
        del spare[most:]
        for slot in emptied:
            if len(spare) < most and not self._recent.is_shared(slot):
                spare.append(slot)
            else:
                freed.append(slot)
        if freed:
            self.freed[row] = freed

    def _take_many(self, row: int, sequence: SequenceTable, ids: np.ndarray) -> None:
        codes = ids.astype(np.uint8)  # PADDING, -1, becomes NOWHERE, 255
        real = np.flatnonzero(ids != PADDING)
        for stored, index in enumerate(real.tolist()[: self._policy.sinks], sequence.stored):
            codes[index] = self._stream_code(sequence, int(ids[index]), stored)
        sequence.stored += len(real)
        before = sequence.recent(self._policy.window)
        sequence.codes += codes.tobytes()
        self._recent.release(sequence.spare)
        sequence.spare = []
        for code in sorted({*sequence.streams, *np.unique(codes[codes != NOWHERE]).tolist()}):
            self._own_stream(sequence, code)
        recent = sequence.recent(self._policy.window)
        left = []
        for code, stream in sequence.streams.items():
            new = np.flatnonzero(codes == code)
            in_window = recent.count(code)
            # In other streams, no token leaves the window and none is packed, as when tokens
            # arrive one by one.
            if before.count(code) + len(new) > in_window:
                emptied, new = self._pack(row, sequence, code, new, in_window)
                self._recent.release(emptied)
            if len(new):
                left.append((stream, new))
        # One allocation, so that the pool grows only to what is needed.
        count = sum(len(new) for _, new in left)
        slots = self._recent.allocate(count, for_prompt=True)
        for stream, new in left:
            self._write(row, stream, new, slots[: len(new)])
            slots = slots[len(new) :]

    def _own_stream(self, sequence: SequenceTable, code: int) -> ModalityTable:
        """Replace a stream with a copy that the step may change, and return the copy; create the
        stream if it does not exist."""
        stream = sequence.streams.get(code)
        if stream is None:
            modality = Modality(code % SINK)
            bits = PLAIN if code >= SINK else self._policy.bits_for(modality)
            stream = ModalityTable(modality, bits)
        sequence.streams[code] = own = stream.copy()
        return own

    def _room(self, stream: ModalityTable) -> int:
        """Return the number of tokens that can be appended to a stream's last page."""
        if not self._appends_tokens:
            return 0
        is_new = stream.pages and (stream.bits, stream.pages[-1]) in self._begun
        return stream.room if is_new else room(stream, self._window_pages)

    def _write(self, row: int, stream: ModalityTable, new: Indices, slots: list[int]) -> None:
        """Add the writes of new tokens to 16-bit slots to the plan."""
        rows, tokens, targets = self._writes
        rows += [row] * len(slots)
        tokens.extend(new)
        targets += slots
        stream.slots.extend(slots)

    def _pack(
        self, row: int, sequence: SequenceTable, code: int, new: Indices, in_window: int
    ) -> tuple[list[int], Indices]:
        """Add a pack job for the tokens of a stream, stored or new, that must be packed now.

        Args:
            new: indices of the stream's new tokens.
            in_window: number of the stream's tokens that stay in the window.

        Returns:
            The 16-bit slots that become free, and the new tokens that are not packed.
        """
        stream, policy = sequence.streams[code], self._policy
        waiting = max(0, len(stream.slots) + len(new) - in_window)
        room = self._room(stream)
        # In most decode steps, one token fills the next position of the last page.
        fits = waiting <= room and stream.bits != PLAIN
        count = waiting if fits else packed_count(policy, stream.bits, waiting, room)
        if not count:
            return [], new
        slots = self._allocators[stream.bits]
        in_last = min(room, count)
        pages = [self._own_last_page(stream, slots)] if in_last else []
        for_prompt = len(new) > 1
        begun = slots.allocate(-(-(count - in_last) // PAGE_TOKENS), for_prompt=for_prompt)
        self._begun.update((stream.bits, page) for page in begun)
        emptied, centers = stream.slots[:count], bool(policy.center and begun)
        old = np.array([~slot for slot in (stream.slots if centers else emptied)], np.int64)
        more = new if centers else new[: count - len(emptied)]
        source = np.concatenate([old, more]) if len(more) else old
        first = PAGE_TOKENS - room if in_last else 0
        pack_job = PackJob(row, stream.bits, pages + begun, first, source[:count], {})
        if centers:
            self._begin(pack_job, sequence, code, source, in_last, begun)
        self._step.pack_jobs.append(pack_job)
        stream.fill(in_last, begun, count - in_last)
        stream.slots = stream.slots[count:]
        return emptied.tolist(), new[count - len(emptied) :]

    def _own_last_page(self, stream: ModalityTable, slots: SlotPool | DryRunSlots) -> int:
        """Return the last page, after replacing it with a copy if other sequences share it."""
        page = stream.pages[-1]
        # A page with forgotten tokens in its middle has two entries, both of this stream.
        if slots.is_shared(page) and slots.owners(page) > stream.pages.count(page):
            [own] = slots.allocate(1)
            self._step.copies.append((stream.bits, page, own))
            self._begun.add((stream.bits, own))
            slots.release([page])
            stream.move_last_page(own)
        return stream.pages[-1]

    def _begin(
        self,
        pack_job: PackJob,
        sequence: SequenceTable,
        code: int,
        source: np.ndarray,
        first: int,
        pages: list[int],
    ) -> None:
        """Choose the tokens whose mean is the center of each new page.

        These are the page's first token and the tokens of its stream that are in the window when
        the first token leaves it; they are the same whether tokens arrive one by one or together. A
        small window has too few of these tokens; then the center is the mean of 32 tokens that
        arrive together, or of 32 tokens of the previous page.

        Args:
            pack_job: pack job to complete.
            sequence: sequence of the tokens.
            code: stream code of the tokens.
            source: sources of the stream's tokens, both 16-bit and new tokens.
            first: index in ``source`` of the first token of the new pages.
            pages: ids of the new pages.
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
            pack_job.before, stops = stream.pages[-1], starts
        pack_job.begins = {
            page: source[start:stop]
            for page, start, stop in zip(pages, starts.tolist(), stops.tolist(), strict=True)
        }


@dataclass(frozen=True, eq=False)
class SlotForecast:
    """Number of slots of a sequence after 0, 1, 2, ... tokens of the answer, by bits (``PLAIN``:
    tokens in 16-bit precision).

    Attributes:
        held: bits -> number of all slots of the sequence.
        added: bits -> number of newly allocated slots. Slots that the sequence had before are not
            released meanwhile, since a turn continues a fork.
        marks: number of the prompt's marks, whose windows are stored too.
    """

    held: dict[Bits, np.ndarray]
    added: dict[Bits, np.ndarray]
    marks: int = 0

    def in_window(self, window: int) -> SlotForecast:
        """Return the forecast for layers with a sliding window that store only what it reaches.

        This is an upper bound for one request: while a prompt is read in chunks, the windows at
        both ends of a chunk and at each of the prompt's marks are stored; at one mark if the prompt
        has none.

        Args:
            window: size of the window in tokens.
        """
        marks = max(1, self.marks)
        most = (2 + marks) * -(-window // PAGE_TOKENS) + (1 + marks) * len(Modality)
        held, added = (
            {bits: np.minimum(x, most) if bits.packed else x for bits, x in counts.items()}
            for counts in (self.held, self.added)
        )
        return SlotForecast(held, added)

    def until(self, answer: int) -> SlotForecast:
        """Return the forecast for up to ``answer`` tokens of the answer; for 0 or less, for the
        prompt only."""
        stop = max(0, answer) + 1
        return SlotForecast(
            held={bits: counts[:stop] for bits, counts in self.held.items()},
            added={bits: counts[:stop] for bits, counts in self.added.items()},
            marks=self.marks,
        )


def bytes_over_time(slots: Mapping[Bits, np.ndarray], slot_bytes: Mapping[Bits, int]) -> np.ndarray:
    """Return the memory in bytes after 0, 1, 2, ... tokens of the answer.

    Args:
        slots: slot counts of a ``SlotForecast``, by bits.
        slot_bytes: bytes of one slot, by bits.
    """
    sizes = [counts.astype(np.int64) * slot_bytes[bits] for bits, counts in slots.items()]
    return np.sum(sizes, axis=0)


def pool_bytes(slots: Mapping[Bits, np.ndarray], slot_bytes: Mapping[Bits, int]) -> int:
    """Return by how many bytes pools grow if they have no free slots initially and never shrink.

    Args:
        slots: slot counts of a ``SlotForecast``, by bits.
        slot_bytes: bytes of one slot, by bits.
    """
    total = 0
    for bits, counts in slots.items():
        first, most = int(counts[0]), int(counts.max())
        # Same growth as in ``SlotPool``: exact for the prompt, slightly ahead of the answer.
        total += slot_bytes[bits] * (most if most == first else most + most // 32)
    return total


def slot_forecast(
    policy: KVPolicy, new: np.ndarray, answer: int, past: SequenceTable | None = None
) -> SlotForecast:
    """Forecast the number of slots that one sequence will take.

    Args:
        policy: how keys and values are stored.
        new: (tokens,) modality ids of a prompt; padding, -1, is ignored.
        answer: number of text tokens that will be stored after the prompt.
        past: sequence that the prompt continues.
    """
    past = SequenceTable() if past is None else past
    appends_tokens = codec_of(policy).appends_tokens
    codes = new[new != PADDING].astype(np.uint8)
    sinks = max(0, policy.sinks - past.stored)
    packs = np.array([policy.bits_for(modality).packed for modality in Modality])
    codes[:sinks] += (SINK * packs[codes[:sinks]]).astype(np.uint8)
    # Answer tokens in the 16-bit stream of the sinks, and in the text stream.
    time = np.arange(answer + 1)
    left = max(0, sinks - len(codes)) if packs[Modality.TEXT] else 0
    said = {int(Modality.TEXT): np.maximum(time - left, 0)}
    said[Modality.TEXT + SINK] = np.minimum(time, left)
    before = past.recent(policy.window)
    recent = np.concatenate([np.frombuffer(before, np.uint8), codes])
    recent = recent[len(recent) - min(policy.window, len(recent)) :]
    held = {bits: np.zeros(answer + 1, np.int64) for bits in (*policy.packed_bits, PLAIN)}
    added = {bits: np.zeros(answer + 1, np.int64) for bits in held}
    # All packed tokens, and the packed tokens whose slots are not shared with the past.
    all_packed, own_packed = np.zeros_like(time), np.zeros_like(time)
    # By stream: free positions in the last page, tokens until the next page begins, and slots that
    # are shared with the past.
    rooms: dict[int, np.ndarray] = {}
    to_page: dict[int, np.ndarray] = {}
    shared: dict[int, np.ndarray] = {}
    for code in sorted({*past.streams, *np.unique(codes).tolist(), *said}):
        modality = Modality(code % SINK)
        bits = PLAIN if code >= SINK else policy.bits_for(modality)
        stream = past.streams.get(code) or ModalityTable(modality, bits)
        grown = int((codes == code).sum()) + said.get(code, np.zeros_like(time))
        total, packed = len(stream.slots) + grown, np.zeros_like(time)
        if bits.packed:
            in_window = _in_window(recent, code, time, policy.window)
            if code == Modality.TEXT:
                in_window = in_window + np.minimum(said[code], np.minimum(time, policy.window))
            waiting = np.maximum(total - in_window, 0)
            room = stream.room if appends_tokens else 0
            leaves = before.count(code) + grown > in_window
            packed = packed_count(policy, bits, waiting, room) * leaves
            begun = -(-np.maximum(packed - room, 0) // PAGE_TOKENS)
            held[bits] += (pages := len(set(stream.pages)) + begun)
            in_slots = np.concatenate([[len(stream.slots)], (total - packed)[:-1]])
            to_page[code] = (begins_page_at(policy) - in_slots) * (pages > 0)
            rooms[code] = room + begun * PAGE_TOKENS - packed
            shared[code] = np.maximum(len(stream.slots) - packed, 0)
            # The forecast includes a copy of a page that is continued.
            added[bits] += begun + ((packed > 0) & (room > 0))
        all_packed += packed
        own_packed += np.maximum(packed - len(stream.slots), 0)
        held[PLAIN] += total - packed
        added[PLAIN] += total - packed - np.maximum(len(stream.slots) - packed, 0)
    in_16_bit = np.concatenate([[past.in_16_bit], held[PLAIN][:-1]])
    new_packed, new_own = (np.diff(counts, prepend=0) for counts in (all_packed, own_packed))
    # Same rule as ``max_spare``, here and below.
    most = (in_16_bit // 4).clip(1, MAX_SPARE)
    said_codes = np.where(time <= left, Modality.TEXT + SINK, int(Modality.TEXT))
    # Spare slots. A prompt of a single token is placed like a token of the answer.
    first = 0 if len(new) == len(codes) == 1 else 1
    said_codes[:1] = codes[:1] if first == 0 else said_codes[:1]
    for code in rooms:
        more = (said_codes == code) * np.minimum(to_page[code], MAX_SPARE)
        most = np.maximum(most, more)
        passes_on = (said_codes == code) & (rooms[code] > 0)
        most[passes_on] = np.minimum(1 + shared[code][passes_on], MAX_SPARE)
    # Without a window the new token itself is packed.
    is_packed = (new_packed > 0) & (policy.window == 0)
    emptied = np.maximum(new_own - is_packed, 0)
    spare, found = 0, [0] * first
    columns = (counts[first:].tolist() for counts in (most, is_packed, emptied))
    for limit, takes_none, freed in zip(*columns, strict=True):
        if not takes_none:
            spare = (spare or limit) - 1
        spare = min(spare + freed, limit)
        found.append(spare)
    for slots in (held[PLAIN], added[PLAIN]):
        slots += found
    return SlotForecast(held, added)


def _in_window(recent: np.ndarray, code: int, time: np.ndarray, window: int) -> np.ndarray:
    """Return how many of a stream's tokens before the answer are still in the window, for each
    answer length in ``time``."""
    # Entry n counts the stream's tokens among the last n.
    counts = np.concatenate([[0], (recent[::-1] == code).cumsum()])
    return counts[(window - time).clip(0, len(recent))]
