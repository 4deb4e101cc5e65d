"""AnswerWriter: makes an answer of one row of tokens as they come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from oscar_mm.decoding.answer import Answer, Timings
from oscar_mm.decoding.detokenize import Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oscar_mm.decoding.sampling import Sampling
    from oscar_mm.memory import MemoryReport


class AnswerWriter:
    """Makes an ``Answer`` of tokens as they come, and of when they came.

    Args:
        tokenizer: of the model.
        sampling: for its ``stop`` and ``max_new_tokens``.
        start: ``time.perf_counter()`` when the request came.

    Attributes:
        token_ids: the tokens so far.
        text: the text given out so far.
        stopped: whether a stop text has occurred, after which there is nothing more to push.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, start: float
    ) -> None:
        self._text, self._start = Detokenizer(tokenizer, sampling.stop), start
        self._longest = sampling.max_new_tokens
        self._first: float | None = None
        self._last: float | None = None

    @property
    def token_ids(self) -> list[int]:
        """See the class."""
        return self._text.token_ids

    @property
    def text(self) -> str:
        """See the class."""
        return self._text.text

    @property
    def stopped(self) -> bool:
        """See the class."""
        return self._text.stopped

    def push(self, token: int) -> str:
        """Take a token; the text that is now certain, perhaps empty."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        return self._text.push(token)

    def finish(self) -> str:
        """The end of the text: what was held back."""
        return self._text.finish()

    def answer(self, memory: MemoryReport, prompt_tokens: int) -> Answer:
        """The whole answer, once finished."""
        count = len(self.token_ids)
        first = self._first or time.perf_counter()
        decode_s = (self._last or first) - first
        ended = self.stopped or count < self._longest
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
        )
