"""Stream: the tokens of one modality of one sequence, in pages and then in 16 bit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from oscar_mm.cache.layout import PAGE_TOKENS
from oscar_mm.modality import Modality
from oscar_mm.policy import Bits

START = 1 << 8
"""Unit of the first token in use in a page's entry; below it is the token after the last."""


@dataclass
class Stream:
    """Which slots hold a stream, the same ones in every layer; tokens are in sequence order.

    An entry of the stream is a page and the range of its tokens that are in use. Tokens are packed
    once, in order, each to the place after the one before; places of a page that are not in use
    anymore after a crop are written again. A page out of whose middle tokens were forgotten has two
    entries, one after the other.

    Copies share what they have of pages: a long stream is copied at every step.

    Attributes:
        modality: of all its tokens.
        bits: of its pages; ``PLAIN`` where all tokens stay in 16 bit.
        pages: id of each entry's page.
        starts: first token of the page that an entry uses.
        stops: the token after the last one, more than its start.
        slots: ids of the slots of the tokens in 16 bit, which come after those in pages.
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

    def copy(self) -> Stream:
        """A second stream over the same slots; the caller adds the owners."""
        return Stream(
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
