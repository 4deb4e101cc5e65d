"""Generation: one answer as it is made, and what has come of it so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.generation.answer import Answer, AnswerWriter
from oscar_mm.generation.decode_loop import decode
from oscar_mm.generation.prefix_cache import processor_settings
from oscar_mm.generation.prompt import Prompt, remaining
from oscar_mm.generation.sampling import Sampling

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline


class Generation:
    """Iterator of pieces of text, some empty; each step is made with the pipeline's lock held.

    Args:
        pipe: whose model answers.
        prompt: of a single row.
        cache: what is known before the prompt; ends up with what is known after the answer. An
            empty one gives way to one that has the prompt's beginning, if the pipeline keeps
            prefixes and knows it.
        sampling: how tokens are chosen.
        start: ``time.perf_counter()`` when the request came.
        history: (1, tokens) ids of what the cache holds, for the repetition penalty.

    Attributes:
        cache: see above.
        written: the tokens and the text so far.
    """

    def __init__(
        self,
        pipe: Pipeline,
        prompt: Prompt,
        cache: OscarCache,
        sampling: Sampling,
        start: float,
        history: torch.Tensor | None = None,
    ) -> None:
        self.pipe, self.prompt, self.cache, self.sampling = pipe, prompt, cache, sampling
        ids = prompt.inputs["input_ids"][0]
        self.written = AnswerWriter(
            pipe.processor.tokenizer, sampling, start, pipe.family.think_tokens, ids
        )
        self._history = history

    def __iter__(self) -> Iterator[str]:
        """The model runs as pieces are taken."""
        pipe = self.pipe
        with pipe.lock:
            shared = None if self.cache.get_seq_length() else pipe.prefixes
            settings = processor_settings(pipe.processor) if shared is not None else ""
            prompt, history = self.prompt, self._history
            if shared is not None and (found := shared.find(prompt, settings)) is not None:
                self.cache, known = found, found.get_seq_length()
                history = prompt.inputs["input_ids"][:, :known]
                prompt = remaining(prompt, known)
            growth = pipe.growth(prompt, self.sampling.max_new_tokens, self.cache)
            pipe.make_room(growth, prompt.tokens)
            room = pipe.reserve(growth, prompt.tokens, self.cache)
        steps = decode(
            pipe.model,
            prompt,
            self.cache,
            self.sampling,
            end_tokens=pipe.family.end_tokens(),
            prefill_chunk=pipe.prefill_chunk,
            history=history,
        )
        while not self.written.stopped:
            with pipe.lock:
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
        with pipe.lock:
            piece = self.written.finish()
        del room  # The longest answer had more.
        yield piece

    def answer(self) -> Answer:
        """The answer so far."""
        with self.pipe.lock:
            memory = self.cache.memory()
        return self.written.answer(memory, self.prompt.tokens)
