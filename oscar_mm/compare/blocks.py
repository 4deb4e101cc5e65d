"""Blocks: a policy's pages as blocks of an engine's block table, without tokens in 16 bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from oscar_mm.cache.step import Filling
from oscar_mm.compare.forced import LayerStates
from oscar_mm.compare.paged import Paged
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.quant.basis import Basis
from oscar_mm.vllm_plugin.step import StepTables


@dataclass(frozen=True)
class Blocks(Paged):
    """A policy of key_axis "token" as vLLM serves with it: a step stores all tokens that it reads.

    Queries and keys are balanced by the weights of QK norms, where the model has them.

    Attributes:
        first: tokens of the first step; None for all.
        step: tokens of each later one.
    """

    first: int | None = None
    step: int = 1

    def memory(self, layers: Sequence[LayerStates], ids: Tensor) -> None:
        """None: the engine owns the cache."""
        return

    def missing(self, layers: Sequence[LayerStates], ids: Tensor) -> None:
        """None: it applies to all."""
        return

    def _sigma(self, states: LayerStates) -> Tensor | None:
        return states.sigma_of_weights

    def _packed(self, ids: Tensor) -> list[tuple[Tensor, Filling]]:
        count, bits = len(ids), self.policy.bits.text
        pages, source = list(range(-(-count // PAGE_TOKENS))), np.arange(count)
        return [(torch.arange(count), Filling(0, bits, pages, 0, source, {}))]

    def _stored(
        self, sides: list[Tensor], filling: Filling, page_format: PageFormat, basis: Basis
    ) -> Tensor:
        rows, heads, tokens, _ = sides[0].shape
        device, pages = sides[0].device, len(filling.pages)
        blocks = torch.arange(rows * pages, dtype=torch.int32, device=device).view(rows, pages)
        slots = torch.arange(rows * pages * PAGE_TOKENS, device=device).view(rows, -1)
        packed = blocks.new_zeros(rows * pages, page_format.page_bytes, dtype=torch.uint8)
        step_tables = StepTables(rows, rows * tokens, pages, heads, 1, pages, device)
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
        """First token and end of each step, where steps that begin no page are joined.

        In a page that has begun a token is stored the same way alone or with others.
        """
        ends = [0, *range(self.first or tokens, tokens, self.step), tokens]
        pages = [-(-end // PAGE_TOKENS) for end in ends]
        inner = range(1, len(ends) - 1)
        matter = [ends[i] for i in inner if not pages[i - 1] == pages[i] == pages[i + 1]]
        return pairwise([0, *matter, tokens])
