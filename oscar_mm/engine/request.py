"""Generation: one answer while it is written, and its text so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.engine.answer import Answer, OutputProcessor
from oscar_mm.engine.decode_runner import RequestState
from oscar_mm.engine.family import Family
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.prompt_logprobs import PromptLogprobs
from oscar_mm.engine.sampling import Sampling, token_sequences
from oscar_mm.threads import FairLock
from oscar_mm.tool_parsers.offer import ToolOffer
from oscar_mm.tool_parsers.parser import Piece


class RequestEngine(Protocol):
    """What an answer needs of ``oscar_mm.engine.engine.Engine``."""

    family: Family

    @property
    def lock(self) -> FairLock:
        """Held for each step of the model and each change of the store."""
        ...

    def submit(self, request: Request) -> None:
        """Put an answer into the queue."""
        ...

    def run_until(self, done: Callable[[], bool]) -> None:
        """Return when ``done``; until then make steps, or wait for who makes them."""
        ...

    def drop_ended(self) -> None:
        """Let go of answers that have ended."""
        ...


_INTERRUPTED = "a thread that made a step for several answers was interrupted in the middle of it"


class Request(RequestState):
    """One answer while it is written: an iterator of its pieces, some empty.

    Iterate over it, which puts it into the engine's queue; or ``Engine.submit`` it, and
    ``complete`` it once it has ended. Pieces wait until they are taken; the answer goes on
    meanwhile as long as others are asked for theirs. Leaving the iterator ends the answer.

    Args:
        engine: that answers.
        prompt: of a single row.
        cache: holds what comes before the prompt; ends up with prompt and answer too, without the
            last token where ``max_new_tokens`` or a stop text ends it. Where it is empty and the
            engine keeps the prompt's beginning, a cache that holds this takes its place.
        sampling: how tokens are chosen.
        start: ``time.perf_counter()`` when the request came.
        history: (1, tokens) ids of what the cache holds, for the repetition penalty.
        keeps_cache: leave the cache as it is when the answer has ended; else its pages are given
            up then, whether the pieces were taken or not.
        tools: that are offered to the model.

    Attributes:
        cache: the cache that is written, as above.
        cancelled: whether ``cancel`` ended the answer.
        prompt_tokens: for the answer.
        prompt_logprobs: log-probabilities of the prompt; None if ``sampling`` does not request
            them.
        written: the tokens and the text so far.
    """

    def __init__(
        self,
        engine: RequestEngine,
        prompt: Prompt,
        cache: OscarCache,
        sampling: Sampling,
        start: float,
        history: torch.Tensor | None = None,
        *,
        keeps_cache: bool = False,
        tools: ToolOffer | None = None,
    ) -> None:
        ids = prompt.inputs["input_ids"][0].cpu()
        seen = ids if history is None else torch.cat([history[0].cpu(), ids])
        family, tokenizer = engine.family, engine.family.processor.tokenizer
        bad_words = token_sequences(tokenizer, sampling.bad_words or ())
        position = int(prompt.next_position)
        thinks = None if prompt.continues else family.think_tokens
        super().__init__(sampling, seen, position, family.end_tokens(), bad_words, thinks)
        self.engine, self.prompt, self.cache, self.sampling = engine, prompt, cache, sampling
        self.written = OutputProcessor(
            tokenizer, sampling, start, thinks, ids, tools, continues=prompt.continues
        )
        self.has_past = cache.get_seq_length() > 0
        self.prompt_tokens = prompt.tokens
        self.unread = prompt
        """What of the prompt the cache does not hold."""
        self.chunks: Iterator[torch.Tensor | None] | None = None
        """Reads the rest of a prompt of which a part has been read."""
        self.reader_state: object = None
        """Of what reads the prompt, where the engine keeps beginnings of prompts."""
        self.room: object | None = None
        """Reserved for the answer while this is referenced."""
        self.cancelled = False
        top = sampling.prompt_logprobs
        self.prompt_logprobs = None if top is None else PromptLogprobs(ids, top)
        self._pieces: deque[Piece] = deque()
        self._keeps_cache = keeps_cache
        self._memory: MemoryReport | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there are pieces to take, or will be no more."""
        return bool(self._pieces) or self.ended

    @property
    def max_total_tokens(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return self.prompt.tokens + self.sampling.max_new_tokens

    def take_pieces(self) -> list[Piece]:
        """The pieces that wait, perhaps empty, which the iterator passes over then. From the one
        thread that asks for pieces."""
        return [self._pieces.popleft() for _ in range(len(self._pieces))]

    def write(self, token: int) -> None:
        """Give out the text of a token that was chosen. Other threads see that the answer has ended
        once its last piece is there."""
        try:
            self._pieces += self.written.push(token)
        except Exception as error:  # Whatever a tokenizer raises is this answer's own.
            self.fail(error)
        if self.written.stopped:
            self.ended = True  # Not ``|=``, which undoes a ``cancel`` that comes in between.

    def fail(self, error: BaseException) -> None:
        """End the answer with an error; an interrupt is only the error of the thread that it hit,
        which may wait for another answer."""
        super().fail(error if isinstance(error, Exception) else RuntimeError(_INTERRUPTED))

    def __iter__(self) -> Iterator[Piece]:
        """Submit the answer; the model runs as pieces are taken."""
        self.engine.submit(self)
        try:
            ended = False
            while not ended:
                self.engine.run_until(lambda: self.is_ready)
                ended = self.ended
                while self._pieces:
                    yield self._pieces.popleft()
            self._raise_error()
            yield from self.written.finish()
        finally:
            self.cancel()

    def complete(self) -> Answer:
        """The answer of a generation that has ended; its pages are given up.

        Raises:
            BaseException: ``error``.
        """
        with self.engine.lock.briefly():
            self.cancel()
            self.settle()
            self._raise_error()
            self.written.finish()
            return self.answer()

    def _raise_error(self) -> None:
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            # The frames of its traceback hold this answer.
            del error

    def cancel(self) -> None:
        """End the answer where it is, in the middle of its prompt too; does nothing where it has
        ended. From any thread, also by the garbage collector."""
        if not self.ended:
            self.cancelled = True
        self.ended = True
        self.engine.drop_ended()

    def settle(self) -> None:
        """Give up what an answer that has ended needs no more; under the engine's lock. A second
        time does nothing."""
        self.room = self.chunks = None
        if not (self._keeps_cache or self.cache.closed):
            if self.error is None:
                self.cache.shrink()
                self._memory = self.cache.memory()
            self.cache.close()

    def answer(self) -> Answer:
        """The answer so far."""
        with self.engine.lock.briefly():
            memory = self._memory or self.cache.memory()
        cached = self.prompt.tokens - self.unread.tokens
        answer = self.written.answer(memory, self.prompt_tokens, cached)
        if self.prompt_logprobs is not None:
            answer = replace(answer, prompt_logprobs=self.prompt_logprobs.complete)
        return answer if self.sampling.logprobs is None else replace(answer, logprobs=self.logprobs)


class PrefillRequest(Request):
    """A prompt that is read and not answered; iterate over it, or submit it and wait for its end.

    Args:
        engine, prompt, cache: as of ``Request``; the cache is left as it is at the end.
    """

    def __init__(self, engine: RequestEngine, prompt: Prompt, cache: OscarCache) -> None:
        once = Sampling(max_new_tokens=1)  # An answer's last token is not stored.
        super().__init__(engine, prompt, cache, once, time.perf_counter(), keeps_cache=True)
        self.has_past = True  # No prefix is looked for or kept.

    def write(self, token: int) -> None:
        """Leave out the token that would follow the prompt."""
