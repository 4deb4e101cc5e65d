"""Generation: one answer while it is written, and its text so far."""

from __future__ import annotations

from collections.abc import Iterator
from threading import RLock
from typing import Protocol

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.slot_growth import Growth
from oscar_mm.generation.answer import Answer, AnswerWriter
from oscar_mm.generation.decode_loop import decode
from oscar_mm.generation.family import Family
from oscar_mm.generation.prefix_cache import PrefixCache, processor_settings
from oscar_mm.generation.prompt import Prompt, remaining
from oscar_mm.generation.sampling import Sampling


class Reservations(Protocol):
    """Keeps room for answers; ``oscar_mm.admission.admission.Admission`` does."""

    def growth(
        self, prompt: Prompt, max_new_tokens: int, cache: OscarCache | None = None
    ) -> Growth:
        """Slots that a prompt of a single row and its answer will take."""
        ...

    def reserve(self, growth: Growth, prompt: Prompt, cache: OscarCache) -> object:
        """Make room for an answer; the room is kept until what is returned is dropped."""
        ...


class Engine(Protocol):
    """A loaded model, and what all of its answers share."""

    @property
    def family(self) -> Family:
        """The model, its processor and what is special about them."""
        ...

    @property
    def lock(self) -> RLock:
        """Held for each step of the model and each change of the store."""
        ...

    @property
    def prefixes(self) -> PrefixCache | None:
        """Beginnings of prompts that were read before; None if they are not kept."""
        ...

    @property
    def admission(self) -> Reservations:
        """Where an answer gets its room."""
        ...

    @property
    def prefill_chunk(self) -> int | None:
        """Tokens of a prompt that are read at a time; None for all at once."""
        ...


class Generation:
    """Iterator of pieces of text, some empty; each step is made with the engine's lock held.

    Args:
        engine: whose model answers.
        prompt: of a single row.
        cache: holds what comes before the prompt; ends up with prompt and answer too. Where it is
            empty and the engine keeps the prompt's beginning, a cache that holds this takes its
            place.
        sampling: how tokens are chosen.
        start: ``time.perf_counter()`` when the request came.
        history: (1, tokens) ids of what the cache holds, for the repetition penalty.

    Attributes:
        cache: the cache that is written, as above.
        written: the tokens and the text so far.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        cache: OscarCache,
        sampling: Sampling,
        start: float,
        history: torch.Tensor | None = None,
    ) -> None:
        self.engine, self.prompt, self.cache, self.sampling = engine, prompt, cache, sampling
        ids = prompt.inputs["input_ids"][0]
        self.written = AnswerWriter(
            engine.family.processor.tokenizer, sampling, start, engine.family.think_tokens, ids
        )
        self._history = history

    def __iter__(self) -> Iterator[str]:
        """The model runs as pieces are taken."""
        engine, family = self.engine, self.engine.family
        with engine.lock:
            shared = None if self.cache.get_seq_length() else engine.prefixes
            settings = processor_settings(family.processor) if shared is not None else ""
            prompt, history = self.prompt, self._history
            if shared is not None and (prefix := shared.find(prompt, settings)) is not None:
                self.cache, tokens = prefix, prefix.get_seq_length()
                history = prompt.inputs["input_ids"][:, :tokens]
                prompt = remaining(prompt, tokens)
            admission = engine.admission
            growth = admission.growth(prompt, self.sampling.max_new_tokens, self.cache)
            room = admission.reserve(growth, prompt, self.cache)
        steps = decode(
            family.model,
            prompt,
            self.cache,
            self.sampling,
            end_tokens=family.end_tokens(),
            prefill_chunk=engine.prefill_chunk,
            history=history,
        )
        while not self.written.stopped:
            with engine.lock:
                step = next(steps, None)
                if shared is not None:
                    # The prompt is read, and the first token not in the cache yet.
                    shared.keep(self.prompt, settings, self.cache)
                    shared = None
                token = None if step is None else step[0]
                if token is None:
                    break
                piece = self.written.push(token)
            yield piece
        with engine.lock:
            piece = self.written.finish()
        del room  # The longest answer had more.
        yield piece

    def answer(self) -> Answer:
        """The answer so far."""
        with self.engine.lock:
            memory = self.cache.memory()
        return self.written.answer(memory, self.prompt.tokens)
