"""Stream: the tokens of one modality of one sequence, as full pages and a 16-bit tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from oscar_mm.cache.layout import BLOCK_TOKENS, PAGE_TOKENS
from oscar_mm.modality import Modality

START = 1 << 8
"""Unit of the first token in use in a page's entry; below it is the token after the last."""


def in_blocks(blocks: Sequence[int], tokens: np.ndarray) -> np.ndarray:
    """Where tokens of a tail are: (2, n) int64, the id of the block and the place in it.

    Args:
        blocks: of the tail, filled in order.
        tokens: (n,) counted from the first place of the first block.
    """
    index, places = np.divmod(tokens, BLOCK_TOKENS)
    return np.stack([np.asarray(blocks, dtype=np.int64)[index], places])


@dataclass
class Stream:
    """Which slots hold a stream, the same ones in every layer; tokens are in sequence order.

    A page is written once, with 128 tokens. An entry of the stream is a page and the range of its
    tokens that are in use: all of them at first, fewer after a crop; a page out of whose middle
    tokens were forgotten has two entries, one after the other.

    Copies share what they have of pages: a long stream is copied at every step, and gets a page at
    one of 128.

    Attributes:
        modality: of all its tokens.
        bits: 2 or 4 where full pages are packed; 16 where all tokens stay in blocks.
        pages: id of each entry's packed page.
        starts: first token of the page that an entry uses.
        stops: the token after the last one, more than its start.
        blocks: ids of the 16-bit blocks of the tail, filled in order.
        tail: tokens in the blocks.
    """

    modality: Modality
    bits: int
    pages: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    blocks: list[int] = field(default_factory=list)
    tail: int = 0
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
        return self.packed + self.tail

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
            self.blocks.copy(),
            self.tail,
            self._known,
        )

    def add_pages(self, pages: list[int]) -> None:
        """Full pages after those that there are."""
        self.pages += tuple(pages)
        self.starts += (0,) * len(pages)
        self.stops += (PAGE_TOKENS,) * len(pages)

    def drop_last(self, count: int) -> tuple[list[int], list[int]]:
        """Forget the last ``count`` tokens; returns the ids of pages and blocks given up.

        A page that is cut keeps its codes and counts fewer tokens: it is never quantized again.
        """
        from_tail = min(count, self.tail)
        self.tail -= from_tail
        count -= from_tail
        kept_blocks = -(-self.tail // BLOCK_TOKENS)
        blocks, self.blocks = self.blocks[kept_blocks:], self.blocks[:kept_blocks]
        left = len(self.pages)
        while count and count >= (last := self.stops[left - 1] - self.starts[left - 1]):
            left -= 1
            count -= last
        pages, self.pages = self.pages[left:], self.pages[:left]
        self.starts, self.stops = self.starts[:left], self.stops[:left]
        if count:
            self.stops = (*self.stops[:-1], self.stops[-1] - count)
        return list(pages), blocks

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
