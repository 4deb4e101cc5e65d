"""Step: what one forward pass does to the pools of every layer, and its tables on a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from oscar_mm.cache.layout import BLOCK_TOKENS, PAGE_TOKENS
from oscar_mm.cache.sequence import Sequence
from oscar_mm.cache.stream import in_blocks
from oscar_mm.cache.tables import upload

if TYPE_CHECKING:
    from oscar_mm.cache.fixed import FixedTables


@dataclass
class PackJob:
    """Tokens of one stream that become pages: first those of its tail, then new ones."""

    row: int
    bits: int
    pages: list[int]
    blocks: list[int]
    tail: int
    source: np.ndarray

    def sources(self) -> np.ndarray:
        """(pages, 128) int32 as ``oscar_mm.ops.pack`` takes them."""
        blocks, places = in_blocks(self.blocks, np.arange(self.tail))
        stored = ~(blocks * BLOCK_TOKENS + places)
        return np.concatenate([stored, self.source]).astype(np.int32).reshape(-1, PAGE_TOKENS)


class PackTables(NamedTuple):
    """Pages of one bit width to pack: ``source``, ``rows``, ``slots`` of ``oscar_mm.ops.pack``."""

    source: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor


@dataclass
class Step:
    """What one forward pass does to the pools of every layer, in this order.

    Attributes:
        packs: pages to pack. All of them are read before anything is written, because a block
            that a pack empties may be handed out again in the same step.
        copies: (source, target) blocks: a shared block is copied before it is appended to.
        writes: (4, n) int64: row and index of a new token, block and place that it is written to.
        real: for each row the indices of its tokens that are not padding; None if all are real.
        past: the sequences before the step. Their slots stay as they are until a layer carries
            the step out, so attention over the past and the new tokens comes first.
        from_pages: whether attention "oscar" runs the forward pass and reads the past from its
            pages; None until the first layer's keys come in.
        fixed: where a graph finds the tables of attention and of ``writes``; None makes new ones.
    """

    packs: list[PackJob] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    writes: np.ndarray | None = None
    real: list[np.ndarray] | None = None
    past: list[Sequence] = field(default_factory=list)
    from_pages: bool | None = None
    fixed: FixedTables | None = None
    _made: dict[tuple[Hashable, ...], Any] = field(default_factory=dict)

    def packs_on(self, device: torch.device) -> dict[int, PackTables]:
        """Bit width -> the pages to pack, moved to a device once for all its layers."""

        def tables(jobs: list[PackJob]) -> PackTables:
            source = np.concatenate([job.sources() for job in jobs])
            rows = np.concatenate([np.full(len(job.pages), job.row) for job in jobs])
            slots = np.concatenate([job.pages for job in jobs])
            return PackTables(*(upload(x.astype(np.int32), device) for x in (source, rows, slots)))

        def make() -> dict[int, PackTables]:
            widths = sorted({job.bits for job in self.packs})
            return {b: tables([job for job in self.packs if job.bits == b]) for b in widths}

        return self.once(("packs", device), make)

    def packed(self) -> None:
        """Its pages are packed already: there is nothing left to pack."""
        self.packs = []
        self._made = {key: made for key, made in self._made.items() if key[0] != "packs"}

    def writes_on(self, device: torch.device) -> torch.Tensor | None:
        """``writes`` as ``oscar_mm.ops.append`` takes them, (n, 4) int32, likewise."""
        if self.fixed is not None:
            return self.fixed.writes(device)
        writes = self.writes
        if writes is None:
            return None

        def make() -> torch.Tensor:
            return upload(np.ascontiguousarray(writes.T, dtype=np.int32), device)

        return self.once(("writes", device), make)

    def once(self, key: tuple[Hashable, ...], make: Callable[[], Any]) -> Any:
        """What ``make`` returns, made once for all layers that ask with the same key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
