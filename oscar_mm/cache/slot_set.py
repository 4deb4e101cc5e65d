"""SlotSet: the slots that streams name, each counted once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from oscar_mm.cache.rows import Stream
from oscar_mm.cache.slot_allocator import SlotAllocator
from oscar_mm.policy import PLAIN, Bits


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
