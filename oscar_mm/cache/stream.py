"""Stream: the tokens of one modality of one sequence, as full pages and a 16-bit tail."""

from __future__ import annotations

from dataclasses import dataclass, field

from oscar_mm.cache.layout import BLOCK_TOKENS
from oscar_mm.modality import Modality


@dataclass
class Stream:
    """Which slots hold a stream, the same ones in every layer; tokens are in sequence order.

    Attributes:
        modality: of all its tokens.
        bits: 2 or 4 where full pages are packed; 16 where all tokens stay in blocks.
        pages: ids of packed pages.
        page_tokens: tokens of each page that are in use: 128, or fewer after a crop.
        blocks: ids of the 16-bit blocks of the tail, filled in order.
        tail: tokens in the blocks.
    """

    modality: Modality
    bits: int
    pages: list[int] = field(default_factory=list)
    page_tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    tail: int = 0

    @property
    def tokens(self) -> int:
        """All tokens of the stream."""
        return sum(self.page_tokens) + self.tail

    def copy(self) -> Stream:
        """A second stream over the same slots; the caller adds the owners."""
        return Stream(
            self.modality,
            self.bits,
            self.pages.copy(),
            self.page_tokens.copy(),
            self.blocks.copy(),
            self.tail,
        )

    def drop_last(self, count: int) -> tuple[list[int], list[int]]:
        """Forget the last ``count`` tokens; returns the ids of pages and blocks given up.

        A page that is cut keeps its codes and counts fewer tokens: it is never quantized again.
        """
        from_tail = min(count, self.tail)
        self.tail -= from_tail
        count -= from_tail
        kept_blocks = -(-self.tail // BLOCK_TOKENS)
        blocks, self.blocks = self.blocks[kept_blocks:], self.blocks[:kept_blocks]
        pages = []
        while count:
            cut = min(count, self.page_tokens[-1])
            self.page_tokens[-1] -= cut
            count -= cut
            if not self.page_tokens[-1]:
                self.page_tokens.pop()
                pages.append(self.pages.pop())
        return pages, blocks
