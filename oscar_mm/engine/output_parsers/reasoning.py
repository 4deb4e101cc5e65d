"""ReasoningParser: parser of the reasoning between two tokens at the beginning of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self, cast

from oscar_mm.engine.answer import Reasoning
from oscar_mm.engine.detokenizer import Detokenizer
from oscar_mm.engine.output_parsers.output_parser import OutputContext, OutputParser, Part
from oscar_mm.engine.think_tokens import ThinkTokens


class ReasoningParser(OutputParser):
    """Parser of reasoning that is opened by the prompt or by the first token.

    The tokens before the text become ``Reasoning`` pieces, which may be empty: one for each token,
    or one for several that come together. Line breaks around the reasoning belong neither to the
    reasoning nor to the text.
    """

    takes = int

    @classmethod
    def of(cls, context: OutputContext) -> Self | None:
        """Return a parser if the model has tokens that enclose reasoning, else None."""
        return None if context.thinks is None else cls(context, context.thinks)

    def __init__(self, context: OutputContext, thinks: ThinkTokens) -> None:
        self._thinks, self._decoder = thinks, context.decoder
        self._next: Literal["opening", "reasoning", "breaks", "text"]
        self._next = "reasoning" if context.opened else "opening"
        self._reasoning = Detokenizer(context.decoder, lead="\n")
        self._breaks = ""
        """Line breaks that belong to the reasoning only if more reasoning follows."""

    def push(self, part: int) -> Sequence[Part]:
        """Return a chunk of the reasoning, or a token of the text."""
        if self._next == "text":
            return (part,)
        if self._next == "reasoning":
            return (self._reason(part),)
        if self._next == "opening" and part == self._thinks.opening:
            self._next = "reasoning"
            return (Reasoning(),)
        if self._next == "breaks" and not str(self._decoder.decode([part])).strip("\n"):
            return (Reasoning(),)
        self._next = "text"
        return (part,)

    def continuing(self, tokens: list[int]) -> int:
        """Return how many of the next tokens continue the reasoning, up to the closing one."""
        if self._next != "reasoning":
            return 0
        closing = self._thinks.closing
        return tokens.index(closing) if closing in tokens else len(tokens)

    def parse(self, parts: Sequence[Part]) -> list[Part]:
        """See ``OutputParser.parse``; tokens that all continue the reasoning are one piece."""
        if self._next == "text":
            return [*parts]
        tokens = cast("list[int]", parts)
        if parts and self.continuing(tokens) == len(parts):
            return [self._without_last_breaks(self._reasoning.push(*tokens))]
        return super().parse(parts)

    def finish(self) -> Sequence[Part]:
        """Return the rest of the reasoning if the answer ended before the reasoning did."""
        return (self._end(),) if self._next == "reasoning" else ()

    def _reason(self, token: int) -> Reasoning:
        if token != self._thinks.closing:
            return self._without_last_breaks(self._reasoning.push(token))
        self._next = "breaks"
        return self._end()

    def _end(self) -> Reasoning:
        return self._without_last_breaks(self._reasoning.finish())

    def _without_last_breaks(self, text: str) -> Reasoning:
        whole = self._breaks + text
        piece = whole.rstrip("\n")
        self._breaks = whole[len(piece) :]
        return Reasoning(piece)
