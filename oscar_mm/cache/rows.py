"""Row: one row of a batch, and which of its tokens are in which Stream, in pages or in 16 bit.

TokenPlaces: where a layer on a device reads the tokens of streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from oscar_mm.modality import Modality
from oscar_mm.ops.decode_tables import SECOND, START, Entries
from oscar_mm.ops.store_torch import STORED_CENTER
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import PLAIN, Bits, KVPolicy


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


def least_page_tokens(policy: KVPolicy, bits: Bits) -> int:
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
class Row:
    """One row of the batch: the stream of every token, and the streams.

    Attributes:
        codes: of every token.
        streams: by code.
        stored: tokens in streams.
        spare: slots of 16 bit that are this sequence's, and free. The token that leaves the window
            at a decode step leaves its slot to those that come next.
    """

    codes: bytearray = field(default_factory=bytearray)
    streams: dict[int, Stream] = field(default_factory=dict)
    stored: int = 0
    spare: list[int] = field(default_factory=list)

    @property
    def in_16_bit(self) -> int:
        """Tokens in 16 bit."""
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

    def before(self) -> Row:
        """The streams as they are now. The codes go on growing, beyond what these streams hold; a
        stream that changes is replaced by its changed copy."""
        return Row(self.codes, self.streams.copy(), self.stored)

    def copy(self) -> Row:
        """A second sequence over the same slots but the spare ones; the caller adds the owners."""
        streams = {code: stream.copy() for code, stream in self.streams.items()}
        return Row(self.codes[:], streams, self.stored)

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


class Pages(NamedTuple):
    """Packed pages of one format.

    Attributes:
        slots: (n,) int32.
        used: first token of each page that is in use, and the one after the last; None if all
            tokens are.
    """

    slots: torch.Tensor
    used: list[tuple[int, int]] | None


class TokenPlaces(NamedTuple):
    """Where a layer reads all tokens of some streams: those in pages first, stream by stream.

    Attributes:
        pages: bits -> pages.
        slots: (n,) int64, of the tokens in 16 bit.
    """

    pages: dict[Bits, Pages]
    slots: torch.Tensor

    @classmethod
    def of(cls, streams: Iterable[Stream], device: torch.device) -> TokenPlaces:
        """The places of all tokens of these streams, for layers on a device."""
        packed: dict[Bits, list[Stream]] = {}
        slots: list[int] = []
        for stream in streams:
            if stream.pages:
                packed.setdefault(stream.bits, []).append(stream)
            slots += stream.slots
        return cls(
            {bits: _pages(found, device) for bits, found in packed.items()},
            torch.tensor(slots, dtype=torch.int64, device=device),
        )


def _pages(streams: list[Stream], device: torch.device) -> Pages:
    slots = [page for stream in streams for page in stream.pages]
    used = [
        tokens for stream in streams for tokens in zip(stream.starts, stream.stops, strict=True)
    ]
    return Pages(
        torch.tensor(slots, dtype=torch.int32, device=device),
        None if all(tokens == (0, PAGE_TOKENS) for tokens in used) else used,
    )
