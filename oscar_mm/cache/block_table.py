"""Slots: which are free, which hold the tokens of a row, and how many several streams have.

A slot is a page, or has one token in 16-bit precision. SlotPool has the free ones. A Row of the
batch has a Stream for the tokens of each modality. SlotSet has the slots of some streams, each
once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from oscar_mm.modality import Modality
from oscar_mm.ops.decode_tables import SECOND, START, Entries
from oscar_mm.ops.store_torch import STORED_CENTER
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import PLAIN, Bits, KVPolicy


class SlotPool:
    """Free list and reference counts of slots. Slots are shared by forks of a sequence.

    Attributes:
        promises: how often slots were given out or foretold. If it has grown since a free slot was
            foretold, others may have written to that slot.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._references: list[int] = []
        self._free: list[int] = []

    @property
    def capacity(self) -> int:
        """Slots that pools must hold."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Slots with at least one owner."""
        return self.capacity - self.free

    def allocate(self, count: int) -> list[int]:
        """``count`` slots with one owner each.

        A pool grows to what is asked for, and by at least a thirty-second, so that a prompt wastes
        nothing and a long answer seldom moves the pool.
        """
        if not count:
            return []
        self.epoch += 1
        missing = count - len(self._free)
        if missing > 0:
            grown = range(self.capacity, self.capacity + max(missing, self.capacity // 32))
            self._references += [0] * len(grown)
            self._free += reversed(grown)
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._references[slot] = 1
        return slots

    def plan_ahead(self, index: int) -> int | None:
        """The slot that the allocation after ``index`` others will give; None if pools must grow
        for it."""
        self.epoch += 1
        return self._free[-1 - index] if index < len(self._free) else None

    def claim(self, slots: Sequence[int]) -> None:
        """Give slots one owner each that were foretold, and neither given nor foretold to others
        since."""
        self.epoch += 1
        for slot in slots:
            if self._free[-1] == slot:
                self._free.pop()
            else:
                self._free.remove(slot)
            self._references[slot] = 1

    def share(self, slots: Iterable[int]) -> None:
        """Add an owner to each slot."""
        for slot in slots:
            self._references[slot] += 1

    def release(self, slots: Iterable[int]) -> None:
        """Take an owner from each slot; a slot without owners is free."""
        for slot in slots:
            self._references[slot] -= 1
            if not self._references[slot]:
                self._free.append(slot)

    def retain(self, slots: Iterable[int]) -> None:
        """Add an owner to each slot, also to free ones, which are not free then."""
        kept = set(slots)
        if any(not self._references[slot] for slot in kept):
            self._free = [slot for slot in self._free if slot not in kept]
        self.share(kept)

    def compact(self) -> list[int]:
        """Leave out the free slots: slot i of now is the i-th of the returned ones of before."""
        kept = [slot for slot, owners in enumerate(self._references) if owners]
        self._references = [self._references[slot] for slot in kept]
        self._free = []
        return kept

    def owners(self, slot: int) -> int:
        """How many owners a slot has."""
        return self._references[slot]

    def is_shared(self, slot: int) -> bool:
        """Whether the slot has more than one owner and so must not be written to."""
        return self._references[slot] > 1


class NoFreeSlotsError(Exception):
    """A pool would have to grow."""


class DryRunSlots:
    """Tells the slots that a ``SlotPool`` would give, and takes none back.

    Attributes:
        given: the slots that were told.
        counted: slots whose owners were asked for.
    """

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots
        self.given, self.counted = list[int](), list[int]()

    def allocate(self, count: int) -> list[int]:
        """The slots that would be given next."""
        taken = len(self.given)
        found = [self._slots.plan_ahead(taken + index) for index in range(count)]
        given = [slot for slot in found if slot is not None]
        if len(given) < count:
            raise NoFreeSlotsError
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


@dataclass
class ModalityTable:
    """Which slots hold a stream, the same ones in every layer; tokens are in sequence order.

    An entry of the stream is a page and the range of its tokens that are in use. Tokens are packed
    once, in order, each to the place after the one before; places of a page that are not in use
    anymore after a crop are written again. A page out of whose middle tokens were forgotten has two
    entries, one after the other.

    Copies share what they have of pages: a long stream is copied at every step.

    Attributes:
        modality: of all its tokens.
        bits: of its pages; ``PLAIN`` where all tokens stay in 16-bit precision.
        pages: id of each entry's page.
        starts: first token of the page that an entry uses.
        stops: the token after the last one, more than its start.
        slots: ids of the slots of the tokens in 16-bit precision, which come after those in pages.
    """

    modality: Modality
    bits: Bits
    pages: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    slots: list[int] = field(default_factory=list)
    _known: tuple[tuple[tuple[int, ...], ...], np.ndarray] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def packed(self) -> int:
        """Tokens in pages."""
        return sum(self.stops) - sum(self.starts)

    @property
    def tokens(self) -> int:
        """All tokens of the stream."""
        return self.packed + len(self.slots)

    def entries(self) -> np.ndarray:
        """(entries, 2) int32: the page, and stop + ``START`` * start."""
        columns = self.pages, self.starts, self.stops
        if self._known is None or any(
            mine is not known for mine, known in zip(columns, self._known[0], strict=True)
        ):
            pages, starts, stops = np.array(columns, dtype=np.int32)
            self._known = columns, np.stack([pages, START * starts + stops], axis=1)
        return self._known[1]

    def copy(self) -> ModalityTable:
        """A second stream over the same slots; the caller adds the owners."""
        return ModalityTable(
            self.modality,
            self.bits,
            self.pages,
            self.starts,
            self.stops,
            self.slots.copy(),
            self._known,
        )

    @property
    def room(self) -> int:
        """Places after the last token in pages, in the same page."""
        return PAGE_TOKENS - self.stops[-1] if self.pages else 0

    @property
    def stores_center(self) -> bool:
        """Whether the last page, once it is full, stores ``STORED_CENTER`` of this stream."""
        return bool(self.pages) and self.starts[-1] <= STORED_CENTER.start

    def move_last_page(self, page: int) -> None:
        """Have another page, with the same tokens, in the last entry's place."""
        self.pages = (*self.pages[:-1], page)

    def fill(self, in_last: int, pages: list[int], in_new: int) -> None:
        """Let more tokens be packed: ``in_last`` in the last page's room, others in new pages."""
        if in_last:
            # Decoding does so at every step: entries stay known.
            entries = self.entries().copy()
            entries[-1, 1] += in_last
            self.stops = (*self.stops[:-1], self.stops[-1] + in_last)
            self._known = (self.pages, self.starts, self.stops), entries
        if pages:
            full = len(pages) - 1
            self.pages += tuple(pages)
            self.starts += (0,) * len(pages)
            self.stops += (*(PAGE_TOKENS,) * full, in_new - full * PAGE_TOKENS)

    def drop_last(self, count: int) -> tuple[list[int], list[int]]:
        """Forget the last ``count`` tokens; returns the ids of pages and slots given up.

        A page that is cut counts fewer tokens; those that stay are never quantized again.
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

    def cut_pages(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Take the packed tokens start to stop - 1 of the stream out.

        Returns:
            pages of the entries that were there, and of those that there are in their place: the
            caller adds owners to the second, then takes them from the first.
        """
        ends = np.cumsum(np.subtract(self.stops, self.starts))
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, stop, side="left"))
        # What is left of the entries with the first and the last token that is taken out.
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


def min_page_tokens(policy: KVPolicy, bits: Bits) -> int:
    """Tokens with which a stream page begins: so many that it takes no more bytes than they do in
    16 bit, with heads of 64 channels; with larger ones it takes less."""
    scales = PAGE_TOKENS // min(policy.key_group, 64) + PAGE_TOKENS // min(policy.value_group, 64)
    return 4 * (bits.keys + bits.values) + scales + policy.center


SINK = len(Modality)
"""Stream codes are the modality, plus this for the sinks of a modality that is packed."""
NOWHERE = 255
"""Stream code of padding and forgotten tokens: they have an index but are not stored."""
_NOWHERE = bytes([NOWHERE])
_SECOND = np.array([0, SECOND], np.int32)


@dataclass
class SequenceTable:
    """One row of the batch: the stream of every token, and the streams.

    Attributes:
        codes: of every token.
        streams: by code.
        stored: tokens in streams.
        spare: slots of 16 bit that are this sequence's, and free. The token that leaves the window
            at a decode step leaves its slot to those that come next.
    """

    codes: bytearray = field(default_factory=bytearray)
    streams: dict[int, ModalityTable] = field(default_factory=dict)
    stored: int = 0
    spare: list[int] = field(default_factory=list)

    @property
    def in_16_bit(self) -> int:
        """Tokens in 16-bit precision."""
        return sum(len(stream.slots) for stream in self.streams.values())

    def positions(self, code: int) -> np.ndarray:
        """Indices of the stream's tokens in the sequence, ascending."""
        return np.flatnonzero(np.frombuffer(self.codes, dtype=np.uint8) == code)

    def real_tokens(self, count: int) -> np.ndarray:
        """(count,) bool: which of the last ``count`` tokens are stored, not padding."""
        return np.frombuffer(bytes(self.codes[-count:]), dtype=np.uint8) != NOWHERE

    def entries(self, bits: tuple[Bits | None, Bits | None]) -> Entries:
        """Pages and slots of 16 bit, for attention over what is stored.

        Args:
            bits: of the first and the second format of pages.
        """
        pages, slots = list[np.ndarray](), list[int]()
        for stream in self.streams.values():
            slots += stream.slots
            if stream.pages:
                of_second = stream.bits == bits[1]
                pages.append(stream.entries() + _SECOND if of_second else stream.entries())
        found = np.concatenate(pages) if pages else np.zeros((0, 2), np.int32)
        return found, np.array(slots, np.int32)

    def before(self) -> SequenceTable:
        """The streams as they are now. The codes go on growing, beyond what these streams hold; a
        stream that changes is replaced by its changed copy."""
        return SequenceTable(self.codes, self.streams.copy(), self.stored)

    def copy(self) -> SequenceTable:
        """A second sequence over the same slots but the spare ones; the caller adds the owners."""
        streams = {code: stream.copy() for code, stream in self.streams.items()}
        return SequenceTable(self.codes[:], streams, self.stored)

    def stored_positions(self, code: int) -> np.ndarray:
        """``positions`` among the stored tokens only."""
        codes = np.frombuffer(self.codes, dtype=np.uint8)
        return np.flatnonzero(codes[codes != NOWHERE] == code)

    def renumber(self, bits: Bits, ids: Mapping[int, int]) -> None:
        """Slots of a kind have other ids from now on."""
        for stream in self.streams.values():
            if bits == PLAIN:
                stream.slots = [ids[slot] for slot in stream.slots]
            elif stream.bits == bits:
                stream.pages = tuple(ids[page] for page in stream.pages)
        if bits == PLAIN:
            self.spare = [ids[slot] for slot in self.spare]

    def recent(self, window: int) -> bytes:
        """Stream codes of the last ``window`` stored tokens."""
        # Seldom more than one turn: many tokens in a row are padding or forgotten.
        size = window + 1
        while True:
            stored = self.codes[-size:].replace(_NOWHERE, b"")
            if len(stored) >= window or size >= len(self.codes):
                return bytes(stored[len(stored) - min(window, len(stored)) :])
            size *= 8


class SlotSet:
    """Slots of pages by their bits, and under ``PLAIN`` slots of tokens in 16-bit precision.

    Entries of a stream, rows of a batch and forks may name the same slot; its bytes are there once.
    """

    def __init__(self) -> None:
        # Slot -> how often it is named, and the modality of its tokens; in the order of the names.
        self._names = defaultdict[Bits, Counter[int]](Counter)
        self._modalities = defaultdict[Bits, dict[int, str]](dict)

    @classmethod
    def of(cls, streams: Iterable[ModalityTable]) -> SlotSet:
        """The slots of streams of one store."""
        found = cls()
        for stream in streams:
            for bits, slots in ((stream.bits, stream.pages), (PLAIN, stream.slots)):
                if slots:
                    found._names[bits].update(slots)
                    modalities = dict.fromkeys(slots, stream.modality.label)
                    found._modalities[bits].update(modalities)
        return found

    def slots(self, bits: Bits) -> list[int]:
        """Ids of one kind, in the order in which streams name them first."""
        return list(self._names.get(bits, ()))

    @property
    def counts(self) -> Counter[Bits]:
        """Bits -> number of slots."""
        return Counter({bits: len(names) for bits, names in self._names.items()})

    def by_modality(self, bits: Bits) -> Counter[str]:
        """Modality ("text", "image", "video", "audio") -> number of slots of one kind."""
        return Counter(self._modalities.get(bits, {}).values())

    def shared(self, allocators: Mapping[Bits, SlotPool]) -> Counter[Bits]:
        """Bits -> number of slots that others hold too."""
        found = Counter[Bits]()
        for bits, names in self._names.items():
            owners = allocators[bits].owners
            found[bits] = sum(owners(slot) > count for slot, count in names.items())
        return found
