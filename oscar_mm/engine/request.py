"""Request: state of a request while its output is generated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.engine.answer import Answer, Delivery
from oscar_mm.engine.decode_runner import RequestState
from oscar_mm.engine.family import Family
from oscar_mm.engine.output_parsers.output_parser import OutputContext
from oscar_mm.engine.output_processor import OutputProcessor
from oscar_mm.engine.prefix_cache import ReaderState
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.prompt_logprobs import PromptLogprobs
from oscar_mm.engine.sampling import Sampling, token_sequences
from oscar_mm.engine.speech import MediaStates, Speech, Voice
from oscar_mm.policy import Bits
from oscar_mm.tool_parsers.offer import ToolOffer
from oscar_mm.tool_parsers.parser import Piece


class RequestEngine(Protocol):
    """Interface of ``oscar_mm.engine.engine.Engine`` that a request uses."""

    family: Family

    def submit(self, request: Request) -> None:
        """Add a request to the queue."""
        ...

    def abort(self) -> None:
        """Release the memory of requests that have just ended; safe in finalizers."""
        ...

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function in the engine thread and return its result."""
        ...

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until ``is_done`` returns True; meanwhile, requests run."""
        ...


Result = TypeVar("Result")
Item = TypeVar("Item")
_INTERRUPTED = "a step of several requests was interrupted"


class Request(RequestState):
    """A request while its output is generated: an iterator of output pieces, some of them empty.

    Either iterate over the request, which submits it to the engine, or call ``Engine.submit``, and
    ``complete`` once the request has ended. Pieces are queued until they are taken; generation
    continues meanwhile as long as any request of the engine is iterated. Leaving the iterator
    cancels the request.

    Args:
        engine: engine that runs the request.
        prompt: prompt of a single row.
        cache: cache with the tokens before the prompt; at the end it also contains prompt and
            output, without the last token if ``max_new_tokens`` or a stop string ended the output.
            If it is empty and the prefix cache has a prefix of the prompt, a fork of the cached
            prefix replaces it.
        sampling: sampling options.
        start: ``time.perf_counter()`` when the request arrived.
        history: (1, tokens) ids of the tokens in the cache, for the repetition penalty.
        keeps_cache: whether to keep the cache open at the end; otherwise its pages are released,
            even if pieces have not been taken.
        tools: tools offered to the model.
        delivery: when the iterating thread is woken; by default, for each piece.
        states: collects what a talker needs of the media in the prompt; None if no talker does.

    Attributes:
        cache: the cache in use, see above.
        client: names that identify the client, such as address and user, the most general one
            first; see ``Scheduler``.
        submitted: whether the request is, or was, in the engine's queue.
        cancelled: whether ``cancel`` ended the request.
        prompt_tokens: prompt length as reported in the answer.
        text_tokens: number of tokens generated so far, without those of speech.
        prompt_logprobs: log-probabilities of the prompt; None unless ``sampling`` requests them.
    """

    voice: Voice | None = None
    """Speech of the answer; None for an answer in text."""

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
        delivery: Delivery | None = None,
        states: MediaStates | None = None,
    ) -> None:
        ids = prompt.inputs["input_ids"][0].cpu()
        seen = ids if history is None else torch.cat([history[0].cpu(), ids])
        family, tokenizer = engine.family, engine.family.processor.tokenizer
        bad_words = token_sequences(tokenizer, sampling.bad_words or ())
        position = int(prompt.next_position)
        thinks = None if prompt.continues else family.think_tokens
        ends, adapter = family.end_tokens(), prompt.adapter
        super().__init__(sampling, seen, position, ends, bad_words, thinks, adapter)
        self.engine, self.prompt, self.cache, self.sampling = engine, prompt, cache, sampling
        context = OutputContext(tokenizer, sampling, thinks, ids, tools, prompt.continues)
        self._written = OutputProcessor(context, start)
        self.delivery = Delivery() if delivery is None else delivery
        self.states = states
        # The states of a cached prefix are not known.
        self.has_past = cache.get_seq_length() > 0 or states is not None
        self.prompt_tokens = prompt.tokens
        self.unread = prompt
        """The part of the prompt that is not in the cache."""
        self.chunks: Iterator[torch.Tensor | None] | None = None
        """Iterator that prefills the remaining chunks of a partly prefilled prompt."""
        self.reader_state: ReaderState | None = None
        """State of processor and model at admission; None if the prefix cache is not to keep the
        prompt."""
        self.reservation: object | None = None
        """Memory reservation, in effect while referenced."""
        self.slot_counts: dict[Bits, int] = {}
        """Number of slots of each kind that the prompt and the first tokens of the answer will
        take; empty before admission."""
        self.submitted = self.cancelled = False
        self.client: tuple[str, ...] = ()
        top = sampling.prompt_logprobs
        self.prompt_logprobs = None if top is None else PromptLogprobs(ids, top)
        self.text_tokens = 0
        self._pieces: list[Piece | Speech] = []
        self._unwritten: list[tuple[int, float]] = []
        """Tokens that are not detokenized yet, and when they were sampled."""
        # Reentrant, since a finalizer may run in a thread that holds it.
        self._writing = threading.RLock()
        self._keeps_cache = keeps_cache
        self._memory: MemoryReport | None = None

    @property
    def is_over(self) -> bool:
        """Whether no more pieces will be queued."""
        return self.ended

    @property
    def is_ready(self) -> bool:
        """Whether pieces are queued or the request is over."""
        queued = bool(self._pieces or self._unwritten)
        return self.is_over or (queued and not self.delivery.at_end)

    @property
    def is_read_alone(self) -> bool:
        """Whether no other prompt may share the prefill pass."""
        return self.prompt_logprobs is not None or self.states is not None

    def listening(self) -> AbstractContextManager[None]:
        """Within the block, the model reads the prompt or a chunk of it."""
        return nullcontext() if self.states is None else self.states.listening(self.cache)

    @property
    def max_total_tokens(self) -> int:
        """Maximum total number of tokens of prompt and output."""
        return self.prompt.tokens + self.sampling.max_new_tokens

    @property
    def output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return self.text_tokens

    def take_pieces(self) -> list[Piece | Speech]:
        """Remove and return the queued pieces of the iterator; the result may be empty.

        Tokens that have come since the last call are decoded together, so there may be fewer pieces
        than tokens. Call this only from the thread that consumes the request.
        """
        self._detokenize(together=True)
        return _taken(self._pieces)

    @property
    def written(self) -> OutputProcessor:
        """The output so far."""
        self._detokenize()
        return self._written

    @property
    def may_stop(self) -> bool:
        """Whether a stop string may end the output."""
        return self._written.may_stop

    def write(self, token: int) -> None:
        """Queue a sampled token. ``ended`` is set only after the last one.

        The thread that takes the pieces detokenizes it, not the engine thread, unless its text may
        end the answer.
        """
        self.text_tokens += 1
        self._unwritten.append((token, time.perf_counter()))
        if self.may_stop and self.written.stopped:
            self.ended = True  # ``|=`` could undo a concurrent ``cancel``.

    def _detokenize(self, *, together: bool = False) -> None:
        """Queue the pieces of the tokens so far: one for each token, or ``together`` fewer."""
        with self._writing:
            try:
                while self._unwritten:
                    sampled = _taken(self._unwritten)
                    for some in [sampled] if together else [[one] for one in sampled]:
                        self._pieces += self._written.push_all(some)
            except Exception as error:  # A tokenizer may raise anything; fail only this request.
                self._unwritten.clear()
                self.fail(error)
                self.engine.abort()  # No step may follow that would release the memory.

    def fail(self, error: BaseException) -> None:
        """End the request with an error; an interrupt raised in a step becomes a RuntimeError,
        since it was not meant for the thread that waits for the request."""
        super().fail(error if isinstance(error, Exception) else RuntimeError(_INTERRUPTED))

    def queue(self, piece: Speech) -> None:
        """Queue a piece that is not part of the text."""
        self._detokenize()
        self._pieces.append(piece)

    def __iter__(self) -> Iterator[Piece | Speech]:
        """Submit the request unless it is already submitted, and yield its pieces; the model runs
        as they are consumed."""
        if not self.submitted:
            self.engine.submit(self)
        try:
            ended = False
            while not ended:
                self.engine.run_until(lambda: self.is_ready)
                ended = self.is_over
                self._detokenize()
                yield from _taken(self._pieces)
            self._raise_error()
            yield from self.written.finish()
        finally:
            self.cancel()

    def complete(self) -> Answer:
        """Return the answer of an ended request, and release its pages.

        Raises:
            BaseException: ``error``, if the request failed.
        """
        self.cancel()
        if self.reservation is not None or not (self._keeps_cache or self.cache.closed):
            self.engine.call(self.settle)
        written = self.written
        self._raise_error()
        written.finish()
        return self.answer()

    def _raise_error(self) -> None:
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            # The frames of the error's traceback reference this request.
            del error

    def cancel(self) -> None:
        """End the request now, even during prefill; no effect if it has ended.

        Safe to call from any thread, including from a finalizer.
        """
        if not self.is_over:
            self.cancelled = self.ended = True
            self.engine.abort()

    def settle(self) -> None:
        """Release the memory of an ended request, in the engine thread. Idempotent."""
        self.reservation = self.chunks = None
        self.cache.spares.clear()  # A chat may keep the cache for long.
        if not (self._keeps_cache or self.cache.closed):
            if self.error is None:
                self.cache.shrink()
                self._memory = self.cache.memory()
            self.cache.close()

    def answer(self, memory: MemoryReport | None = None) -> Answer:
        """Return the answer so far.

        Args:
            memory: memory report for the answer; by default, that of its caches.
        """
        memory = memory or self._memory or self.engine.call(self._memory_report)
        cached = self.prompt.tokens - self.unread.tokens
        answer = self.written.answer(memory, self.prompt_tokens, cached)
        answer = replace(answer, drafts=self.drafted, accepted_drafts=self.accepted)
        if self.prompt_logprobs is not None:
            answer = replace(answer, prompt_logprobs=self.prompt_logprobs.complete)
        return answer if self.sampling.logprobs is None else replace(answer, logprobs=self.logprobs)

    def _memory_report(self) -> MemoryReport:
        """Return the memory report; call this in the engine thread, which may have closed the cache
        since ``answer`` looked."""
        return self._memory or self.cache.memory()


class PrefillRequest(Request):
    """Request that prefills a prompt without generating output; iterate over it or submit it.

    Args:
        engine, prompt, cache, states: see ``Request``; the cache stays open at the end.
    """

    def __init__(
        self,
        engine: RequestEngine,
        prompt: Prompt,
        cache: OscarCache,
        states: MediaStates | None = None,
    ) -> None:
        once = Sampling(max_new_tokens=1)  # The last sampled token is never stored.
        how: dict[str, Any] = {"keeps_cache": True, "states": states}
        super().__init__(engine, prompt, cache, once, time.perf_counter(), **how)
        self.has_past = True  # Bypasses the prefix cache.

    def write(self, token: int) -> None:
        """Discard the token that would follow the prompt."""


def _taken(items: list[Item]) -> list[Item]:
    """Remove and return all items; another thread may append some meanwhile."""
    taken = items[:]
    del items[: len(taken)]
    return taken
