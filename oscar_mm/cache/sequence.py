"""Sequence: one row of a batch, which of its tokens is in which stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from oscar_mm.cache.stream import Stream
from oscar_mm.modality import Modality
from oscar_mm.policy import PLAIN, Bits

SINK = len(Modality)
"""Stream codes are the modality, plus this for the sinks of a modality that is packed."""
NOWHERE = 255
"""Stream code of padding and forgotten tokens: they have an index but are not stored."""


@dataclass
class Sequence:
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

    def before(self) -> Sequence:
        """The streams as they are now; the codes go on growing, beyond what these streams hold."""
        streams = {code: stream.copy() for code, stream in self.streams.items()}
        return Sequence(self.codes, streams, self.stored)

    def copy(self) -> Sequence:
        """A second sequence over the same slots but the spare ones; the caller adds the owners."""
        return Sequence(self.codes[:], self.before().streams, self.stored)

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

    def recent(self, window: int) -> np.ndarray:
        """Stream codes of the last ``window`` stored tokens."""
        codes = np.frombuffer(self.codes, dtype=np.uint8)
        # Seldom more than one turn: many tokens in a row are padding or forgotten.
        size = 2 * window
        while True:
            tail = codes[-size:] if size else codes[:0]
            stored = tail[tail != NOWHERE]
            if len(stored) >= window or size >= len(codes):
                return stored[-window:] if window else stored
            size *= 8
