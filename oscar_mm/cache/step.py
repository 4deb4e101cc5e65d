"""Step: what one forward pass does to the pools of every layer, and its tables on a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from oscar_mm.cache.rows import Row
from oscar_mm.ops.decode_tables import Tables, tables_of, upload
from oscar_mm.ops.store_torch import CENTER_TOKENS, HEAD, NOTHING, TILE
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import Bits

if TYPE_CHECKING:
    from oscar_mm.cache.fixed_tables import FixedTables


_INCOMPLETE = (
    "an earlier forward pass did not reach layer {}: the cache is incomplete; reset() it and "
    "start again. (An encoder-decoder takes EncoderDecoderCache(OscarCache(...), DynamicCache()).)"
)


@dataclass(eq=False)
class Filling:
    """Tokens of one stream that are packed.

    Attributes:
        row: of the batch.
        bits: of the pages.
        pages: that they go to, one after the other.
        first: place of the first token in the first page.
        source: (n,) int64 of each token, the index of a new one or ~slot of 16 bit.
        begins: for each page that begins, the sources of the tokens whose mean is its center.
    """

    row: int
    bits: Bits
    pages: list[int]
    first: int
    source: np.ndarray
    begins: dict[int, np.ndarray]

    def is_same(self, other: Filling | None) -> bool:
        """Whether it packs the same tokens to the same places."""
        return (
            other is not None
            and (self.bits, self.pages, self.first) == (other.bits, other.pages, other.first)
            and np.array_equal(self.source, other.source)
        )

    def after_write(self, slot: int) -> Filling:
        """The same filling once its only new token is in a slot of 16 bit."""

        def stored(source: np.ndarray) -> np.ndarray:
            return np.where(source >= 0, ~slot, source)

        begins = {page: stored(source) for page, source in self.begins.items()}
        return replace(self, source=stored(self.source), begins=begins)

    def whole_pages(self) -> np.ndarray:
        """(pages, 128) int32 as ``oscar_mm.ops.pack`` takes them."""
        return self.source.astype(np.int32).reshape(-1, PAGE_TOKENS)

    def jobs(self) -> np.ndarray:
        """(jobs, 20) int32 as ``oscar_mm.ops.store`` takes them."""
        before = self.first % TILE
        tiles = np.arange(self.first // TILE, -(-(self.first + len(self.source)) // TILE))
        jobs = np.zeros((len(tiles), HEAD + TILE), np.int32)
        jobs[:, 0] = np.asarray(self.pages)[tiles * TILE // PAGE_TOKENS]
        jobs[:, 1] = tiles % (PAGE_TOKENS // TILE)
        jobs[:, 2] = self.row
        places = np.full(len(tiles) * TILE, NOTHING, np.int32)
        places[before : before + len(self.source)] = self.source
        jobs[:, HEAD:] = places.reshape(-1, TILE)
        return jobs

    def beginnings(self) -> np.ndarray:
        """(pages that begin, 36) int32 as ``oscar_mm.ops.store`` takes them."""
        begins = np.zeros((len(self.begins), HEAD + CENTER_TOKENS), np.int32)
        for line, (page, source) in zip(begins, self.begins.items(), strict=True):
            line[:3] = page, self.row, len(source)
            line[HEAD : HEAD + len(source)] = source
        return begins


class WholePages(NamedTuple):
    """Pages of one format to pack: ``source``, ``rows``, ``slots`` of ``oscar_mm.ops.pack``."""

    source: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor


class Slots(NamedTuple):
    """Slots of one format to fill: ``jobs`` and ``begins`` of ``oscar_mm.ops.store``."""

    jobs: torch.Tensor
    begins: torch.Tensor


@dataclass
class Step:
    """What one forward pass does to the pools of every layer, in this order, and which layers have
    done it.

    Attributes:
        copies: (bits, source, target): a page that others have too is copied before it is filled.
        fillings: tokens to pack. All are read before anything is written to 16 bit, because a slot
            that is emptied may be handed out again in the same step (but not in a decode step,
            which may pack at its end).
        writes: (3, n) int64: row and index of a new token, slot of 16 bit that it is written to.
        real: for each row the indices of its tokens that are not padding; None if all are real.
        past: the sequences before the step. Their slots stay as they are until a layer carries
            the step out, so attention over the past and the new tokens comes first.
        from_pages: whether attention "oscar" runs the forward pass and reads the past from its
            pages; None until the first layer's keys come in.
        past_version: ``Ledger.version`` before the step.
        promises: ``PageStore.promises`` before the step; of a foretold one, once it is foretold.
        promised: whether it was foretold, and is to write to slots that nobody has yet.
        layers: indices of the layers that are to carry it out; None in the first pass of a cache,
            whose layers are not known before.
        fixed: where a graph finds the tables of attention, of fillings and of ``writes``; None
            makes new ones.
    """

    copies: list[tuple[Bits, int, int]] = field(default_factory=list)
    fillings: list[Filling] = field(default_factory=list)
    writes: np.ndarray | None = None
    real: list[np.ndarray] | None = None
    past: list[Row] = field(default_factory=list)
    from_pages: bool | None = None
    past_version: tuple[int, ...] = ()
    promises: int = 0
    promised: bool = False
    layers: frozenset[int] | None = None
    fixed: FixedTables | None = None
    _made: dict[tuple[Hashable, ...], Any] = field(default_factory=dict)
    # Index of each layer whose keys have come in -> whether it has carried out the step.
    _progress: dict[int, bool] = field(default_factory=dict)

    def enter(self, layer: int) -> None:
        """Note that a layer's keys come in.

        Raises:
            RuntimeError: the layer has missed an earlier step, or has stopped in this one.
        """
        if layer in self._progress or (self.layers is not None and layer not in self.layers):
            raise RuntimeError(_INCOMPLETE.format(layer))
        self._progress[layer] = False

    def finish(self, layer: int) -> None:
        """Note that a layer has carried out the step."""
        self._progress[layer] = True

    def is_finished(self, layer: int) -> bool:
        """Whether a layer has carried out the step."""
        return self._progress.get(layer, False)

    def check_finished(self, layers: Iterable[int]) -> None:
        """Raise RuntimeError if one of these layers has not carried out the step."""
        for layer in layers:
            if not self.is_finished(layer):
                raise RuntimeError(_INCOMPLETE.format(layer))

    def restart(self) -> None:
        """Forget what layers did of the step, as it had no effect: all are to carry it out."""
        self._progress.clear()

    def is_within(self, early: Step) -> bool:
        """Whether a foretold step that was launched has done what this step does.

        It has, if it was foretold of the same past and writes the same, or more: what it writes of
        a row that has ended lies in slots and places that are free.
        """
        if self.past_version != early.past_version or self.copies:
            return False
        if early.promised and self.promises != early.promises:
            return False
        if self.writes is not None:
            if early.writes is None:
                return False
            stored = np.isin(early.writes[0], self.writes[0])
            if not np.array_equal(early.writes[:, stored], self.writes):
                return False
        fillings = {filling.row: filling for filling in early.fillings}
        return all(filling.is_same(fillings.get(filling.row)) for filling in self.fillings)

    @property
    def packs_at_end(self) -> bool:
        """Whether its tokens are packed when all layers have written theirs to 16 bit, for all
        layers at once (``OscarCache.end_step``), not by each layer."""
        return self.fixed is not None and self.fixed.packs_at_end

    def whole_pages_on(self, device: torch.device) -> dict[Bits, WholePages]:
        """Bits -> whole pages to pack, moved to a device once for all its layers."""

        def tables(fillings: list[Filling]) -> WholePages:
            source = np.concatenate([one.whole_pages() for one in fillings])
            rows = np.concatenate([np.full(len(one.pages), one.row) for one in fillings])
            slots = np.concatenate([one.pages for one in fillings])
            return WholePages(*(upload(x.astype(np.int32), device) for x in (source, rows, slots)))

        return self.once(("whole pages", device), lambda: self._by_bits(tables))

    def tables(
        self,
        bits: tuple[Bits | None, Bits | None],
        kv_heads: int,
        columns: int,
        workers: int,
        device: torch.device,
    ) -> Tables:
        """Tables of attention over ``past``; the arguments are those of ``Row.entries`` and of
        ``oscar_mm.ops.decode_tables.tables_of``."""
        if self.fixed is not None:
            return self.fixed.tables(self.past, bits, kv_heads, columns, workers, device)
        entries = [row.entries(bits) for row in self.past]
        return tables_of(entries, kv_heads, columns, workers, device)

    def slots_on(self, device: torch.device) -> dict[Bits, Slots]:
        """Bits -> slots to fill, moved to a device once for all its layers."""
        if self.fixed is not None:
            return self.fixed.slots(device)

        def tables(fillings: list[Filling]) -> Slots:
            jobs = np.concatenate([one.jobs() for one in fillings])
            begins = np.concatenate([one.beginnings() for one in fillings])
            return Slots(upload(jobs, device), upload(begins, device))

        return self.once(("slots", device), lambda: self._by_bits(tables))

    def _by_bits(self, tables: Callable[[list[Filling]], Any]) -> dict[Bits, Any]:
        found = sorted({one.bits for one in self.fillings})
        return {bits: tables([one for one in self.fillings if one.bits == bits]) for bits in found}

    def filled(self) -> None:
        """Note that its tokens are packed already: there is nothing left to pack."""
        self.fillings = []
        self._made = {key: made for key, made in self._made.items() if key[0] != "whole pages"}

    def writes_on(self, device: torch.device) -> torch.Tensor | None:
        """``writes`` as ``oscar_mm.ops.append`` takes them, (n, 3) int32, moved to a device once
        for all its layers."""
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
