"""Answer of a request, and the streaming detokenizer and output processor that build it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np

from oscar_mm.cache.memory import MemoryReport
from oscar_mm.engine.async_pieces import AsyncPieces
from oscar_mm.engine.think_tokens import ThinkTokens
from oscar_mm.tool_parsers.calls import ToolCall
from oscar_mm.tool_parsers.marks import MarkDecoder, special_marks
from oscar_mm.tool_parsers.offer import ToolOffer
from oscar_mm.tool_parsers.parser import Piece

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from oscar_mm.cache.memory import MemoryReport
    from oscar_mm.engine.logprobs import TokenLogprob
    from oscar_mm.engine.sampling import Sampling

_CONTEXT = 8
"""Tokens decoded again with every new token; more while the newest tokens have no text yet."""


@dataclass(frozen=True)
class Timings:
    """Timings of a request.

    Attributes:
        prefill_s: seconds from the request to its first token: media, towers and prompt.
        decode_s: seconds from the first token to the last.
        tokens_per_s: tokens after the first per second of ``decode_s``; 0.0 for a single token.
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
            some) or "length" (max_new_tokens).
        prompt_tokens: tokens of the prompt, including media.
        speech: (samples,) float32, mono, the spoken answer; None without ``speak``.
        sample_rate: samples per second of ``speech``.
        tool_calls: calls of the offered tools, which are not in ``text``.
        reasoning: text a thinking model wrote before the answer; None if it did not think.
        reasoning_tokens: number of ``token_ids`` before the text.
        cached_tokens: prompt tokens taken from the prefix cache.
        logprobs: log-probabilities of ``token_ids``; None unless requested.
        prompt_logprobs: log-probabilities of the prompt's tokens except the first; None if they
            were not requested.
        stop_text: stop string that ended the answer; None if something else did.
    """

    text: str
    token_ids: list[int]
    memory: MemoryReport
    timings: Timings
    finish_reason: str
    prompt_tokens: int
    speech: np.ndarray | None = field(default=None, compare=False)
    sample_rate: int | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    stop_text: str | None = None

    def __str__(self) -> str:
        """Return the text."""
        return self.text


class Delivery:
    """How the pieces of a request reach the thread that waits for them.

    Attributes:
        at_end: whether the thread is woken only at the end; waking it for each token takes longer
            than a tenth of a small model's step.
    """

    at_end = False


class AnswerStream:
    """Iterator over the text pieces of an answer; ``result`` is the answer once it is exhausted.

    It skips the reasoning of a thinking model. ``with_reasoning`` includes it, and ``pieces`` also
    includes tool calls. ``async for`` yields the same pieces in a coroutine, see
    ``oscar_mm.engine.async_pieces.AsyncPieces``.

    Args:
        pieces: generator of the pieces, followed by the complete answer.
        cancel: ends the answer, from any thread; without it the answer ends at its next piece.
        taken: called with the thread that reads the pieces for a coroutine.
        delivery: changed by ``complete``, which needs no pieces.
    """

    def __init__(
        self,
        pieces: Generator[Piece | Answer, None, None],
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
        """Return the next non-empty piece of text."""
        for piece in self.with_reasoning():
            if not isinstance(piece, Reasoning):
                return piece
        raise StopIteration

    def __aiter__(self) -> AsyncPieces[str]:
        """Iterate over the pieces of text in a coroutine; leaving the loop ends the answer."""
        return AsyncPieces(iter(self), self._cancel, self._taken)

    def async_pieces(self) -> AsyncPieces[Piece]:
        """Return ``pieces`` as an asynchronous iterator."""
        return AsyncPieces(self.pieces(), self._cancel, self._taken)

    def with_reasoning(self) -> Iterator[str]:
        """Yield the remaining non-empty pieces of text, the reasoning as ``Reasoning``."""
        for piece in self.pieces():
            if isinstance(piece, str):
                yield piece

    def pieces(self) -> Iterator[Piece]:
        """Yield all remaining non-empty pieces, tool calls as ``ToolCallDelta``."""
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


class OutputProcessor:
    """Builds an ``Answer`` from tokens as they arrive: detokenizer, stop strings and parsers.

    Args:
        tokenizer: tokenizer of the model.
        sampling: sampling options; ``stop`` applies to the text only, not to the reasoning.
        start: ``time.perf_counter()`` at the arrival of the request.
        thinks: tokens that enclose reasoning; None if the model has none.
        prompt: (tokens,) ids of the prompt, which may open the reasoning.
        tools: offered tools; their calls are parsed out of the text after the reasoning.
        continues: whether the text continues the last text of the prompt.

    Attributes:
        token_ids: the tokens so far.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        start: float,
        thinks: ThinkTokens | None = None,
        prompt: torch.Tensor | None = None,
        tools: ToolOffer | None = None,
        *,
        continues: bool = False,
    ) -> None:
        self._calls = None if tools is None else tools.parser()
        if tools is not None and (marks := special_marks(tokenizer, tools.tool_format)):
            tokenizer = cast("PreTrainedTokenizerBase", MarkDecoder(tokenizer, marks))
        self._tokenizer, self._sampling, self._start = tokenizer, sampling, start
        self._thinks, self._breaks = thinks, ""
        self._stop = cast(tuple[str, ...], sampling.stop)  # Sampling makes a tuple of it
        before = prompt[-_CONTEXT:].tolist() if continues and prompt is not None else ()
        self._text = self._detokenizer(before=before)
        self._reasoning: Detokenizer | None = None
        self._reasons: Detokenizer | None = None
        """Set while the model is reasoning."""
        self._opened = 0 if thinks is None or prompt is None else thinks.opened(prompt)
        if self._opened:
            self._begin_reasoning()
        self._first: float | None = None
        self._last: float | None = None
        self.token_ids: list[int] = []

    @property
    def text(self) -> str:
        """The text returned so far."""
        return self._text.text if self._calls is None else self._calls.text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls so far."""
        return () if self._calls is None else self._calls.calls

    @property
    def says(self) -> bool:
        """Whether there is any text or tool call so far."""
        return bool(self.text or self.tool_calls)

    @property
    def stopped(self) -> bool:
        """Whether a stop string or the last allowed tool call has occurred; push no more tokens."""
        return self._text.stopped or (self._calls is not None and self._calls.complete)

    @property
    def reasoning_span(self) -> ReasoningSpan | None:
        """The reasoning so far; None for a model that does not think."""
        if self._reasoning is None:
            return None
        tokens = len(self.token_ids) - len(self._text.token_ids)
        return ReasoningSpan(self._reasoning.text.rstrip("\n"), self._opened, tokens)

    def push(self, token: int) -> list[Piece]:
        """Add a token and return at least one piece, perhaps empty, of text that is now final.

        Pieces of reasoning are ``Reasoning``.
        """
        return self._with_calls(self._push(token)) or [""]

    def finish(self) -> list[Piece]:
        """Return the end of the text, which was withheld until now."""
        pieces = self._with_calls(self._finish())
        return pieces if self._calls is None else pieces + self._calls.finish()

    def _with_calls(self, text: str) -> list[Piece]:
        """Split a piece of text into text and tool calls."""
        if self._calls is None or isinstance(text, Reasoning):
            return [text]
        return self._calls.feed(text)

    def _push(self, token: int) -> str:
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self.token_ids.append(token)
        if self._reasons is not None:
            return self._reason(token, self._reasons)
        if self._thinks is not None and self.token_ids == [self._thinks.opening]:
            self._begin_reasoning()
            return ""
        begins = self._reasoning is not None and not self._text.token_ids
        if begins and not str(self._tokenizer.decode([token])).strip("\n"):
            return ""  # Line breaks between reasoning and text belong to neither.
        return self._text.push(token, may_stop=len(self.token_ids) > self._sampling.min_tokens)

    def _finish(self) -> str:
        if self._reasons is not None:
            return self._without_last_breaks(self._reasons.finish())
        return self._text.finish()

    def answer(self, memory: MemoryReport, prompt_tokens: int, cached_tokens: int = 0) -> Answer:
        """Return the answer; call ``finish`` first."""
        count = len(self.token_ids)
        first = self._first or time.perf_counter()
        decode_s = (self._last or first) - first
        ended = (
            self.stopped
            or count < self._sampling.max_new_tokens
            or self._sampling.includes(self.token_ids[-1])
        )
        span = self.reasoning_span
        calls = self.tool_calls
        return Answer(
            text=self.text,
            token_ids=self.token_ids,
            memory=memory,
            timings=Timings(
                prefill_s=first - self._start,
                decode_s=decode_s,
                tokens_per_s=(count - 1) / decode_s if decode_s else 0.0,
            ),
            finish_reason=("tool_calls" if calls else "stop") if ended else "length",
            prompt_tokens=prompt_tokens,
            tool_calls=calls,
            reasoning=None if span is None else span.text,
            reasoning_tokens=0 if span is None else span.tokens,
            cached_tokens=cached_tokens,
            stop_text=self._text.stop_text,
        )

    def _begin_reasoning(self) -> None:
        self._reasoning = self._reasons = Detokenizer(self._tokenizer, lead="\n")
        self._text = self._detokenizer(lead="\n")

    def _detokenizer(self, lead: str = "", before: Sequence[int] = ()) -> Detokenizer:
        """Create the detokenizer of the answer's text."""
        keeps_stop = self._sampling.include_stop_str_in_output
        return Detokenizer(self._tokenizer, self._stop, lead, before, keeps_stop=keeps_stop)

    def _reason(self, token: int, reasoning: Detokenizer) -> Reasoning:
        if self._thinks is None or token != self._thinks.closing:
            return self._without_last_breaks(reasoning.push(token))
        self._reasons = None
        return self._without_last_breaks(reasoning.finish())

    def _without_last_breaks(self, text: str) -> Reasoning:
        """Return a piece of reasoning, withholding trailing line breaks until text follows."""
        whole = self._breaks + text
        piece = whole.rstrip("\n")
        self._breaks = whole[len(piece) :]
        return Reasoning(piece)


class Detokenizer:
    """Streaming detokenizer of one text.

    Args:
        tokenizer: tokenizer of the model.
        stop: stop strings.
        lead: characters stripped from the beginning of the text.
        before: ids of preceding tokens, whose text this one continues.
        keeps_stop: include the stop string in the text.

    Attributes:
        token_ids: all tokens so far.
        text: the text returned so far.
        stop_text: the stop string that occurred; None if none has so far.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: tuple[str, ...] = (),
        lead: str = "",
        before: Sequence[int] = (),
        *,
        keeps_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop, self._lead, self._keeps_stop = stop, lead, keeps_stop
        self._pending = ""
        # The text of tokens [0, _decoded) is final. Tokens from _context on, whose text is _known,
        # are decoded again with every new token, because a tokenizer may strip the leading space of
        # the first token that it decodes.
        self._context = self._decoded = 0
        self._before = list(before)
        self._known = self._decode(self._before)
        self.token_ids: list[int] = []
        self.text = ""
        self.stop_text: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has occurred."""
        return self.stop_text is not None

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Add a token and return the text that is now final, perhaps empty.

        Args:
            token: id of the next token.
            may_stop: search for stop strings; if False, the text so far is never searched.
        """
        self.token_ids.append(token)
        self._take(self._new_text(whole_characters=True))
        if not may_stop:
            return self._give(len(self._pending))
        last = self._up_to_stop()
        if last is not None:
            return last
        return self._give(len(self._pending) - self._possible_stop())

    def finish(self) -> str:
        """Return the withheld text, including incomplete characters."""
        if self.stopped:
            return ""
        self._take(self._new_text(whole_characters=False))
        last = self._up_to_stop()
        return self._give(len(self._pending)) if last is None else last

    def _up_to_stop(self) -> str | None:
        """Return the final text up to the first stop string; None if there is none."""
        found = [
            (place, place + len(stop) * self._keeps_stop, stop)
            for stop in self._stop
            if (place := self._pending.find(stop)) >= 0
        ]
        if not found:
            return None
        _, end, self.stop_text = min(found)
        return self._give(end, drop_rest=True)

    def _take(self, text: str) -> None:
        self._pending += text
        if not self.text:
            self._pending = self._pending.lstrip(self._lead)

    def _new_text(self, whole_characters: bool) -> str:
        """Return the text of the tokens added since the last call; empty while it may be partial.

        Args:
            whole_characters: withhold text that ends with an incomplete character.
        """
        text = self._decode(self._before + self.token_ids[self._context :])
        known = self._known
        # tokenizers.DecodeStream is no option: it raises if invalid UTF-8 changes the decoding of
        # the bytes before it, as with the byte fallback of Llama and Mistral.
        if len(text) <= len(known) or (whole_characters and text.endswith("\ufffd")):
            return ""
        self._known = text
        if len(self.token_ids) - self._context >= _CONTEXT:
            self._context, self._before = self._decoded, []
            self._known = self._decode(self.token_ids[self._context :])
        self._decoded = len(self.token_ids)
        return text[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return cast(str, text)  # A list only for batches.

    def _possible_stop(self) -> int:
        """Return the number of trailing characters that may begin a stop string."""
        return max(
            (
                size
                for stop in self._stop
                for size in range(1, min(len(stop), len(self._pending) + 1))
                if self._pending.endswith(stop[:size])
            ),
            default=0,
        )

    def _give(self, size: int, drop_rest: bool = False) -> str:
        piece, self._pending = self._pending[:size], "" if drop_rest else self._pending[size:]
        self.text += piece
        return piece


class Reasoning(str):
    """A piece of a model's reasoning, among the pieces of its answer."""

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
