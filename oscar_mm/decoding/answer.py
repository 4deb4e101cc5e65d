"""Answer: text, tokens, memory and timings of one request; AnswerStream: the same as it comes."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import numpy as np

from oscar_mm.decoding.reasoning import Reasoning
from oscar_mm.memory import MemoryReport


@dataclass(frozen=True)
class Timings:
    """Where the time of a request went.

    Attributes:
        prefill_s: seconds from the request to its first token: media, towers and prompt.
        decode_s: seconds from the first token to the last.
        tokens_per_s: tokens after the first per second of ``decode_s``; 0.0 if there is only one.
    """

    prefill_s: float
    decode_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Answer:
    """What a pipeline returns.

    Attributes:
        text: the answer; empty where the reasoning was not complete.
        token_ids: its tokens, those of the reasoning included, without the end token.
        memory: what the KV cache held at the end.
        timings: seconds.
        finish_reason: "stop" (end token or stop text) or "length" (max_new_tokens).
        prompt_tokens: tokens of the prompt, media included.
        speech: (samples,) float32, mono, the answer spoken; None where that was not asked for.
        sample_rate: samples per second of ``speech``.
        reasoning: what a thinking model wrote before the answer; None where it did not think.
    """

    text: str
    token_ids: list[int]
    memory: MemoryReport
    timings: Timings
    finish_reason: str
    prompt_tokens: int
    speech: np.ndarray | None = field(default=None, compare=False)
    sample_rate: int | None = None
    reasoning: str | None = None

    def __str__(self) -> str:
        """The text."""
        return self.text


class AnswerStream:
    """Iterator over the pieces of an answer; ``result`` is the whole of it at the end.

    A thinking model's reasoning is passed over: ``with_reasoning`` gives its pieces too.
    """

    def __init__(self, pieces: Generator[str | Answer, None, None]) -> None:
        self._pieces = pieces
        self._result: Answer | None = None

    def __iter__(self) -> AnswerStream:
        """Itself."""
        return self

    def __next__(self) -> str:
        """The next piece of text, not empty."""
        for piece in self.with_reasoning():
            if not isinstance(piece, Reasoning):
                return piece
        raise StopIteration

    def with_reasoning(self) -> Iterator[str]:
        """The pieces that are left, not empty; those of the reasoning are ``Reasoning``."""
        for piece in self._pieces:
            if isinstance(piece, Answer):
                self._result = piece
                return
            if piece:
                yield piece

    def close(self) -> None:
        """End the answer here; a second time, or after its end, does nothing."""
        self._pieces.close()

    @property
    def result(self) -> Answer:
        """The answer, once the pieces are exhausted."""
        if self._result is None:
            raise RuntimeError("the answer is not complete: iterate over the stream first")
        return self._result
