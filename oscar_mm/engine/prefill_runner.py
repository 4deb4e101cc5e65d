"""PrefillRunner: prompts through a model into their caches, short ones together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from oscar_mm.cache.batch_view import BatchView, balanced_alike
from oscar_mm.cache.cache import OscarCache, balancing_of
from oscar_mm.cache.page_store import PageStore
from oscar_mm.engine.family import Family
from oscar_mm.engine.prefill import MAX_TOKENS, prefill_varlen, read_in_chunks
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.prompt_logprobs import PromptLogprobs
from oscar_mm.engine.running_batches import RunningBatches
from oscar_mm.fast_decode.prompt_layers import PromptLayers
from oscar_mm.modules import weights_key
from oscar_mm.ops.pack import NOT_STORABLE
from oscar_mm.torch_modes import eager

_IN_LINE = {"cpu": 2048}
"""Most tokens of short prompts that are read in one pass, by kind of device; elsewhere as many as
modules see at a time. A GPU reads four prompts of 2,000 tokens in the time in which the host alone
launches two (8B, H200)."""

_CHUNK = {"cpu": 1024}
"""Tokens of a chunk where others shall not wait for a long prompt, by kind of device: with fewer,
a CPU reads 13,000 tokens in more than 1.15 times as long, as each chunk unpacks what is packed."""
_LONG_CHUNK = 1 << 15
"""The same elsewhere: a GPU reads so many tokens in a few seconds."""


def usual_chunk(device: torch.device) -> int:
    """Tokens of a prompt that a service reads at a time: attention over shorter ones is exact."""
    return _CHUNK.get(device.type, _LONG_CHUNK)


class PrefillRunner:
    """Reads prompts of a single row into caches of one store; used under the store's lock.

    Args:
        family: the model, its processor and what is special about them.
        store: of the caches.
        chunk: tokens of a prompt that are read at a time; None for all at once.
        groups: answers that make steps between the layers of a prompt.

    Attributes:
        max_varlen_tokens: most tokens of short prompts that are read in one pass.
        max_at_once: most tokens of a prompt that is read in one chunk.
    """

    def __init__(
        self,
        family: Family,
        store: PageStore,
        chunk: int | None,
        groups: RunningBatches,
    ) -> None:
        self.family, self._store, self._chunk, self._groups = family, store, chunk, groups
        self.max_at_once = chunk or math.inf
        in_line = _IN_LINE.get(family.device.type, MAX_TOKENS)
        self.max_varlen_tokens = min(in_line, chunk or in_line)
        self._sigmas: dict[int, torch.Tensor] = {}
        self._weights: object = None
        self._state: object = None
        self._layers: PromptLayers | None = None

    @property
    def state(self) -> object:
        """The state of the model's weights and adapters: equal as long as they are the same."""
        state = weights_key(self.family.model)
        if state != self._state:
            self._state = state
        return self._state  # One object for all who keep it.

    @property
    def sigmas(self) -> dict[int, torch.Tensor]:
        """Balancing by layer, see ``oscar_mm.cache.cache.balancing_of``."""
        if self._weights is None:
            self.refresh()
        return self._sigmas

    def refresh(self) -> bool:
        """Look at the model's weights anew; whether they have changed."""
        weights = weights_key(self.family.model)
        if weights == self._weights:
            return False
        self._weights, model = weights, self.family.model
        self._sigmas = balancing_of(model, self._store.policy)
        fast = self.family.device.type == "cuda" and PromptLayers.takes(model)
        self._layers = PromptLayers(model, MAX_TOKENS) if fast else None
        return True

    def _reading(self, cache: OscarCache) -> AbstractContextManager[None]:
        """Inside, the model's layers read a prompt into a cache as fast as they can."""
        return nullcontext() if self._layers is None else self._layers.reading(cache)

    @eager
    @torch.inference_mode()
    def read(
        self, prompt: Prompt, cache: OscarCache, cancelled: Callable[[], bool] | None = None
    ) -> torch.Tensor:
        """Read a prompt into a cache.

        Args:
            prompt: of a single row.
            cache: holds the past, such as earlier turns; incomplete after an error.
            cancelled: whether nobody waits for the prompt any more, asked after each layer.

        Returns:
            (1, vocabulary) logits of the last token.

        Raises:
            Cancelled: nobody waits.
            FloatingPointError: the prompt's keys or values cannot be stored.
        """
        chunks = self.read_in_chunks(prompt, cache, cancelled)
        return next(logits for logits in chunks if logits is not None)

    def read_in_chunks(
        self,
        prompt: Prompt,
        cache: OscarCache,
        cancelled: Callable[[], bool] | None = None,
        logprobs: PromptLogprobs | None = None,
    ) -> Iterator[torch.Tensor | None]:
        """Read a prompt as ``read`` does, chunk by chunk as the iterator is asked; others may read
        and decode in between.

        Args:
            prompt, cache, cancelled: see ``read``.
            logprobs: collects the log-probabilities of the prompt's tokens.

        Yields:
            None after each chunk but the last; after that the logits.
        """
        cache.sigmas = self.sigmas
        chunks = read_in_chunks(self.family.model, prompt, cache, self._chunk, logprobs)
        logits = None
        while logits is None:
            turns = self._groups.layered_prefill(cache, [prompt], cancelled)
            with turns, self._reading(cache):
                logits = next(chunks)
            cache.check_complete()
            yield logits

    @eager
    @torch.inference_mode()
    def prefill_batch(
        self,
        prompts: Sequence[Prompt],
        caches: Sequence[OscarCache],
        *,
        every_token: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[torch.Tensor]:
        """Read prompts into their caches, short ones in one pass; as ``read`` otherwise.

        Args:
            prompts: of a single row each.
            caches: of each prompt; no two are the same.
            every_token: give the logits after each token, of short prompts.
            cancelled: whether nobody waits for any of the prompts any more.

        Returns:
            for each prompt (1, vocabulary), or (tokens, vocabulary), logits.
        """
        logits: list[torch.Tensor] = []
        for some in self._packs(prompts, caches):
            own = prompts[some]
            if len(own) == 1 and not every_token:
                logits.append(self.read(own[0], caches[some][0], cancelled))
                continue
            view = BatchView(self._store)
            view.sigmas = caches[some][0].sigmas
            view.set_rows(caches[some])
            lengths = [prompt.tokens for prompt in own]
            turns = self._groups.layered_prefill(view, own, cancelled)
            with turns, self._reading(view):
                found = prefill_varlen(
                    *(self.family.model, self.family.concatenate(own), lengths, view),
                    every_token=every_token,
                )
            if view.pop_overflow():  # Whose it was is not known: each is read alone.
                raise FloatingPointError(NOT_STORABLE)
            logits += found.split(lengths if every_token else 1)
        return logits

    def _packs(self, prompts: Sequence[Prompt], caches: Sequence[OscarCache]) -> Iterator[slice]:
        """Runs of prompts that can be read in one pass."""
        start, tokens = 0, 0
        for cache in caches:
            cache.sigmas = self.sigmas
        for index, (prompt, cache) in enumerate(zip(prompts, caches, strict=True)):
            tokens += prompt.tokens
            alike = balanced_alike(caches[start], cache)
            if index > start and (tokens > self.max_varlen_tokens or not alike):
                yield slice(start, index)
                start, tokens = index, prompt.tokens
        if prompts:
            yield slice(start, len(prompts))
