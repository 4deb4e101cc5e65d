"""OutputProcessor: builds an ``Answer`` from tokens as they arrive."""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import attrgetter
from typing import cast

from oscar_mm.cache.memory import MemoryReport
from oscar_mm.engine.answer import Answer, Reasoning, ReasoningSpan, Timings
from oscar_mm.engine.output_parsers.output_parser import OutputContext, Part
from oscar_mm.engine.output_parsers.reasoning import ReasoningParser
from oscar_mm.engine.output_parsers.registry import parsers_of
from oscar_mm.engine.output_parsers.text_decoder import TextDecoder
from oscar_mm.tool_parsers.calls import ToolCall, ToolCallDelta, joined_calls
from oscar_mm.tool_parsers.parser import Piece


class OutputProcessor:
    """Builds an ``Answer`` by passing tokens through a chain of parsers as they arrive.

    Args:
        context: information about the answer for the parsers.
        start: ``time.perf_counter()`` when the request arrived.

    Attributes:
        token_ids: ids of the tokens so far.
        may_stop: whether ``stopped`` may become true.
    """

    def __init__(self, context: OutputContext, start: float) -> None:
        self._context, self._start = context, start
        self._parsers = parsers_of(context)
        self.may_stop = any(parser.may_stop for parser in self._parsers)
        self._decoder = next(one for one in self._parsers if isinstance(one, TextDecoder))
        reasoners = (one for one in self._parsers if isinstance(one, ReasoningParser))
        self._reasoner = next(reasoners, None)
        self._texts: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._reasoning: list[str] = []
        self._reasoning_tokens = 0
        self._first: float | None = None
        self._last: float | None = None
        self.token_ids = context.token_ids

    @property
    def text(self) -> str:
        """The text returned so far."""
        return "".join(self._texts)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls so far; the arguments of the last one may be incomplete."""
        return joined_calls(self._deltas)

    @property
    def says(self) -> bool:
        """Whether the answer has any text or tool call so far."""
        return bool(self.text or self._deltas)

    @property
    def stopped(self) -> bool:
        """Whether a stop string or the last allowed tool call has occurred; push no more tokens."""
        return any(map(attrgetter("stopped"), self._parsers))

    @property
    def reasoning_span(self) -> ReasoningSpan | None:
        """The reasoning so far; None if the model has not begun to reason."""
        opened, tokens = self._context.opened, self._reasoning_tokens
        if not (opened or tokens):
            return None
        return ReasoningSpan("".join(self._reasoning), opened, tokens)

    def push_all(self, sampled: Sequence[tuple[int, float]]) -> list[Piece]:
        """Add tokens and return the pieces that they complete.

        Tokens of the text, or of the reasoning, are decoded together if that cannot change the
        answer: this takes a fraction of the time that ``push`` takes for each of them.

        Args:
            sampled: for each token, the arguments of ``push``.
        """
        pieces: list[Piece] = []
        while sampled:
            tokens = [token for token, _ in sampled]
            count = 0 if self.may_stop else self._alike(tokens)
            if count > 1:
                pieces += self._parsed(tokens[:count], sampled[0][1], sampled[count - 1][1])
            else:
                pieces += self.push(*sampled[0])
            sampled = sampled[max(count, 1) :]
        return pieces

    def _alike(self, tokens: list[int]) -> int:
        """Return how many of the next tokens certainly are text, or continue the reasoning."""
        if self._decoder.has_begun:
            return len(tokens)
        return 0 if self._reasoner is None else self._reasoner.continuing(tokens)

    def push(self, token: int, at: float) -> list[Piece]:
        """Add a token and return the pieces that it completes: at least one, which may be empty.

        Chunks of reasoning are ``Reasoning``.

        Args:
            token: id of the token.
            at: ``time.perf_counter()`` when it was sampled.
        """
        return self._parsed([token], at, at) or [""]

    def _parsed(self, tokens: list[int], first: float, last: float) -> list[Piece]:
        """Add tokens and return the pieces; the times are those of the first and last token."""
        self._first, self._last = self._first or first, last
        self.token_ids += tokens
        parts: list[Part] = cast("list[Part]", tokens)
        for parser in self._parsers:
            parts = parser.parse(parts)
        return self._collect(parts)

    def finish(self) -> list[Piece]:
        """Return the pieces that were held back until the end of the answer."""
        parts: list[Part] = []
        for parser in self._parsers:
            parts = [*parser.parse(parts), *parser.finish()]
        return self._collect(parts)

    def _collect(self, parts: list[Part]) -> list[Piece]:
        """Add pieces to the answer, and return them."""
        pieces = cast("list[Piece]", parts)  # ``TextDecoder`` has left no token.
        for piece in pieces:
            if isinstance(piece, Reasoning):
                self._reasoning.append(piece)
                self._reasoning_tokens = len(self.token_ids)
            elif isinstance(piece, str):
                self._texts.append(piece)
            else:
                self._deltas.append(piece)
        return pieces

    @property
    def finish_reason(self) -> str:
        """Why the answer ended, see ``Answer``; valid after ``finish``."""
        count, sampling = len(self.token_ids), self._context.sampling
        if self.stopped or count < sampling.max_new_tokens or sampling.includes(self.token_ids[-1]):
            return "tool_calls" if self.tool_calls else "stop"
        return "length"

    def answer(self, memory: MemoryReport, prompt_tokens: int, cached_tokens: int = 0) -> Answer:
        """Return the answer; call ``finish`` first."""
        count = len(self.token_ids)
        first = self._first or time.perf_counter()
        decode_s = (self._last or first) - first
        span = self.reasoning_span
        return Answer(
            text=self.text,
            token_ids=self.token_ids,
            memory=memory,
            timings=Timings(
                prefill_s=first - self._start,
                decode_s=decode_s,
                tokens_per_s=(count - 1) / decode_s if decode_s else 0.0,
            ),
            finish_reason=self.finish_reason,
            prompt_tokens=prompt_tokens,
            tool_calls=self.tool_calls,
            reasoning=None if span is None else span.text,
            reasoning_tokens=0 if span is None else span.tokens,
            cached_tokens=cached_tokens,
            stop_text=self._decoder.stop_text,
        )
