"""Methods defined by a ``KVPolicy`` and run on real packed pages, in a cache or as vLLM blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.kv_manager import KVCacheManager
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.step_plan import PackJob, store_jobs
from oscar_mm.compare.teacher_forcing import LayerStates, Pair
from oscar_mm.modality import Modality
from oscar_mm.ops.library import recipe_numbers
from oscar_mm.ops.pack import NOT_STORABLE, pack
from oscar_mm.ops.rings import RingShape
from oscar_mm.ops.store import store
from oscar_mm.ops.unpack import unpack
from oscar_mm.pages.codecs.registry import codec_of
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.pages.quantize import Recipe
from oscar_mm.policy import KVPolicy
from oscar_mm.quant.basis import Basis
from oscar_mm.vllm_plugin.step import Rings, StepTables


@dataclass(frozen=True)
class Restored:
    """Keys and values of one layer as a method restores them.

    Attributes:
        keys, values: (rows, KV heads, tokens, head_dim), in the dtype of the input.
        stored_bytes: bytes of the elements stored in fewer than 16 bits, including scales etc.
        stored_values: number of these elements, counting keys and values.
    """

    keys: Tensor
    values: Tensor
    stored_bytes: int
    stored_values: int


@dataclass(frozen=True)
class Paged:
    """A policy with a name.

    Attributes:
        name: name in tables.
        policy: policy for keys and values; its window counts from the end of the prompt.
        mixed: whether pages mix modalities, with tokens in the order of the prompt; the cache
            itself never mixes them.
    """

    name: str
    policy: KVPolicy
    mixed: bool = False

    def missing(self, layers: Sequence[LayerStates], ids: Tensor) -> str | None:
        """Return why the method does not apply to this model or prompt; None if it does."""
        named = [Modality[name.upper()] for name in self.policy.bits._fields]
        wide = {kind for kind in named if not self.policy.bits_for(kind).packed}
        if wide and len(wide) < len(named) and not wide & {Modality(i) for i in ids.tolist()}:
            return "no such tokens"
        return None

    def restored(self, states: LayerStates, ids: Tensor) -> Restored:
        """Return a prompt's keys and values after packing and restoring the tokens that the policy
        packs.

        Args:
            states: states of the layer.
            ids: (tokens,) modality ids on the CPU, the same in all rows.

        Raises:
            FloatingPointError: if keys or values cannot be stored.
        """
        sides = keys, values = [states.keys.clone(), states.values.clone()]
        rows, heads, _, head_dim = states.keys.shape
        basis = Basis(head_dim, self.policy.rotate, self.sigma(states))
        stored_bytes = stored_values = 0
        for places, pack_job in self._packed(ids):
            where = places.to(states.keys.device)
            page_format = PageFormat.of(self.policy, pack_job.bits, heads, head_dim)
            if page_format.codec.appends_tokens:
                packed = self._stored(sides, pack_job, page_format, basis)
            else:
                of_keys, of_values = (_as_pages(side[:, :, where]) for side in sides)
                packed = pack(of_keys, of_values, page_format, self.policy, basis)
            back = unpack(packed, page_format, basis, states.keys.dtype)
            for side, pages in zip(sides, back, strict=True):
                side[:, :, where] = _as_rows(pages, rows)[:, :, : len(where)]
            # Only the filled part of a page is counted, unlike in a cache's report.
            tokens = len(where) * rows
            stored_bytes += packed.nbytes * tokens // (len(packed) * PAGE_TOKENS)
            stored_values += 2 * tokens * heads * head_dim
        return Restored(keys, values, stored_bytes, stored_values)

    def one_by_one(self, prompt: int) -> Paged:
        """Return the method for tokens that are stored one by one after a prompt.

        This is the same method: with a window of 4 tokens or more, the cache stores the same data.
        """
        return self

    def restored_from(self, ids: Tensor, prompt: int) -> Tensor:
        """Return, for each token, the first token that reads it in restored form.

        Args:
            ids: (tokens,) modality ids on the CPU.
            prompt: number of tokens that are stored together; the others follow one by one.

        Returns:
            (tokens,) int64 token indices. For a token that is still in 16-bit precision at the end,
            the entry is the total number of tokens.
        """
        found = np.full(len(ids), len(ids))
        kv_manager, streams = KVCacheManager(PageStore(self.policy)), self._streams(ids)[None]
        for start, stop in pairwise([0, *range(prompt, len(ids))]):
            kv_manager.advance(streams[:, start:stop])
            [row] = kv_manager.sequences
            for code, stream in row.streams.items():
                packed = row.positions(code)[: stream.packed]
                found[packed] = np.minimum(found[packed], stop)
        return torch.from_numpy(found)

    def packed(self, ids: Tensor) -> dict[Modality, Tensor]:
        """Return the ascending indices of the tokens that are packed, by modality."""
        return {Modality(int(ids[places[0]])): places for places, _ in self._packed(ids)}

    def _packed(self, ids: Tensor) -> list[tuple[Tensor, PackJob]]:
        """Return, for each stream, the indices of the prompt's tokens that a cache packs, and the
        pack job that assigns them to pages."""
        step = KVCacheManager(PageStore(self.policy)).advance(self._streams(ids)[None])
        return [(torch.from_numpy(pack_job.source), pack_job) for pack_job in step.pack_jobs]

    def _streams(self, ids: Tensor) -> np.ndarray:
        return (torch.zeros_like(ids) if self.mixed else ids).to(torch.int8).numpy()

    def _stored(
        self, sides: list[Tensor], pack_job: PackJob, page_format: PageFormat, basis: Basis
    ) -> Tensor:
        """Return the pages of a pack job for every row, (rows * pages, page_bytes) uint8."""
        rows, pages, device = len(sides[0]), len(pack_job.pages), sides[0].device
        numbers = {page: number for number, page in enumerate(pack_job.pages)}
        tables = []
        for table, row_at in ((store_jobs([pack_job]), 2), (pack_job.beginnings(), 1)):
            table[:, 0] = [numbers[page] for page in table[:, 0].tolist()]
            of_rows = np.tile(table, (rows, 1, 1))
            of_rows[:, :, row_at] = np.arange(rows)[:, None]
            of_rows[:, :, 0] += pages * np.arange(rows)[:, None]
            tables.append(torch.from_numpy(of_rows.reshape(-1, table.shape[1])).to(device))
        packed = torch.zeros(rows * pages, page_format.page_bytes, dtype=torch.uint8, device=device)
        jobs, begins = tables
        self._store(sides, jobs, begins, packed, page_format, basis)
        return packed

    def _store(
        self,
        sides: Sequence[Tensor],
        jobs: Tensor,
        begins: Tensor,
        pages: Tensor,
        page_format: PageFormat,
        basis: Basis,
    ) -> None:
        """Store new keys and values with ``oscar_mm.ops.store``.

        Raises:
            FloatingPointError: if keys or values cannot be stored.
        """
        keys, values = sides
        bad = torch.zeros(1, dtype=torch.int32, device=keys.device)
        store(
            *(keys, values, keys.new_empty(0, 2, *keys.shape[1::2]), jobs, begins, pages, bad),
            *(basis.sigma, recipe_numbers(Recipe.of(page_format, self.policy))),
        )
        if bool(bad):
            raise FloatingPointError(NOT_STORABLE)

    def sigma(self, states: LayerStates) -> Tensor | None:
        """Return the layer's scale factors per channel (see ``oscar_mm.cache.cache.balancing_of``);
        None if the policy has none."""
        if not self.policy.balances:
            return None
        return states.sigmas[codec_of(self.policy).centers_keys(self.policy)]

    def memory(self, layers: Sequence[LayerStates], ids: Tensor) -> MemoryReport:
        """Return the memory report of a real cache that contains the first row."""
        return cached(self, layers, torch.zeros_like(ids) if self.mixed else ids).memory()


def cached(method: Paged, layers: Sequence[LayerStates], ids: Tensor) -> OscarCache:
    """Return a cache that contains the first row, filled as a model with attention "oscar" would
    fill it."""
    cache = OscarCache(method.policy)
    cache.sigmas = {states.index: method.sigma(states) for states in layers}
    cache.expect(ids[None])
    cache.attend_packed(None)
    for states in layers:
        pair: Pair = (states.keys[:1], states.values[:1])
        keys, _ = cache.update(*pair, states.index)
        keys.oscar_chunk.attend(  # pyright: ignore[reportAttributeAccessIssue]
            states.module, states.first_queries, *pair, states.scaling, visible=None
        )
    cache.check_complete()
    return cache


def _as_pages(x: Tensor) -> Tensor:
    """Reshape (rows, heads, pages * 128, d) to (rows * pages, heads, 128, d)."""
    return x.unflatten(2, (-1, PAGE_TOKENS)).transpose(1, 2).flatten(0, 1)


def _as_rows(pages: Tensor, rows: int) -> Tensor:
    """Invert ``_as_pages``."""
    return pages.unflatten(0, (rows, -1)).transpose(1, 2).flatten(2, 3)


@dataclass(frozen=True)
class Blocks(Paged):
    """A policy with key_axis "token" as used in vLLM: a step packs all tokens that it reads.

    Tokens in the window and sinks are also stored, and read, in 16-bit precision.

    Attributes:
        first: number of tokens in the first step; None for all.
        step: number of tokens in each later step.
        prompt: number of tokens that are read in such steps; later tokens are read one by one. None
            for all.
    """

    first: int | None = None
    step: int = 1
    prompt: int | None = None

    def one_by_one(self, prompt: int) -> Blocks:
        """See ``Paged.one_by_one``; unlike there, the result is a different method."""
        return replace(self, prompt=prompt)

    def restored_from(self, ids: Tensor, prompt: int) -> Tensor:
        """See ``Paged.restored_from``; a token is read in restored form once it has left the
        window."""
        found = torch.arange(len(ids)) + self.policy.window + 1
        found[: self.policy.sinks] = len(ids)
        return found.clamp(max=len(ids))

    def restored(self, states: LayerStates, ids: Tensor) -> Restored:
        """See ``Paged.restored``; all tokens are packed, and some are also kept in 16-bit
        precision."""
        back, place = super().restored(states, ids), torch.arange(len(ids))
        exact = (place < self.policy.sinks) | (place >= len(ids) - self.policy.window)
        exact = exact.to(back.keys.device)[:, None]
        keys = torch.where(exact, states.keys, back.keys)
        return replace(back, keys=keys, values=torch.where(exact, states.values, back.values))

    def memory(self, layers: Sequence[LayerStates], ids: Tensor) -> None:
        """Return None, because vLLM owns the cache."""
        return

    def missing(self, layers: Sequence[LayerStates], ids: Tensor) -> None:
        """Return None, because the method always applies."""
        return

    def _packed(self, ids: Tensor) -> list[tuple[Tensor, PackJob]]:
        count, bits = len(ids), self.policy.bits.text
        pages, source = list(range(-(-count // PAGE_TOKENS))), np.arange(count)
        return [(torch.arange(count), PackJob(0, bits, pages, 0, source, {}))]

    def _stored(
        self, sides: list[Tensor], pack_job: PackJob, page_format: PageFormat, basis: Basis
    ) -> Tensor:
        rows, heads, tokens, _ = sides[0].shape
        device, pages = sides[0].device, len(pack_job.pages)
        blocks = torch.arange(rows * pages, dtype=torch.int32, device=device).view(rows, pages)
        slots = torch.arange(rows * pages * PAGE_TOKENS, device=device).view(rows, -1)
        packed = blocks.new_zeros(rows * pages, page_format.page_bytes, dtype=torch.uint8)
        rings = Rings(rows, RingShape(0, 0, 1), 0, device)
        step_tables = StepTables(rows, rows * tokens, pages, heads, 1, pages, device, rings)
        for start, stop in self._steps(tokens):
            ends, starts = np.full(rows, stop), np.arange(rows + 1) * (stop - start)
            lengths, firsts = (torch.from_numpy(x).to(device, torch.int32) for x in (ends, starts))
            new_slots = slots[:, start:stop].flatten()
            step = step_tables.step(blocks, lengths, firsts, new_slots, 0, 1, starts, ends)
            tables = step.tables
            new = [x[:, :, start:stop].transpose(0, 1).flatten(1, 2)[None] for x in sides]
            begins = tables.begins[: len(tables.begins) * page_format.center]
            self._store(new, tables.jobs, begins, packed, page_format, basis)
        return packed

    def _steps(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Yield start and end of each step; steps that start no page are merged.

        Within a page that has been started, storing tokens separately or together gives the same
        result.
        """
        prompt = tokens if self.prompt is None else self.prompt
        ends = [0, *range(self.first or prompt, prompt, self.step), *range(prompt, tokens), tokens]
        pages = [-(-end // PAGE_TOKENS) for end in ends]
        inner = range(1, len(ends) - 1)
        matter = [ends[i] for i in inner if not pages[i - 1] == pages[i] == pages[i + 1]]
        return pairwise([0, *matter, tokens])
