"""MeasuredChat: a chat that records its memory over time and the speed of its latest answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oscar_mm.cache.memory import MemoryReport
from oscar_mm.engine.answer import Reasoning, Timings
from oscar_mm.engine.speech import Speech
from oscar_mm.errors import Cancelled

if TYPE_CHECKING:
    from oscar_mm.apps.demo.live_question import LiveQuestion
    from oscar_mm.apps.demo.live_speech import LiveSpeech
    from oscar_mm.chat.chat import Chat

STATES, TABLES = "states", "tables"
PARTS = ("text", "image", "video", "audio", "speech", STATES, TABLES)
"""Parts of the memory, in the order in which the chart stacks the parts."""
UPDATES_PER_S = 10
"""Number of updates per second that a page receives while an answer is running."""
_MAX_SAMPLES = 1200


@dataclass(frozen=True)
class MemorySample:
    """One measurement of a conversation's memory.

    Attributes:
        tokens: tokens in the conversation, including forgotten ones.
        by_modality: number of stored (not forgotten) tokens, by modality.
        parts: bytes of each part in PARTS, without free slots, which all conversations share.
        bf16_bytes: bytes that the stored tokens would take in a plain 16-bit cache.
        values: number of stored elements of keys and values.
    """

    tokens: int
    by_modality: dict[str, int]
    parts: dict[str, int]
    bf16_bytes: int
    values: int

    @classmethod
    def of(cls, report: MemoryReport, tokens: int) -> MemorySample:
        """Create a sample from a memory report of the library.

        Args:
            report: memory report of the conversation.
            tokens: number of tokens in the conversation, including forgotten ones.
        """
        parts = {name: report.by_modality.get(name, 0) for name in PARTS}
        parts[STATES] = sum(report.by_kind.get(kind, 0) for kind in ("states", "marks"))
        parts[TABLES] = report.by_kind["tables"]
        return cls(tokens, report.tokens, parts, report.bf16_bytes, report.values)

    @property
    def stored_tokens(self) -> int:
        """Number of stored (not forgotten) tokens."""
        return sum(self.by_modality.values())

    @property
    def used_bytes(self) -> int:
        """Total bytes of all parts."""
        return sum(self.parts.values())

    @property
    def ratio(self) -> float:
        """Ratio of the 16-bit size to the size in use; 1.0 while nothing is stored."""
        return self.bf16_bytes / self.used_bytes if self.bf16_bytes else 1.0

    @property
    def gains(self) -> bool:
        """Whether the conversation takes over 5% less memory than in 16-bit precision."""
        return self.ratio >= 1.05

    @property
    def bits_per_value(self) -> float:
        """Bits per stored key or value element, including tables; 0.0 if nothing is stored."""
        return self.used_bytes * 8 / self.values if self.values else 0.0


class MemoryCurve:
    """Memory samples in chronological order, starting with an empty one.

    The token counts of the samples never decrease.
    """

    def __init__(self) -> None:
        self.samples = [MemorySample(0, {}, dict.fromkeys(PARTS, 0), 0, 0)]

    @property
    def last(self) -> MemorySample:
        """The latest sample."""
        return self.samples[-1]

    def add(self, report: MemoryReport, tokens: int) -> None:
        """Add a sample; if the curve becomes too long, drop every other old sample."""
        if len(self.samples) >= _MAX_SAMPLES:
            del self.samples[1:-1:2]
        self.samples.append(MemorySample.of(report, tokens))

    def cut(self, tokens: int) -> None:
        """Drop the samples with more than ``tokens`` tokens."""
        self.samples = [sample for sample in self.samples if sample.tokens <= tokens]

    def thinned(self, count: int) -> list[MemorySample]:
        """Return at most about ``count`` samples, including the first and the last."""
        step = max(1, -(-len(self.samples) // count))
        samples = self.samples[::step]
        return samples if samples[-1] is self.last else [*samples, self.last]


class MeasuredChat:
    """A chat whose memory and speed are measured.

    The chat has the packed cache or, for a comparison, the 16-bit cache.

    Args:
        chat: new chat, or a chat to continue.

    Attributes:
        curve: memory as a function of the number of tokens in the conversation.
        memory, segments: memory report and segments at the latest measurement; the conversation may
            have been moved to disk since then, to stay within the budget.
        forgotten: for each forgotten media item, the number of tokens in the conversation when it
            was forgotten, and the name of the item.
        timings: timings of the latest answer so far.
        finish_reason: reason why the latest answer ended.
        reasoning: reasoning of the latest answer so far.
        speech: samples per second and samples of the latest answer, as ``Answer`` has them; None if
            it was not spoken to its end.
    """

    def __init__(self, chat: Chat) -> None:
        self.chat, self.curve = chat, MemoryCurve()
        self.speech: tuple[int, np.ndarray] | None = None
        self.forgotten: list[tuple[int, str]] = []
        self.timings: Timings | None = None
        self.finish_reason = self.reasoning = ""
        self.memory, self.segments = chat.memory, chat.segments
        if chat.turns:
            self.measure()

    @property
    def tokens(self) -> int:
        """Number of tokens in the conversation, including forgotten ones."""
        return self.chat.turns[-1].stop if self.chat.turns else 0

    @property
    def tokens_by_modality(self) -> dict[str, int]:
        """Number of tokens stored at the latest measurement, by modality."""
        return self.curve.last.by_modality

    def measure(self) -> None:
        """Measure the memory, and drop the samples of tokens that are no longer in the chat."""
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
        parts: Sequence[Any] = (),
        aloud: LiveSpeech | None = None,
        live: LiveQuestion | None = None,
    ) -> Generator[str]:
        """Yield the answer so far, several times during generation and once at the end.

        Args:
            question: text of the question.
            media: files by kind, see ``visitor_input.files_by_kind``.
            options: options for the answer, such as max_new_tokens and temperature.
            stop: event that ends the answer; the text so far is kept.
            parts: texts and media of the question in order, if not all media precede the text.
            aloud: receiver of the speech, piece by piece; None for an answer in text.
            live: the question itself, if it was read while it was spoken.

        Raises:
            InputError: see ``Chat.stream``; the chat remains unchanged.
        """
        before, turns = self.tokens, len(self.chat.turns)
        stream = None
        if live is not None:
            read = live.read_tokens
            stream = live.stream(self, **{"speak": False, **options})
            before += read if stream is not None else 0
        if stream is None:
            asked: dict[str, Any] = {"prompt": question}
            asked |= {kind: paths or None for kind, paths in media.items()}
            stream = self.chat.stream(**({"parts": parts} if parts else asked), **options)
        text, updated, self.reasoning, self.speech = "", 0.0, "", None
        try:
            if stop.is_set():
                return
            for piece in stream.spoken_pieces():
                if isinstance(piece, Reasoning):
                    self.reasoning += piece
                elif isinstance(piece, str):
                    text += piece
                elif isinstance(piece, Speech) and aloud is not None:
                    aloud.add(piece, self._read_by(piece.frames))
                if stop.is_set():
                    break
                if time.monotonic() - updated >= 1 / UPDATES_PER_S:
                    self._measure_progress(before)
                    updated = time.monotonic()
                    yield text
            else:
                self.timings, answer = stream.result.timings, stream.result
                if answer.speech is not None and answer.sample_rate is not None:
                    self.speech = answer.sample_rate, answer.speech
        except Cancelled:
            pass  # The chat is unchanged.
        finally:
            stream.close()
            if len(self.chat.turns) > turns:
                self.finish_reason = self.chat.turns[-1].finish_reason
                self.measure()
        yield text

    def note_heard(self, report: MemoryReport, tokens: int) -> None:
        """Add a sample while a question is spoken.

        Args:
            report: memory report with what was read of the question.
            tokens: number of tokens of the question that were read.
        """
        self.curve.add(report, self.tokens + tokens)

    def note_forgotten(self) -> None:
        """Drop the samples of a question that was not answered."""
        if self.chat.answering is None:
            self.curve.cut(self.tokens)

    def _read_by(self, frames: int) -> str:
        """Return the text that the talker has read after a number of frames: one token a frame."""
        if (running := self.chat.answering) is None:
            return ""
        ids = running.written.token_ids[:frames]
        tokenizer = self.chat.pipe.family.processor.tokenizer
        return tokenizer.decode(ids, skip_special_tokens=True)

    def keep_heard(self, aloud: LiveSpeech, seconds: float) -> None:
        """Remove from the last answer what follows the first seconds of its speech."""
        turn = self.chat.turns[-1]
        if turn.answer_tokens is None:
            return  # What follows reasoning cannot be removed.
        complete = turn.finish_reason != "interrupted"
        kept = aloud.heard_tokens(turn.answer_tokens, seconds, is_complete=complete)
        if kept < turn.answer_tokens:
            self.chat.shorten_answer(turn.answer_tokens - kept)
            self.finish_reason = self.chat.turns[-1].finish_reason
            self.measure()

    def fork(self) -> MeasuredChat:
        """Copy the chat and its curve; the copy and the original continue independently."""
        fork = MeasuredChat(self.chat.fork())
        fork.curve.samples = [*self.curve.samples]
        fork.forgotten, fork.timings = [*self.forgotten], self.timings
        fork.finish_reason = self.finish_reason
        return fork

    def undo(self, turns: int) -> None:
        """Undo the last turns."""
        self.chat.undo(turns)
        self.timings = None
        self.measure()

    def forget(self, index: int) -> None:
        """Drop the media item of the segment with this index."""
        if any(one.index == index and one.forgotten for one in self.segments):
            return  # The button was pressed twice.
        self.chat.forget(index)
        self.forgotten.append((self.tokens, self.segments[index].label))
        self.measure()

    def _measure_progress(self, before: int) -> None:
        running = self.chat.so_far
        if running is not None:
            self.timings = running.timings
            # The last sampled token is not in the cache yet.
            tokens = before + running.prompt_tokens + len(running.token_ids) - 1
            self.curve.add(running.memory, tokens)
