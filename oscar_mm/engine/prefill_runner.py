"""PrefillRunner: prefill of prompts into their caches, with several short prompts per pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from oscar_mm.cache.batch_view import BatchView, balanced_alike
from oscar_mm.cache.cache import OscarCache, balancing_of
from oscar_mm.cache.page_store import PageStore
from oscar_mm.engine.family import Family
from oscar_mm.engine.layered_prefill import layered_prefill
from oscar_mm.engine.prefill import MAX_TOKENS, prefill_varlen, read_in_chunks
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.prompt_logprobs import PromptLogprobs
from oscar_mm.engine.running_batches import RunningBatches
from oscar_mm.fast_decode.joined_weights import join_projections
from oscar_mm.fast_decode.prompt_layers import PromptLayers
from oscar_mm.fast_decode.row_adapters import RowAdapters, choosing
from oscar_mm.modules import WeightsWatch
from oscar_mm.ops.pack import NOT_STORABLE
from oscar_mm.torch_modes import eager

_VARLEN_TOKENS = {"cpu": 2048}
"""Maximum number of tokens of short prompts in one pass, by device type; on other devices, the
number of tokens that modules process at a time. A GPU prefills four prompts of 2,000 tokens in the
time that the host alone needs to launch two (8B, H200)."""

_CHUNK = {"cpu": 1024}
"""Chunk size for a service's long prompts, in tokens, by device type. With smaller chunks, a CPU
takes more than 1.15 times as long for 13,000 tokens, as each chunk unpacks the packed tokens."""
_LONG_CHUNK = 1 << 15
"""Chunk size on other devices; a GPU prefills a chunk in a few seconds."""


def usual_chunk(device: torch.device) -> int:
    """Return a service's chunk size in tokens; attention over shorter prompts is exact."""
    return _CHUNK.get(device.type, _LONG_CHUNK)


class PrefillRunner:
    """Prefills single-row prompts into caches of one store; used in the engine thread.

    Args:
        family: model family: the model, its processor and their special cases.
        store: page store of the caches.
        chunk: tokens per chunk; None if prompts are not split.
        batches: requests that run decode steps between the layers of a prompt.

    Attributes:
        max_varlen_tokens: maximum number of tokens of short prompts in one pass.
        max_at_once: maximum number of tokens of a prompt that is prefilled in one chunk.
        state: state of the model's weights and adapters at the last ``refresh``; None before it.
    """

    def __init__(
        self,
        family: Family,
        store: PageStore,
        chunk: int | None,
        batches: RunningBatches,
    ) -> None:
        self.family, self._store, self._chunk, self._batches = family, store, chunk, batches
        self.max_at_once = chunk or math.inf
        varlen = _VARLEN_TOKENS.get(family.device.type, MAX_TOKENS)
        self.max_varlen_tokens = min(varlen, chunk or varlen)
        self._sigmas: dict[int, torch.Tensor] = {}
        self.state: object = None
        self._watch = WeightsWatch(family.model)
        self._layers: PromptLayers | None = None

    def present_state(self) -> object:
        """Read the state of the model's weights and adapters, which takes milliseconds; it is equal
        to ``state`` as long as they are unchanged."""
        return self._watch.key

    @property
    def sigmas(self) -> dict[int, torch.Tensor]:
        """Query-key balancing vectors by layer index, see ``oscar_mm.cache.cache.balancing_of``."""
        if self.state is None:
            self.refresh()
        return self._sigmas

    def refresh(self) -> bool:
        """Check the model's weights; if they have changed, recompute values that depend on them.

        Call this before the first of several requests: weights change only while no request runs.

        Returns:
            Whether the weights have changed.
        """
        model = self.family.model
        if self.present_state() == self.state:
            return False
        self._sigmas = balancing_of(model, self._store.policy)
        fast = self.family.device.type == "cuda" and PromptLayers.takes(model)
        if fast:
            join_projections(model)
        self.state = self.present_state()  # Now, since joining moves weights.
        self._layers = PromptLayers(model, MAX_TOKENS) if fast else None
        return True

    def release_graphs(self) -> None:
        """Drop the CUDA graphs of prompts; not within a pass."""
        if self._layers is not None:
            self._layers.release_graphs()

    def _reading(self, cache: OscarCache) -> AbstractContextManager[None]:
        """Within the block, use the fast prompt layers if the model supports them."""
        return nullcontext() if self._layers is None else self._layers.reading(cache)

    @eager
    @torch.inference_mode()
    def read(
        self, prompt: Prompt, cache: OscarCache, cancelled: Callable[[], bool] | None = None
    ) -> torch.Tensor:
        """Prefill a prompt.

        Args:
            prompt: prompt of a single row.
            cache: cache to extend; may contain a past, such as earlier turns. After an error, it
                is incomplete.
            cancelled: function that returns whether the request was cancelled; called after each
                layer.

        Returns:
            (1, vocabulary) logits of the last token.

        Raises:
            Cancelled: if ``cancelled`` returned True.
            FloatingPointError: if keys or values overflow the storage format.
        """
        chunks = self.read_in_chunks(prompt, cache, cancelled)
        *_, logits = chunks
        assert logits is not None
        return logits

    def read_in_chunks(
        self,
        prompt: Prompt,
        cache: OscarCache,
        cancelled: Callable[[], bool] | None = None,
        logprobs: PromptLogprobs | None = None,
    ) -> Iterator[torch.Tensor | None]:
        """Prefill a prompt lazily, one chunk per iteration; other work may run in between.

        The keys and values of a chunk are checked when the iterator continues, since the check
        waits for the device; the caller can launch more work first. The iterator must be exhausted.

        Args:
            prompt, cache, cancelled: see ``read``.
            logprobs: collector of the log-probabilities of the prompt's tokens.

        Yields:
            None after each chunk except the last, and the logits after the last.
        """
        cache.sigmas = self.sigmas
        chunks = read_in_chunks(self.family.model, prompt, cache, self._chunk, logprobs)
        logits = None
        while logits is None:
            turns = self._layered(cache, [prompt], cancelled)
            with turns, self._reading(cache), self._adapting([prompt]):
                logits = next(chunks)
            yield logits
            cache.check_complete()

    @eager
    @torch.inference_mode()
    def prefill_batch(
        self,
        prompts: Sequence[Prompt],
        caches: Sequence[OscarCache],
        *,
        every_token: bool = False,
    ) -> list[torch.Tensor]:
        """Prefill prompts, several short prompts per pass; see ``read`` for the errors.

        Args:
            prompts: prompts of a single row each.
            caches: a distinct cache for each prompt.
            every_token: whether to return the logits of every token; short prompts only.

        Returns:
            Logits of each prompt: (1, vocabulary), or (tokens, vocabulary) with ``every_token``.
        """
        logits: list[torch.Tensor] = []
        for some, found in self.prefill_passes(prompts, caches, every_token=every_token):
            lengths = [prompt.tokens for prompt in prompts[some]]
            logits += found.split(lengths if every_token else 1)
        return logits

    def prefill_passes(
        self,
        prompts: Sequence[Prompt],
        caches: Sequence[OscarCache],
        *,
        every_token: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Prefill prompts lazily, one pass with several short prompts per iteration.

        As with ``read_in_chunks``, a pass is checked when the iterator continues.

        Args:
            prompts, caches, every_token: see ``prefill_batch``.
            cancelled: function that returns whether all of the prompts' requests were cancelled.

        Yields:
            The prompts of the pass, and their logits: (prompts, vocabulary), or (tokens,
            vocabulary) with ``every_token``.
        """
        for some in self._packs(prompts, caches):
            own = prompts[some]
            if len(own) == 1 and not every_token:
                for logits in self.read_in_chunks(own[0], caches[some][0], cancelled):
                    if logits is not None:
                        yield some, logits
                continue
            view = BatchView(self._store)
            view.sigmas = caches[some][0].sigmas
            view.set_rows(caches[some])
            lengths = [prompt.tokens for prompt in own]
            turns = self._layered(view, own, cancelled)
            with turns, self._reading(view), self._adapting(own):
                logits = prefill_varlen(
                    *(self.family.model, self.family.concatenate(own), lengths, view),
                    every_token=every_token,
                )
            yield some, logits
            if view.pop_overflow():  # Row unknown: the caller prefills each prompt separately.
                raise FloatingPointError(NOT_STORABLE)

    def _adapting(self, prompts: Sequence[Prompt]) -> AbstractContextManager[None]:
        """Within the block, the rows of passes use the adapters of their prompts.

        The rows of several prompts are their tokens, if the adapters differ.
        """
        if (adapters := RowAdapters.of(self.family.model)) is None:
            return nullcontext()
        names = [prompt.adapter for prompt in prompts]
        if len(set(names)) > 1:
            names = [prompt.adapter for prompt in prompts for _ in range(prompt.tokens)]
        return choosing(adapters.idle(names))

    def _layered(
        self,
        cache: OscarCache,
        prompts: Sequence[Prompt],
        cancelled: Callable[[], bool] | None,
    ) -> AbstractContextManager[None]:
        return layered_prefill(self._batches, cache, prompts, self.max_varlen_tokens, cancelled)

    def _packs(self, prompts: Sequence[Prompt], caches: Sequence[OscarCache]) -> Iterator[slice]:
        """Yield slices of prompts that fit into one pass."""
        start, tokens = 0, 0
        for cache in caches:
            cache.sigmas = self.sigmas
        for index, (prompt, cache) in enumerate(zip(prompts, caches, strict=True)):
            tokens += prompt.tokens
            alike = (
                self.family.shares_passes
                and balanced_alike(caches[start], cache)
                and all(_adapts_along(one, prompt) for one in prompts[start:index])
            )
            if index > start and (tokens > self.max_varlen_tokens or not alike):
                yield slice(start, index)
                start, tokens = index, prompt.tokens
        if prompts:
            yield slice(start, len(prompts))


def _adapts_along(one: Prompt, other: Prompt) -> bool:
    """Return whether two prompts may share a pass: rows of towers are patches, not tokens, so all
    media of a pass have the same adapter."""
    return one.adapter == other.adapter or not (one.media or other.media)
