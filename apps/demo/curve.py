"""Curve: what a conversation held after each step, over its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from oscar_mm.cache.memory import MemoryReport

TABLES = "tables"
PARTS = ("text", "image", "video", "audio", TABLES)
"""What the held bytes are made of, in the order in which they are stacked."""
_LONGEST = 1200


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        tokens: of the conversation, forgotten ones included.
        by_modality: tokens that are not forgotten.
        parts: bytes held, by PARTS. Free slots of the store, which is everybody's, are not in it.
        plain: bytes of the stored tokens in a plain 16-bit cache.
        values: key and value elements stored.
    """

    tokens: int
    by_modality: dict[str, int]
    parts: dict[str, int]
    plain: int
    values: int

    @classmethod
    def of(cls, report: MemoryReport, tokens: int) -> Sample:
        """From what the library measured."""
        parts = {name: report.by_modality[name] for name in PARTS if name != TABLES}
        parts[TABLES] = report.by_kind["tables"]
        return cls(tokens, report.tokens, parts, report.bf16_bytes, report.values)

    @property
    def stored(self) -> int:
        """Tokens that are not forgotten."""
        return sum(self.by_modality.values())

    @property
    def held(self) -> int:
        """Bytes."""
        return sum(self.parts.values())

    @property
    def ratio(self) -> float:
        """How many times smaller than 16 bit; 1.0 while nothing is stored."""
        return self.plain / self.held if self.plain else 1.0

    @property
    def bits_per_value(self) -> float:
        """Bits held per key or value element, tables and all; 0.0 while nothing is stored."""
        return self.held * 8 / self.values if self.values else 0.0


class Curve:
    """Samples in order of time, beginning with nothing; their tokens never go down."""

    def __init__(self) -> None:
        self.samples = [Sample(0, {}, dict.fromkeys(PARTS, 0), 0, 0)]

    @property
    def last(self) -> Sample:
        """What is held now."""
        return self.samples[-1]

    def add(self, report: MemoryReport, tokens: int) -> None:
        """One more measurement; of a long conversation every other old one is given up."""
        if len(self.samples) >= _LONGEST:
            del self.samples[1:-1:2]
        self.samples.append(Sample.of(report, tokens))

    def cut(self, tokens: int) -> None:
        """Back to a conversation of ``tokens`` tokens."""
        self.samples = [one for one in self.samples if one.tokens <= tokens]

    def thinned(self, count: int) -> list[Sample]:
        """At most about ``count`` samples, the first and the last among them."""
        step = max(1, -(-len(self.samples) // count))
        chosen = self.samples[::step]
        return chosen if chosen[-1] is self.last else [*chosen, self.last]
