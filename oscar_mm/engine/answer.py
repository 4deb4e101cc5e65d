"""Answer of a request, and the stream of its pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from oscar_mm.cache.memory import MemoryReport
from oscar_mm.engine.async_pieces import AsyncPieces
from oscar_mm.engine.speech import Speech
from oscar_mm.tool_parsers.calls import ToolCall
from oscar_mm.tool_parsers.parser import Piece

if TYPE_CHECKING:
    from oscar_mm.cache.memory import MemoryReport
    from oscar_mm.engine.logprobs import TokenLogprob


class Reasoning(str):
    """A chunk of a model's reasoning, among the pieces of its answer."""

    __slots__ = ()


@dataclass(frozen=True)
class ReasoningSpan:
    """Reasoning at the beginning of an answer.

    Attributes:
        text: the reasoning, without surrounding line breaks.
        opened: number of tokens at the end of the prompt that open the reasoning.
        tokens: number of the answer's tokens before the text.
    """

    text: str
    opened: int
    tokens: int


@dataclass(frozen=True)
class Timings:
    """Timings of a request.

    Attributes:
        prefill_s: seconds from the request to its first token, for media, encoders and prefill.
        decode_s: seconds from the first token to the last.
        tokens_per_s: tokens per second during ``decode_s``, without the first token; 0.0 for a
            single token.
    """

    prefill_s: float
    decode_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Answer:
    """Result of a request.

    Attributes:
        text: the answer; empty if the reasoning is incomplete.
        token_ids: tokens of reasoning and answer, without the end token.
        memory: memory report of the KV cache at the end.
        timings: prefill and decode times in seconds.
        finish_reason: "stop" (end token or stop string), "tool_calls" (the complete answer contains
            tool calls) or "length" (max_new_tokens).
        prompt_tokens: number of prompt tokens, including media.
        speech: (samples,) float32, mono: the spoken answer; None without ``speak``.
        sample_rate: samples per second of ``speech``.
        speech_tokens: number of tokens of the speech, one for each frame of it.
        tool_calls: calls to the offered tools; they are not part of ``text``.
        reasoning: text a thinking model wrote before the answer; None if it did not think.
        reasoning_tokens: number of ``token_ids`` before the text.
        cached_tokens: number of prompt tokens taken from the prefix cache.
        logprobs: log-probabilities of ``token_ids``; None unless requested.
        prompt_logprobs: log-probabilities of the prompt's tokens except the first; None if they
            were not requested.
        stop_text: stop string that ended the answer; None if something else did.
        drafts: number of drafts made for the answer's tokens, see ``drafts`` of ``Pipeline``.
        accepted_drafts: number of drafts that became tokens of the answer.
    """

    text: str
    token_ids: list[int]
    memory: MemoryReport
    timings: Timings
    finish_reason: str
    prompt_tokens: int
    speech: np.ndarray | None = field(default=None, compare=False)
    sample_rate: int | None = None
    speech_tokens: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    stop_text: str | None = None
    drafts: int = 0
    accepted_drafts: int = 0

    def __str__(self) -> str:
        """Return the text."""
        return self.text


class Delivery:
    """How the pieces of a request reach the thread that waits for them.

    Attributes:
        at_end: whether the thread is woken only at the end; waking it for each token takes more
            than a tenth of the time of a small model's step.
    """

    at_end = False


class AnswerStream:
    """Iterator over the text chunks of an answer; ``result`` is the answer once it is exhausted.

    It skips the reasoning of a thinking model. ``with_reasoning`` includes the reasoning,
    ``with_speech`` the speech of a spoken answer, and ``pieces`` also includes tool calls.
    ``async for`` yields the same chunks in a coroutine, see
    ``oscar_mm.engine.async_pieces.AsyncPieces``.

    Args:
        pieces: generator of the pieces, followed by the complete answer.
        cancel: function that ends the answer, from any thread; if None, the answer ends at its next
            piece.
        taken: function called with the thread that reads the pieces for a coroutine.
        delivery: how the pieces are delivered; changed by ``complete``, which needs no pieces.
    """

    def __init__(
        self,
        pieces: Generator[Piece | Speech | Answer, None, None],
        cancel: Callable[[], None] | None = None,
        taken: Callable[[threading.Thread], None] | None = None,
        delivery: Delivery | None = None,
    ) -> None:
        self._pieces, self._taken, self._delivery = pieces, taken, delivery
        self._cancel = self._end_soon if cancel is None else cancel
        self._left = False
        self._result: Answer | None = None

    def __iter__(self) -> AnswerStream:
        """Return the iterator itself."""
        return self

    def __next__(self) -> str:
        """Return the next non-empty chunk of text."""
        for piece in self.with_reasoning():
            if not isinstance(piece, Reasoning):
                return piece
        raise StopIteration

    def __aiter__(self) -> AsyncPieces[str]:
        """Iterate over the chunks of text in a coroutine; leaving the loop ends the answer."""
        return AsyncPieces(iter(self), self._cancel, self._taken)

    def async_pieces(self) -> AsyncPieces[Piece]:
        """Return ``pieces`` as an asynchronous iterator."""
        return AsyncPieces(self.pieces(), self._cancel, self._taken)

    def with_reasoning(self) -> Iterator[str]:
        """Yield the remaining non-empty chunks of text, with reasoning as ``Reasoning``."""
        for piece in self.pieces():
            if isinstance(piece, str):
                yield piece

    def with_speech(self) -> Iterator[str | Speech]:
        """Yield the remaining chunks of text, without reasoning, and the speech as ``Speech``.

        Text and speech come as they are ready; a word is usually said after it is written.
        """
        for piece in self.spoken_pieces():
            if isinstance(piece, Speech) or type(piece) is str:
                yield piece

    def async_with_speech(self) -> AsyncPieces[str | Speech]:
        """Return ``with_speech`` as an asynchronous iterator."""
        return AsyncPieces(self.with_speech(), self._cancel, self._taken)

    def begin(self) -> None:
        """Start the answer without waiting for its first piece; call this before any iteration.

        The stream must be a chat's: its generator yields an empty piece once the answer runs.
        """
        next(self._pieces)

    def pieces(self) -> Iterator[Piece]:
        """Yield all remaining non-empty pieces, with tool calls as ``ToolCallDelta``."""
        for piece in self.spoken_pieces():
            if not isinstance(piece, Speech):
                yield piece

    def async_spoken_pieces(self) -> AsyncPieces[Piece | Speech]:
        """Return ``spoken_pieces`` as an asynchronous iterator."""
        return AsyncPieces(self.spoken_pieces(), self._cancel, self._taken)

    def spoken_pieces(self) -> Iterator[Piece | Speech]:
        """Yield all remaining ``pieces``, and the speech as ``Speech`` in between."""
        for piece in self._pieces:
            if isinstance(piece, Answer):
                self._result = piece
                return
            if self._left:
                self.close()
            elif piece:
                yield piece

    def complete(self) -> Answer:
        """Consume the remaining pieces and return the answer."""
        if self._delivery is not None:
            self._delivery.at_end = True
        for _ in self.with_reasoning():
            pass
        return self.result

    def close(self) -> None:
        """End the answer now; no effect if it has ended."""
        self._pieces.close()

    def _end_soon(self) -> None:
        self._left = True

    @property
    def result(self) -> Answer:
        """The complete answer; raises RuntimeError before the pieces are exhausted."""
        if self._result is None:
            raise RuntimeError("the answer is not complete: iterate over the stream first")
        return self._result
