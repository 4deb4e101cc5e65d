"""A chat with the curve of its memory and the speed of its latest answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_mm.decoding.answer import Timings
from oscar_mm.decoding.reasoning import Reasoning
from oscar_mm.memory import MemoryReport

if TYPE_CHECKING:
    from oscar_mm.chat.session import Chat

TABLES = "tables"
PARTS = ("text", "image", "video", "audio", TABLES)
"""What the held bytes are made of, in the order in which they are stacked."""
_LONGEST = 1200
UPDATES_PER_S = 10
"""How often a page is told about an answer that is being written."""


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


class Side:
    """One of the two sides of a comparison, or the only one.

    Args:
        chat: a new one, or one that goes on.

    Attributes:
        curve: of its memory.
        memory: of the conversation when it was measured last, as ``segments`` are: a budget may
            since have had it written to disk.
        timings: of the latest answer, as far as it goes.
        finish_reason: of the latest answer.
        reasoning: of the latest answer, as far as it goes.
    """

    def __init__(self, chat: Chat) -> None:
        self.chat, self.curve = chat, Curve()
        self.timings: Timings | None = None
        self.finish_reason = self.reasoning = ""
        self.memory, self.segments = chat.memory, chat.segments
        if chat.turns:
            self.measure()

    @property
    def tokens(self) -> int:
        """Of the conversation, forgotten ones included."""
        return self.chat.turns[-1].stop if self.chat.turns else 0

    @property
    def tokens_by_modality(self) -> dict[str, int]:
        """Tokens that are stored, when the conversation was measured last."""
        return self.curve.last.by_modality

    def measure(self) -> None:
        """Note what is held now; reasoning that was held meanwhile, or a turn, may be gone."""
        self.curve.cut(self.tokens)
        self.memory, self.segments = self.chat.memory, self.chat.segments
        self.curve.add(self.memory, self.tokens)

    def answer(
        self,
        question: str,
        media: Mapping[str, list[Path]],
        options: Mapping[str, Any],
        stop: threading.Event,
    ) -> Generator[str]:
        """The answer so far, again and again while it is written, and once more at its end.

        Args:
            media: as ``uploads.by_kind`` gives it.
            options: max_new_tokens, temperature, ...
            stop: ends the answer when it is set; what was written by then counts.

        Raises:
            InputError: as of ``Chat.stream``; the chat is as it was.
        """
        before, turns = self.tokens, len(self.chat.turns)
        shown = {kind: paths or None for kind, paths in media.items()}
        stream = self.chat.stream(question, **shown, **options)
        text, told, self.reasoning = "", 0.0, ""
        try:
            for piece in stream.with_reasoning():
                if isinstance(piece, Reasoning):
                    self.reasoning += piece
                else:
                    text += piece
                if stop.is_set():
                    break
                if time.monotonic() - told >= 1 / UPDATES_PER_S:
                    self._look(before)
                    told = time.monotonic()
                    yield text
            else:
                self.timings = stream.result.timings
        finally:
            stream.close()
        if len(self.chat.turns) > turns:
            self.finish_reason = self.chat.turns[-1].finish_reason
            self.measure()
        yield text

    def undo(self) -> None:
        """Take back the last turn."""
        self.chat.undo()
        self.timings = None
        self.measure()

    def forget(self, index: int) -> None:
        """Drop the medium of a segment."""
        self.chat.forget(index)
        self.measure()

    def _look(self, before: int) -> None:
        running = self.chat.so_far
        if running is not None:
            self.timings = running.timings
            # The token that was chosen last is not in the cache yet.
            tokens = before + running.prompt_tokens + len(running.token_ids) - 1
            self.curve.add(running.memory, tokens)
