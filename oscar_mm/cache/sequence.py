"""Sequence: one row of a batch, which of its tokens is in which stream."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from oscar_mm.cache.stream import Stream
from oscar_mm.modality import Modality

SINK = len(Modality)
"""Stream codes are the modality, plus this for the sinks of a modality that is packed."""
NOWHERE = 255
"""Stream code of padding and forgotten tokens: they have an index but are not stored."""


@dataclass
class Sequence:
    """One row of the batch: the stream of every token, and the streams."""

    codes: bytearray = field(default_factory=bytearray)
    streams: dict[int, Stream] = field(default_factory=dict)
    stored: int = 0

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
        """A second sequence over the same slots; the caller adds the owners."""
        return Sequence(self.codes[:], self.before().streams, self.stored)

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
