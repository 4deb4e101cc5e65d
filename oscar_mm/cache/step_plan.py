"""Step plan: what one forward pass does to the pools of every layer, and its tables on a device.

The tables are created for each step, or written into fixed tensors (``GraphTables``) for the replay
of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from oscar_mm.cache.block_table import DeferredSteps, SequenceTable, min_page_tokens
from oscar_mm.cache.window_pages import DROPPED, WindowPages
from oscar_mm.modality import PADDING, TwoWay, two_way_groups
from oscar_mm.ops.decode_tables import (
    Entries,
    StoredTokens,
    Tables,
    arrays_of,
    laid_out,
    lengths_of,
    tables_of,
    upload,
)
from oscar_mm.ops.store_torch import CENTER_TOKENS, HEAD, NOTHING, TILE
from oscar_mm.pages.codecs.registry import codec_of
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import PLAIN, Bits, KVPolicy

Tokens: TypeAlias = slice | torch.Tensor
"""Tokens of a pass: consecutive ones, or (n,) int64 indices on the device of the layer."""
_INCOMPLETE = (
    "an earlier forward pass did not reach layer {}: the cache is incomplete; reset() it and "
    "start again. (With an encoder-decoder, use EncoderDecoderCache(OscarCache(...), "
    "DynamicCache()).)"
)


@dataclass(eq=False, slots=True)
class PackJob:
    """Job that packs tokens of one stream into pages.

    Attributes:
        row: row of the batch.
        bits: format of the pages.
        pages: consecutive target pages.
        first: index of the first token in the first page.
        source: (n,) int64, source of each token: the index of a new token, or ~slot of a stored
            16-bit token.
        begins: new page -> sources of the tokens whose mean is the page's center; no sources if the
            center is the mean of keys that the page ``before`` stores.
        before: earlier page of the same stream.
    """

    row: int
    bits: Bits
    pages: list[int]
    first: int
    source: np.ndarray
    begins: dict[int, np.ndarray]
    before: int = 0

    def after_write(self, slot: int) -> PackJob:
        """Return a copy in which ``begins`` refers to the single new token by its 16-bit slot."""
        begins = {page: np.where(x >= 0, ~slot, x) for page, x in self.begins.items()}
        return replace(self, begins=begins)

    @property
    def tiles(self) -> int:
        """Number of page tiles that the job touches."""
        return -(-(self.first + len(self.source)) // TILE) - self.first // TILE

    def whole_pages(self) -> np.ndarray:
        """Return the sources as an argument of ``oscar_mm.ops.pack``, (pages, 128) int32."""
        return self.source.astype(np.int32).reshape(-1, PAGE_TOKENS)

    def beginnings(self) -> np.ndarray:
        """Return the ``begins`` argument of ``oscar_mm.ops.store``, (new pages, 36) int32."""
        begins = np.zeros((len(self.begins), HEAD + CENTER_TOKENS), np.int32)
        for line, (page, source) in zip(begins, self.begins.items(), strict=True):
            line[:HEAD] = page, self.row, len(source), 0 if len(source) else self.before
            line[HEAD : HEAD + len(source)] = source
        return begins


def store_jobs(pack_jobs: Sequence[PackJob]) -> np.ndarray:
    """Return the ``jobs`` argument of ``oscar_mm.ops.store``, (jobs, 20) int32, by pack job."""
    first, counts, rows = np.array([(x.first, len(x.source), x.row) for x in pack_jobs]).T
    tiles = first // TILE
    lengths = -(-(first + counts) // TILE) - tiles
    jobs = np.full((lengths.sum(), HEAD + TILE), NOTHING, np.int32)
    starts = np.cumsum(lengths) - lengths
    tile = np.arange(len(jobs)) + np.repeat(tiles - starts, lengths)
    page_starts = np.cumsum([0, *(len(x.pages) for x in pack_jobs[:-1])])
    page = np.repeat(page_starts, lengths) + tile * TILE // PAGE_TOKENS
    jobs[:, 0] = np.array([page for x in pack_jobs for page in x.pages])[page]
    jobs[:, 1] = tile % (PAGE_TOKENS // TILE)
    jobs[:, 2] = np.repeat(rows, lengths)
    jobs[:, 3:HEAD] = 0
    source = np.concatenate([x.source for x in pack_jobs])
    places = np.repeat(starts * TILE + first % TILE - (np.cumsum(counts) - counts), counts)
    job, place = np.divmod(places + np.arange(len(source)), TILE)
    jobs[job, HEAD + place] = source
    return jobs


class WholePages(NamedTuple):
    """Tables of the full pages of one format to pack: the arguments ``source``, ``rows`` and
    ``slots`` of ``oscar_mm.ops.pack``."""

    source: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor


class SlotTables(NamedTuple):
    """Pack tables of one format: arguments ``jobs`` and ``begins`` of ``oscar_mm.ops.store``."""

    jobs: torch.Tensor
    begins: torch.Tensor


class AttentionShape(NamedTuple):
    """Parameters of the attention tables besides the sequences; many layers share them.

    Attributes:
        bits: first and second page format.
        kv_heads, columns, workers: see ``oscar_mm.ops.decode_tables.arrays_of``.
        window: size of the layers' sliding window in tokens, the new one included; None if they
            attend to all tokens.
        places: where the layers store their pages; None if at the pages' ids.
    """

    bits: tuple[Bits | None, Bits | None]
    kv_heads: int
    columns: int
    workers: int
    window: int | None = None
    places: WindowPages | None = None

    def over(
        self, past: Sequence[SequenceTable], steady: SteadyStep | None = None
    ) -> tuple[StoredTokens, int, int, int]:
        """Return the arguments of ``arrays_of`` and ``tables_of`` for these sequences.

        Args:
            past: the sequences.
            steady: the steady rows among them, whose tables are not read unless other tokens than
                text are in their windows.
        """
        if steady is not None and self.window is not None:
            steady = steady.latest(self.window - 1)
        if steady is None:
            stored = StoredTokens.of([self._entries(row) for row in past])
        elif len(steady.rows) == len(past):
            stored = steady.past
        else:
            others = [self._entries(past[row]) for row in steady.others(len(past))]
            stored = StoredTokens.of(others).beside(steady.past, steady.rows)
        if self.places is not None:
            stored = stored._replace(items=self.places.items(stored.items, self.bits))
        return stored, self.kv_heads, self.columns, self.workers

    def _entries(self, row: SequenceTable) -> Entries:
        inside = row if self.window is None else row.latest(self.window - 1)
        return inside.entries(self.bits)


class SteadyStep(NamedTuple):
    """Step of the steady rows of a batch, see ``oscar_mm.cache.steady_rows``.

    Each array is (steady rows,) of integers.

    Attributes:
        rows: rows of the batch, in ascending order.
        deferred: the steps of each row.
        indices: index of each row in ``SteadyRows``.
        counts: number of steps before this one.
        slots: 16-bit slot that the new token takes.
        sources: 16-bit slot whose token is packed; -1 if none is packed.
        pages: page that receives this token; -1 if none is packed.
        first: index of this token in the page.
        bits: format of the pages.
        past: tokens stored before the step.
        text: (steady rows, 4): number of text tokens since the latest other token, numbers of
            16-bit tokens and of pages of the text stream, and number of all tokens.
    """

    rows: np.ndarray
    deferred: list[DeferredSteps]
    indices: np.ndarray
    counts: np.ndarray
    slots: np.ndarray
    sources: np.ndarray
    pages: np.ndarray
    first: np.ndarray
    bits: Bits
    past: StoredTokens
    text: np.ndarray

    def among(self, rows: np.ndarray) -> SteadyStep:
        """Return the step for only some of the batch's rows.

        Args:
            rows: (batch,) bool.
        """
        return self._of(rows[self.rows])

    def latest(self, count: int) -> SteadyStep | None:
        """Return the step for the rows whose last ``count`` tokens are all text, or that have no
        more tokens, with only these tokens in ``past``; None if there are no such rows."""
        whole = self.text[:, 3] <= count
        kept = whole | (self.text[:, 0] >= count)
        if not kept.any():
            return None
        step, cut = self._of(kept), ~whole[kept]
        if not cut.any():
            return step
        longer = step._of(cut)
        past = longer.past.latest(longer.text[:, 1:3], count)
        if not cut.all():
            past = step._of(~cut).past.beside(past, np.flatnonzero(cut))
        return step._replace(past=past)

    def _of(self, kept: np.ndarray) -> SteadyStep:
        if kept.all():
            return self
        arrays = {
            name: value[kept]
            for name, value in self._asdict().items()
            if isinstance(value, np.ndarray)
        }
        return self._replace(
            deferred=[self.deferred[index] for index in np.flatnonzero(kept).tolist()],
            past=StoredTokens(*(table[kept] for table in self.past)),
            **arrays,
        )

    @property
    def packed(self) -> np.ndarray:
        """Indices of the rows that pack a token."""
        return np.flatnonzero(self.sources >= 0)

    def others(self, count: int) -> list[int]:
        """Return the other rows of a batch of ``count`` rows."""
        others = np.ones(count, bool)
        others[self.rows] = False
        return np.flatnonzero(others).tolist()

    def pack_jobs(self) -> list[PackJob]:
        """Return the pack jobs one by one."""
        columns = self.rows, self.pages, self.first, self.sources
        return [
            PackJob(row, self.bits, [page], first, np.array([~source]), {})
            for row, page, first, source in zip(
                *(column[self.packed].tolist() for column in columns), strict=True
            )
        ]

    def write_jobs(self, jobs: np.ndarray, of_row: int) -> None:
        """Write the pack jobs to a table as in ``store_jobs``, with ``of_row`` lines per row."""
        packed = self.packed
        tile, place = np.divmod(self.first[packed], TILE)
        rows = self.rows[packed]
        lines = rows * of_row + tile % of_row
        jobs[lines, 0], jobs[lines, 1], jobs[lines, 2] = self.pages[packed], tile, rows
        jobs[lines, 3:HEAD], jobs[lines, HEAD:] = 0, NOTHING
        jobs[lines, HEAD + place] = ~self.sources[packed]


class FixedTables(Protocol):
    """Tables of a step at fixed addresses, which a CUDA graph reads."""

    @property
    def packs_at_end(self) -> bool:
        """See ``StepPlan.packs_at_end``."""
        ...

    def tables(self, step: StepPlan, attention: AttentionShape, device: torch.device) -> Tables:
        """Return ``StepPlan.tables``."""
        ...

    def writes(self, device: torch.device) -> torch.Tensor:
        """Return ``StepPlan.writes_on``; slot -1 marks unused entries."""
        ...

    def slots(
        self, device: torch.device, places: WindowPages | None = None
    ) -> dict[Bits, SlotTables]:
        """Return ``StepPlan.slots_on``; a negative page marks unused entries."""
        ...


@dataclass
class StepPlan:
    """Plan of what one forward pass does to the pools of every layer, and each layer's progress.

    Each layer carries out ``copies``, then ``pack_jobs``, then ``writes``.

    Attributes:
        copies: (bits, source, target) of shared pages to copy before they are filled.
        pack_jobs: jobs that pack tokens, without those of steady rows. Their tokens are read before
            any 16-bit slot is written, because an emptied slot may be reused in the same step (but
            not in a decode step, which may pack at its end).
        writes: (3, n) int64: row, index and 16-bit slot of each new token.
        real: for each row, the indices of the tokens that are not padding; None if there is no
            padding.
        modalities: modality ids of the new tokens, see ``KVCacheManager.advance``; None if the step
            was planned ahead.
        lengths: number of new tokens per row if the rows are concatenated into a batch of one; None
            if each is a row of the batch.
        past: the sequences before the step. Their slots do not change until a layer carries the
            step out, so attention over the past and the new tokens comes first.
        from_pages: whether the forward pass uses attention "oscar" and reads the past from its
            pages; None until the first layer's keys arrive.
        planned: an earlier plan that does the same or more; for a row that has ended since then, it
            writes only to free slots and free positions in pages.
        steady: step of the steady rows; None if there are none.
        layers: indices of the layers that carry out the step; None in the first pass of a cache,
            whose layers are not yet known.
        fixed: fixed tensors for the tables of attention, ``pack_jobs`` and ``writes``; None to
            create new tables.
        chained: whether the rows are consecutive tokens of one sequence, see
            ``KVCacheManager.planned_chain``. Then all tokens to pack are packed before the first
            layer, and each layer stores the new tokens before it attends.
    """

    copies: list[tuple[Bits, int, int]] = field(default_factory=list)
    pack_jobs: list[PackJob] = field(default_factory=list)
    writes: np.ndarray | None = None
    real: list[np.ndarray] | None = None
    modalities: np.ndarray | Sequence[np.ndarray] | None = None
    lengths: list[int] | None = None
    past: Sequence[SequenceTable] = ()
    from_pages: bool | None = None
    planned: StepPlan | None = None
    steady: SteadyStep | None = None
    layers: frozenset[int] | None = None
    fixed: FixedTables | None = None
    chained: bool = False
    _made: dict[tuple[Hashable, ...], Any] = field(default_factory=dict)
    # Index of each layer whose keys have arrived -> whether it has carried out the step.
    _progress: dict[int, bool] = field(default_factory=dict)

    def enter(self, layer: int) -> None:
        """Record that a layer's keys have arrived.

        Raises:
            RuntimeError: if the layer missed an earlier step or stopped in this one.
        """
        if layer in self._progress or (self.layers is not None and layer not in self.layers):
            raise RuntimeError(_INCOMPLETE.format(layer))
        self._progress[layer] = False

    def finish(self, layer: int) -> None:
        """Record that a layer has carried out the step."""
        self._progress[layer] = True

    def is_finished(self, layer: int) -> bool:
        """Return whether a layer has carried out the step."""
        return self._progress.get(layer, False)

    def check_finished(self, layers: Iterable[int]) -> None:
        """Raise RuntimeError unless all of these layers have carried out the step."""
        for layer in layers:
            if not self.is_finished(layer):
                raise RuntimeError(_INCOMPLETE.format(layer))

    def restart(self) -> None:
        """Reset the progress of all layers after a pass that had no effect."""
        self._progress.clear()

    def sources(self) -> dict[Bits, set[int]]:
        """Return bits -> slots that layers read when they carry out the step; some slots may no
        longer have an owner."""
        jobs = self.all_jobs
        tokens = [one.source for one in jobs]
        tokens += [source for one in jobs for source in one.begins.values()]
        found = {PLAIN: {~slot for some in tokens for slot in some.tolist() if slot < 0}}
        for bits, source, _ in self.copies:
            found.setdefault(bits, set()).add(source)
        return found

    def add_steady(self, steady: SteadyStep) -> None:
        """Add the step of the steady rows to the step of the other rows."""
        self.steady = steady
        writes = np.stack([steady.rows, np.zeros_like(steady.rows), steady.slots])
        if self.writes is not None:
            writes = np.concatenate([self.writes, writes], axis=1)
        self.writes = writes[:, writes[0].argsort()]

    @property
    def all_jobs(self) -> list[PackJob]:
        """All jobs that pack tokens, in the order of the rows."""
        if self.steady is None:
            return self.pack_jobs
        return sorted([*self.pack_jobs, *self.steady.pack_jobs()], key=lambda one: one.row)

    @property
    def written(self) -> list[int]:
        """16-bit slots of the new tokens."""
        return [] if self.writes is None else self.writes[2].tolist()

    def two_way(self, kind: TwoWay, device: torch.device) -> list[list[Tokens]]:
        """Return, for each row, the groups of new tokens that attend to each other, as indices that
        do not count padding; empty if no row has a group."""

        def tokens(group: list[int]) -> Tokens:
            first, stop = group[0], group[-1] + 1
            if stop - first == len(group):
                return slice(first, stop)
            return upload(np.array(group), device)

        def make() -> list[list[Tokens]]:
            given = () if self.modalities is None else self.modalities
            rows = [two_way_groups(row[row != PADDING].tolist(), kind) for row in given]
            return [[tokens(group) for group in row] for row in rows] if any(rows) else []

        return self.once(("two-way groups", kind, device), make)

    @property
    def packs_at_end(self) -> bool:
        """Whether tokens are packed by ``OscarCache.end_step`` for all layers at once, after the
        last layer's writes, instead of by each layer."""
        return self.fixed is not None and self.fixed.packs_at_end

    def whole_pages_on(
        self, device: torch.device, places: WindowPages | None = None
    ) -> dict[Bits, WholePages]:
        """Return bits -> tables of full pages to pack, uploaded once for all layers of a device.

        Args:
            device: device of the layers.
            places: see ``AttentionShape``; pages that no window reaches are left out.
        """

        def tables(pack_jobs: list[PackJob]) -> WholePages:
            source = np.concatenate([one.whole_pages() for one in pack_jobs])
            rows = np.concatenate([np.full(len(one.pages), one.row) for one in pack_jobs])
            slots = np.concatenate([one.pages for one in pack_jobs])
            found = source, rows, slots
            if places is not None:
                slots = places.written(pack_jobs[0].bits, slots)
                found = (x[slots != DROPPED] for x in (source, rows, slots))
            return WholePages(*(upload(x.astype(np.int32), device) for x in found))

        return self.once(("whole pages", device, places), lambda: self._by_bits(tables))

    def tables(self, attention: AttentionShape, device: torch.device) -> Tables:
        """Return the tables for attention over ``past``, on a device."""
        if self.fixed is not None:
            return self.fixed.tables(self, attention, device)
        return tables_of(*attention.over(self.past, self.steady), device)

    def slots_on(
        self, device: torch.device, places: WindowPages | None = None
    ) -> dict[Bits, SlotTables]:
        """Return bits -> pack tables, uploaded once for all layers of a device.

        Args:
            device: device of the layers.
            places: see ``AttentionShape``; pages that no window reaches are left out.
        """
        if self.fixed is not None:
            return self.fixed.slots(device, places)

        def arrays(pack_jobs: list[PackJob]) -> tuple[np.ndarray, np.ndarray]:
            begins = np.concatenate([one.beginnings() for one in pack_jobs])
            return store_jobs(pack_jobs), begins

        def tables(bits: Bits, jobs: np.ndarray, begins: np.ndarray) -> SlotTables:
            if places is not None:
                jobs, begins = places.jobs(bits, jobs), places.begins(bits, begins)
                jobs, begins = (x[x[:, 0] != DROPPED] for x in (jobs, begins))
            return SlotTables(upload(jobs, device), upload(begins, device))

        def make() -> dict[Bits, SlotTables]:
            found = self.once(("jobs",), lambda: self._by_bits(arrays))
            return {bits: tables(bits, *of_bits) for bits, of_bits in found.items()}

        return self.once(("slots", device, places), make)

    def _by_bits(self, tables: Callable[[list[PackJob]], Any]) -> dict[Bits, Any]:
        jobs = self.all_jobs
        found = sorted({one.bits for one in jobs})
        return {bits: tables([one for one in jobs if one.bits == bits]) for bits in found}

    def filled(self) -> None:
        """Remove the pack jobs of whole pages, since their tokens are already packed; steady rows
        have no such jobs."""
        self.pack_jobs = []
        self._made = {key: made for key, made in self._made.items() if key[0] != "whole pages"}

    def writes_on(self, device: torch.device) -> torch.Tensor | None:
        """Return ``writes`` in the format of ``oscar_mm.ops.append``, (n, 3) int32, uploaded once
        for all layers of a device."""
        if self.fixed is not None:
            return self.fixed.writes(device)
        writes = self.writes
        if writes is None:
            return None

        def make() -> torch.Tensor:
            return upload(np.ascontiguousarray(writes.T, dtype=np.int32), device)

        return self.once(("writes", device), make)

    def once(self, key: tuple[Hashable, ...], make: Callable[[], Any]) -> Any:
        """Return the result of ``make``, cached under ``key`` for all layers."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def chained(steps: Sequence[StepPlan]) -> StepPlan | None:
    """Join single steps to a chained step, whose rows are consecutive tokens of one sequence.

    Args:
        steps: a planned step of one row for each token.

    Returns:
        The step; None if a page must be copied, a new token would have to be packed, or a token
        would be written to a slot from which the step packs another.
    """
    past = [row for one in steps for row in one.past]
    whole = StepPlan(past=past, from_pages=True, chained=True)
    writes = [(row, 0, int(slot)) for row, one in enumerate(steps) for slot in one.written]
    written = {slot for _, _, slot in writes}
    for row, one in enumerate(steps):
        sources = [x for job in one.pack_jobs for x in (job.source, *job.begins.values())]
        is_new = any((source >= 0).any() for source in sources)
        if one.copies or is_new or len(one.written) != 1 or written & one.sources()[PLAIN]:
            return None
        whole.pack_jobs += [replace(job, row=row) for job in one.pack_jobs]
    whole.writes = np.array(writes).T
    return whole


_MIN_ITEMS, _MIN_RECENTS = 64, 128
"""Minimum capacity of attention tables for pages and for tokens in 16-bit precision (sinks, the
window, and tokens of a few modalities that are waiting for a page)."""
_WRITES = "writes"


class _Room(NamedTuple):
    """Tensor with the attention tables and spare capacity."""

    longest: tuple[int, int]
    whole: torch.Tensor
    tables: Tables

    @classmethod
    def of(cls, attention: AttentionShape, step: StepPlan, device: torch.device) -> _Room:
        """Allocate a tensor with capacity for twice the pages and twice the tokens in 16-bit
        precision."""
        given = attention.over(step.past, step.steady)
        items, recents = lengths_of(arrays_of(*given))
        longest = max(_MIN_ITEMS, 2 * items), max(_MIN_RECENTS, 2 * recents)
        arrays = arrays_of(*given, longest)
        whole = torch.from_numpy(laid_out(arrays)).to(device, copy=True)
        return cls(longest, whole, Tables.within(whole, arrays))


class StagedTables(NamedTuple):
    """Tables of a step that are yet to be written to a graph's tensors.

    Attributes:
        targets: tensors that the graph reads, on one device.
        content: their new elements, one tensor after the other; (elements,) int32 on the host.
    """

    targets: list[torch.Tensor]
    content: torch.Tensor

    def write(self) -> None:
        """Write the tables."""
        self._write(self.content)

    @staticmethod
    def write_one_of(choices: Sequence[StagedTables], index: torch.Tensor) -> None:
        """Write the tables of one of several steps, which the device chooses.

        Args:
            choices: the tables of each step, all with the same targets.
            index: (1,) int64 on the device: index of the step.
        """
        first = choices[0]
        shape, device = (len(choices), len(first.content)), first.targets[0].device
        uploaded = torch.empty(shape, dtype=first.content.dtype, device=device)
        for row, one in zip(uploaded, choices, strict=True):
            row.copy_(one.content, non_blocking=True)
        first._write(uploaded.index_select(0, index)[0])

    def _write(self, content: torch.Tensor) -> None:
        parts = content.split([target.numel() for target in self.targets])
        for target, part in zip(self.targets, parts, strict=True):
            target.copy_(part.view(target.shape), non_blocking=True)


class GraphTables:
    """Fixed-address copies of a step's tables, updated in place for CUDA graph replay.

    Layers request their tables during a forward pass; from then on, ``refill`` writes the tables of
    later steps into the same tensors.

    Args:
        rows: number of rows in the batch.
        policy: policy of the cache.
        places: where layers with sliding windows store their pages.

    Attributes:
        version: counter that increases when a tensor is replaced; a graph that was captured before
            then reads stale tables.
        packs_whole_pages: whether only full pages are packed, before a replay and without tables.
        packs_at_end: whether all tokens to pack, including the new token, are in 16-bit slots at
            the end of the step; false without a window.
    """

    def __init__(self, rows: int, policy: KVPolicy, places: Sequence[WindowPages] = ()) -> None:
        self.rows, self.version, self._policy = rows, 0, policy
        self._places = places
        self.packs_whole_pages = not codec_of(policy).appends_tokens
        self.packs_at_end = policy.window > 0 and not self.packs_whole_pages
        # Table lines per row: as many as the tokens that begin a page have tiles.
        self._lines = {
            bits: -(-min_page_tokens(policy, bits) // TILE) for bits in policy.packed_bits
        }
        self._rooms: dict[tuple[AttentionShape, torch.device], _Room] = {}
        # Tables of a step's new tokens by kind. On each device, one tensor contains them all, since
        # a step then needs one copy; with it, its parts by kind.
        self._tokens: dict[str, np.ndarray] = {}
        self._on_device: dict[torch.device, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}

    @property
    def known(self) -> bool:
        """Whether layers have requested tables."""
        return bool(self._rooms)

    def refill(self, step: StepPlan) -> None:
        """Write the tables for attention over the sequences as they are before a step."""
        for (attention, device), room in self._rooms.items():
            arrays = arrays_of(*attention.over(step.past, step.steady), room.longest)
            if lengths_of(arrays) != room.longest:
                self._rooms[attention, device] = _Room.of(attention, step, device)
                self.version += 1
            else:
                _write(room.whole, laid_out(arrays))

    def refill_tokens(self, step: StepPlan) -> None:
        """Write the tables of a step's new tokens and pack jobs; ``takes`` must accept the step.

        There are no tables for packing full pages. With ``packs_at_end``, the tables refer to a new
        token by its slot.
        """
        self._tokens = self._tables_of_tokens(step)
        for whole, _ in self._on_device.values():
            _write(whole, laid_out(tuple(self._tokens.values())))

    def _tables_of_tokens(self, step: StepPlan) -> dict[str, np.ndarray]:
        """Return the tables of ``refill_tokens`` by kind."""
        writes = np.full((self.rows, 3), -1, dtype=np.int32)
        if step.writes is not None:
            writes[: step.writes.shape[1]] = step.writes.T
        tables = {_WRITES: writes}
        begins_any = any(pack_job.begins for pack_job in step.pack_jobs)
        listed = writes.tolist() if begins_any and self.packs_at_end else ()
        written = {row: slot for row, _, slot in listed}
        for bits in () if self.packs_whole_pages else self._policy.packed_bits:
            pack_jobs = [pack_job for pack_job in step.pack_jobs if pack_job.bits == bits]
            of_row = self._lines[bits]
            lines = self.rows * of_row
            jobs = np.full((lines, HEAD + TILE), -1, dtype=np.int32)
            begins = np.full((lines, HEAD + CENTER_TOKENS), -1, dtype=np.int32)
            if pack_jobs:
                found = store_jobs(pack_jobs)
                jobs[found[:, 2] * of_row + found[:, 1] % of_row] = found
            if step.steady is not None and step.steady.bits == bits:
                step.steady.write_jobs(jobs, of_row)
            for pack_job in pack_jobs:
                if pack_job.begins:
                    if (slot := written.get(pack_job.row)) is not None:
                        pack_job = pack_job.after_write(slot)
                    begins[pack_job.row * of_row] = pack_job.beginnings()
            begins = begins[: lines * self._policy.center]
            tables |= {_name(bits, "jobs"): jobs, _name(bits, "begins"): begins}
            for places in self._places:
                tables[_name(bits, "jobs", places)] = places.jobs(bits, jobs)
                tables[_name(bits, "begins", places)] = places.begins(bits, begins)
        return tables

    def staged(self, step: StepPlan) -> StagedTables | None:
        """Return what ``write`` would write; None if a tensor is too small."""
        found = list[tuple[torch.Tensor, np.ndarray]]()
        for (attention, _), room in self._rooms.items():
            arrays = arrays_of(*attention.over(step.past, step.steady), room.longest)
            if lengths_of(arrays) != room.longest:
                return None
            found.append((room.whole, laid_out(arrays)))
        tables = self._tables_of_tokens(step)
        of_tokens = laid_out(tuple(tables.values()))
        found += [(whole, of_tokens) for whole, _ in self._on_device.values()]
        targets, arrays = zip(*found, strict=True)
        # One pinned tensor for all, since pinning takes time for each.
        whole = _on_host(np.concatenate([array.ravel() for array in arrays]), targets[0])
        return StagedTables(list(targets), whole)

    def write(self, step: StepPlan) -> None:
        """Write all tables of a step that ``takes`` accepts."""
        self.refill(step)
        self.refill_tokens(step)

    def takes(self, step: StepPlan) -> bool:
        """Return whether the tables have enough capacity for the pack jobs of a step.

        Each row may pack tokens of only one stream into only one page, in no more tiles than the
        tokens that begin a page need. If the policy packs full pages, no new token may be packed.
        """
        if self.packs_whole_pages:
            return not any((pack_job.source >= 0).any() for pack_job in step.pack_jobs)
        rows = [pack_job.row for pack_job in step.pack_jobs]
        return len(set(rows)) == len(rows) and all(
            len(one.pages) == 1 and one.tiles <= self._lines[one.bits] for one in step.pack_jobs
        )

    def tables(self, step: StepPlan, attention: AttentionShape, device: torch.device) -> Tables:
        """Return ``StepPlan.tables`` for the step that ``refill`` last wrote."""
        if (attention, device) not in self._rooms:
            self._rooms[attention, device] = _Room.of(attention, step, device)
            self.version += 1
        return self._rooms[attention, device].tables

    def writes(self, device: torch.device) -> torch.Tensor:
        """Return the table of writes for ``oscar_mm.ops.append``, (rows, 3) int32; slot -1 marks
        rows without a new token."""
        return self._upload(_WRITES, device)

    def slots(
        self, device: torch.device, places: WindowPages | None = None
    ) -> dict[Bits, SlotTables]:
        """Return the tables of ``StepPlan.slots_on`` with a fixed number of entries per row; page
        -1 marks unused entries."""
        return {
            bits: SlotTables(
                *(self._upload(_name(bits, kind, places), device) for kind in ("jobs", "begins"))
            )
            for bits in self._policy.packed_bits
        }

    def _upload(self, key: str, device: torch.device) -> torch.Tensor:
        if device not in self._on_device:
            arrays = tuple(self._tokens.values())
            whole = torch.from_numpy(laid_out(arrays)).to(device, copy=True)
            sizes = [array.size for array in arrays]
            parts = zip(self._tokens.items(), whole.split(sizes), strict=True)
            views = {kind: part.view(array.shape) for (kind, array), part in parts}
            self._on_device[device] = whole, views
        return self._on_device[device][1][key]


def _name(bits: Bits, kind: str, places: WindowPages | None = None) -> str:
    """Return the name of a table of ``GraphTables`` for layers that store pages at these places."""
    return f"{bits} {kind}" if places is None else f"{bits} {kind} in {places.window}"


def _write(target: torch.Tensor, table: np.ndarray) -> None:
    target.copy_(_on_host(table, target), non_blocking=True)


def _on_host(table: np.ndarray, target: torch.Tensor) -> torch.Tensor:
    """Return a table as the source of a copy to ``target`` that does not wait for a GPU."""
    source = torch.from_numpy(table)
    return source.pin_memory() if target.is_cuda else source
