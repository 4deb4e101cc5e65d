"""A chat with the curve of its memory and the speed of its latest answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_mm.cache.memory import MemoryReport
from oscar_mm.engine.answer import Reasoning, Timings
from oscar_mm.errors import Cancelled

if TYPE_CHECKING:
    from oscar_mm.chat.chat import Chat

TABLES = "tables"
PARTS = ("text", "image", "video", "audio", TABLES)
"""The parts of the memory, in the order in which the chart stacks them."""
UPDATES_PER_S = 10
"""How often a page learns about an answer that the model writes."""
_MAX_SAMPLES = 1200


@dataclass(frozen=True)
class MemorySample:
    """One measurement of a conversation's memory.

    Attributes:
        tokens: tokens of the conversation, forgotten ones included.
        by_modality: tokens that are not forgotten.
        parts: bytes by PARTS, without free slots of the store, which all conversations share.
        bf16_bytes: bytes of the stored tokens in a plain 16-bit cache.
        values: key and value elements stored.
    """

    tokens: int
    by_modality: dict[str, int]
    parts: dict[str, int]
    bf16_bytes: int
    values: int

    @classmethod
    def of(cls, report: MemoryReport, tokens: int) -> MemorySample:
        """Convert the library's report."""
        parts = {name: report.by_modality[name] for name in PARTS if name != TABLES}
        parts[TABLES] = report.by_kind["tables"]
        return cls(tokens, report.tokens, parts, report.bf16_bytes, report.values)

    @property
    def stored_tokens(self) -> int:
        """Tokens that are not forgotten."""
        return sum(self.by_modality.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def ratio(self) -> float:
        """How many times smaller than 16 bit; 1.0 while nothing is stored."""
        return self.bf16_bytes / self.used_bytes if self.bf16_bytes else 1.0

    @property
    def gains(self) -> bool:
        """Whether this is smaller than in 16-bit precision by more than a twentieth."""
        return self.ratio >= 1.05

    @property
    def bits_per_value(self) -> float:
        """Bits per key or value element, tables included; 0.0 while nothing is stored."""
        return self.used_bytes * 8 / self.values if self.values else 0.0


class MemoryCurve:
    """Samples in order of time, beginning with an empty one; their tokens never decrease."""

    def __init__(self) -> None:
        self.samples = [MemorySample(0, {}, dict.fromkeys(PARTS, 0), 0, 0)]

    @property
    def last(self) -> MemorySample:
        """The latest sample."""
        return self.samples[-1]

    def add(self, report: MemoryReport, tokens: int) -> None:
        """Add a measurement; a long curve drops every other old one."""
        if len(self.samples) >= _MAX_SAMPLES:
            del self.samples[1:-1:2]
        self.samples.append(MemorySample.of(report, tokens))

    def cut(self, tokens: int) -> None:
        """Go back to a conversation of ``tokens`` tokens."""
        self.samples = [sample for sample in self.samples if sample.tokens <= tokens]

    def thinned(self, count: int) -> list[MemorySample]:
        """Choose about ``count`` samples at most, the first and the last among them."""
        step = max(1, -(-len(self.samples) // count))
        samples = self.samples[::step]
        return samples if samples[-1] is self.last else [*samples, self.last]


class MeasuredChat:
    """The conversation over the packed cache, or over the 16-bit cache beside it.

    Args:
        chat: a new one, or one that goes on.

    Attributes:
        curve: the curve of its memory.
        memory: the memory at the latest measurement, as ``segments`` are: a budget may have moved
            the conversation to disk since.
        forgotten: tokens of the conversation when a medium was forgotten, and the medium's name.
        timings: timings of the latest answer so far.
        finish_reason: why the latest answer ended.
        reasoning: reasoning of the latest answer so far.
    """

    def __init__(self, chat: Chat) -> None:
        self.chat, self.curve = chat, MemoryCurve()
        self.forgotten: list[tuple[int, str]] = []
        self.timings: Timings | None = None
        self.finish_reason = self.reasoning = ""
        self.memory, self.segments = chat.memory, chat.segments
        if chat.turns:
            self.measure()

    @property
    def tokens(self) -> int:
        """Tokens of the conversation, forgotten ones included."""
        return self.chat.turns[-1].stop if self.chat.turns else 0

    @property
    def tokens_by_modality(self) -> dict[str, int]:
        """Tokens stored at the latest measurement."""
        return self.curve.last.by_modality

    def measure(self) -> None:
        """Measure the memory; reasoning or a turn measured before may be gone."""
        self.curve.cut(self.tokens)
        self.forgotten = [event for event in self.forgotten if event[0] <= self.tokens]
        self.memory, self.segments = self.chat.memory, self.chat.segments
        self.curve.add(self.memory, self.tokens)

    def answer(
        self,
        question: str,
        media: Mapping[str, list[Path]],
        options: Mapping[str, Any],
        stop: threading.Event,
    ) -> Generator[str]:
        """Yield the answer so far, several times while the model writes and once at its end.

        Args:
            question: the question's text.
            media: files by kind, see ``uploads.files_by_kind``.
            options: max_new_tokens, temperature, ...
            stop: ends the answer when it is set; the text so far counts.

        Raises:
            InputError: see ``Chat.stream``; the chat does not change.
        """
        before, turns = self.tokens, len(self.chat.turns)
        files = {kind: paths or None for kind, paths in media.items()}
        stream = self.chat.stream(question, **files, **options)
        text, updated, self.reasoning = "", 0.0, ""
        try:
            if stop.is_set():
                return
            for piece in stream.with_reasoning():
                if isinstance(piece, Reasoning):
                    self.reasoning += piece
                else:
                    text += piece
                if stop.is_set():
                    break
                if time.monotonic() - updated >= 1 / UPDATES_PER_S:
                    self._measure_progress(before)
                    updated = time.monotonic()
                    yield text
            else:
                self.timings = stream.result.timings
        except Cancelled:
            pass  # The chat is as before.
        finally:
            stream.close()
            if len(self.chat.turns) > turns:
                self.finish_reason = self.chat.turns[-1].finish_reason
                self.measure()
        yield text

    def fork(self) -> MeasuredChat:
        """Copy the chat, with its curve; both go on by themselves."""
        fork = MeasuredChat(self.chat.fork())
        fork.curve.samples = [*self.curve.samples]
        fork.forgotten, fork.timings = [*self.forgotten], self.timings
        fork.finish_reason = self.finish_reason
        return fork

    def undo(self) -> None:
        """Take back the last turn."""
        self.chat.undo()
        self.timings = None
        self.measure()

    def forget(self, index: int) -> None:
        """Drop the medium of a segment."""
        self.chat.forget(index)
        if not self.segments[index].forgotten:
            self.forgotten.append((self.tokens, self.segments[index].label))
        self.measure()

    def _measure_progress(self, before: int) -> None:
        running = self.chat.so_far
        if running is not None:
            self.timings = running.timings
            # The cache lacks the token that was chosen last.
            tokens = before + running.prompt_tokens + len(running.token_ids) - 1
            self.curve.add(running.memory, tokens)
