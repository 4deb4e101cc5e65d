"""AnswerWriter: makes an answer of one row of tokens as they come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from oscar_mm.decoding.answer import Answer, Timings
from oscar_mm.decoding.detokenize import Detokenizer
from oscar_mm.decoding.reasoning import Reasoned, Reasoning

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from oscar_mm.decoding.reasoning import ThinkTokens
    from oscar_mm.decoding.sampling import Sampling
    from oscar_mm.memory import MemoryReport


class AnswerWriter:
    """Makes an ``Answer`` of tokens as they come, and of when they came.

    Args:
        tokenizer: of the model.
        sampling: for its ``stop``, which is looked for in the text alone, and ``max_new_tokens``.
        start: ``time.perf_counter()`` when the request came.
        thinks: the tokens between which the model reasons; None if it has none.
        prompt: (tokens,) ids of the prompt, which may begin the reasoning.

    Attributes:
        token_ids: the tokens so far.
        text: the text given out so far.
        stopped: whether a stop text has occurred, after which there is nothing more to push.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        start: float,
        thinks: ThinkTokens | None = None,
        prompt: torch.Tensor | None = None,
    ) -> None:
        self._tokenizer, self._sampling, self._start = tokenizer, sampling, start
        self._thinks, self._breaks = thinks, ""
        self._stop = cast(tuple[str, ...], sampling.stop)  # which it has made of what it was given
        self._text = Detokenizer(tokenizer, self._stop)
        self._reasoning: Detokenizer | None = None
        self._reasons: Detokenizer | None = None
        """As long as the model reasons."""
        self._opened = 0 if thinks is None or prompt is None else thinks.opened(prompt)
        if self._opened:
            self._begin_reasoning()
        self._first: float | None = None
        self._last: float | None = None
        self.token_ids: list[int] = []

    @property
    def text(self) -> str:
        """See the class."""
        return self._text.text

    @property
    def stopped(self) -> bool:
        """See the class."""
        return self._text.stopped

    @property
    def reasoned(self) -> Reasoned | None:
        """The reasoning so far; None for a model that does not think."""
        if self._reasoning is None:
            return None
        tokens = len(self.token_ids) - len(self._text.token_ids)
        return Reasoned(self._reasoning.text.rstrip("\n"), self._opened, tokens)

    def push(self, token: int) -> str:
        """Take a token; the text that is now certain, perhaps empty, as ``Reasoning`` if it is."""
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
        return self._text.push(token)

    def finish(self) -> str:
        """The end of the text: what was held back."""
        if self._reasons is not None:
            return self._without_last_breaks(self._reasons.finish())
        return self._text.finish()

    def answer(self, memory: MemoryReport, prompt_tokens: int) -> Answer:
        """The whole answer, once finished."""
        count = len(self.token_ids)
        first = self._first or time.perf_counter()
        decode_s = (self._last or first) - first
        ended = self.stopped or count < self._sampling.max_new_tokens
        reasoned = self.reasoned
        return Answer(
            text=self._text.text,
            token_ids=self.token_ids,
            memory=memory,
            timings=Timings(
                prefill_s=first - self._start,
                decode_s=decode_s,
                tokens_per_s=(count - 1) / decode_s if decode_s else 0.0,
            ),
            finish_reason="stop" if ended else "length",
            prompt_tokens=prompt_tokens,
            reasoning=None if reasoned is None else reasoned.text,
        )

    def _begin_reasoning(self) -> None:
        self._reasoning = self._reasons = Detokenizer(self._tokenizer, lead="\n")
        self._text = Detokenizer(self._tokenizer, self._stop, lead="\n")

    def _reason(self, token: int, reasoning: Detokenizer) -> Reasoning:
        if self._thinks is None or token != self._thinks.closing:
            return self._without_last_breaks(reasoning.push(token))
        self._reasons = None
        return self._without_last_breaks(reasoning.finish())

    def _without_last_breaks(self, text: str) -> Reasoning:
        """A piece of reasoning; line breaks at its end wait for what comes after them."""
        whole = self._breaks + text
        piece = whole.rstrip("\n")
        self._breaks = whole[len(piece) :]
        return Reasoning(piece)
