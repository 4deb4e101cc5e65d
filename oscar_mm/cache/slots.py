"""Slots: SlotAllocator knows which are free and who owns the others, SlotSet which streams name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from oscar_mm.cache.rows import Stream
from oscar_mm.policy import PLAIN, Bits


class SlotAllocator:
    """Free list and reference counts of slots. Slots are shared by forks of a sequence.

    Attributes:
        promises: how often slots were given out or foretold. If it has grown since a free slot was
            foretold, others may have written to that slot.
    """

    def __init__(self) -> None:
        self.promises = 0
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
        self.promises += 1
        missing = count - len(self._free)
        if missing > 0:
            grown = range(self.capacity, self.capacity + max(missing, self.capacity // 32))
            self._references += [0] * len(grown)
            self._free += reversed(grown)
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._references[slot] = 1
        return slots

    def foretell(self, index: int) -> int | None:
        """The slot that the allocation after ``index`` others will give; None if pools must grow
        for it."""
        self.promises += 1
        return self._free[-1 - index] if index < len(self._free) else None

    def claim(self, slots: Sequence[int]) -> None:
        """Give slots one owner each that were foretold, and neither given nor foretold to others
        since."""
        self.promises += 1
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


class SlotSet:
    """Slots of pages by their bits, and under ``PLAIN`` slots of tokens in 16 bit.

    Entries of a stream, rows of a batch and forks may name the same slot; its bytes are there once.
    """

    def __init__(self) -> None:
        # Slot -> how often it is named, and the modality of its tokens; in the order of the names.
        self._names = defaultdict[Bits, Counter[int]](Counter)
        self._modalities = defaultdict[Bits, dict[int, str]](dict)

    @classmethod
    def of(cls, streams: Iterable[Stream]) -> SlotSet:
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

    def shared(self, allocators: Mapping[Bits, SlotAllocator]) -> Counter[Bits]:
        """Bits -> number of slots that others hold too."""
        found = Counter[Bits]()
        for bits, names in self._names.items():
            owners = allocators[bits].owners
            found[bits] = sum(owners(slot) > count for slot, count in names.items())
        return found
