"""KV cache manager: maps every token of a sequence to a slot, once for all layers.

The KV cache manager runs on the host; layers only move bytes. Callers and attention announce new
tokens (``PendingModalities``). In a forward pass, every layer receives the keys and values of the
same new tokens. The KV cache manager plans once where they are stored (a ``StepPlan``: tokens to
pack, slots to write), and every layer carries out the plan on its own pools.

New tokens are stored in 16-bit precision. A token that leaves the window is packed into the next
free position of its stream's last page. If that page is full, tokens wait until there are enough of
them to begin another page, or to fill one if the policy packs only full pages.

Cropping, forking, reordering beams, forgetting tokens and resetting change only the KV cache
manager's tables.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch

from oscar_mm.cache.block_table import (
    NOWHERE,
    DryRunSlots,
    ModalityTable,
    NoFreeSlotsError,
    PlannedSlots,
    SequenceTable,
    SlotPool,
    SlotSet,
)
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.placement import TokenPlacer, real_tokens
from oscar_mm.cache.states import Marks
from oscar_mm.cache.step_plan import SteadyStep, StepPlan, chained
from oscar_mm.errors import InputError
from oscar_mm.modality import PADDING, Modality
from oscar_mm.policy import PLAIN, Bits

_NUMBERS = itertools.count()


class PendingModalities:
    """Modality ids of announced tokens, consumed one forward pass at a time."""

    def __init__(self) -> None:
        self._packed = False
        self._ids: np.ndarray | None = None
        self._padding: np.ndarray | None = None

    def announce(
        self, modalities: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> None:
        """Replace the announced tokens; see ``OscarCache.expect`` for arguments and errors."""
        if modalities is None:
            if attention_mask is None:
                raise InputError(
                    "expect(): neither modalities nor attention_mask was passed: pass one or both"
                )
            modalities = torch.zeros_like(attention_mask, dtype=torch.int8)
        ids = modalities.detach().to("cpu").numpy()
        if ids.ndim != 2 or not set(np.unique(ids).tolist()) <= {PADDING, *Modality}:
            raise InputError(
                "expect(): modalities must have shape (batch, tokens) and contain only 0 (text), "
                "1 (image), 2 (video), 3 (audio) or -1 (padding); got shape "
                f"{tuple(ids.shape)} with values {np.unique(ids).tolist()[:8]}"
            )
        ids = ids.astype(np.int8)
        if attention_mask is not None:
            if attention_mask.shape != modalities.shape:
                raise InputError(
                    f"expect(): attention_mask {tuple(attention_mask.shape)} and modalities "
                    f"{tuple(ids.shape)} must both have the shape of the new tokens"
                )
            ids[attention_mask.to("cpu").numpy() == 0] = PADDING
        self._ids = ids

    def attention(self, *, packed: bool, padding: torch.Tensor | None = None) -> None:
        """Set the attention implementation of the next forward pass.

        Args:
            packed: whether attention is "oscar", which reads the past from its pages.
            padding: (batch, tokens), False or 0 for padding; None if unknown.
        """
        self._packed = packed
        self._padding = None if padding is None else padding.to("cpu").numpy().astype(bool)

    def take(self, batch: int, tokens: int) -> np.ndarray:
        """Return (batch, tokens) int8 modality ids of the next forward pass; -1 marks padding."""
        ids = self._announced(batch, tokens)
        if ids is None:
            ids = np.zeros((batch, tokens), dtype=np.int8)
            if self._padding is None and not self._packed and batch > 1 and tokens > 1:
                warnings.warn(
                    "OscarCache: expect(attention_mask=...) was not called for this batch, so its "
                    "padding, if any, is stored too. Call cache.expect, or use attention 'oscar'",
                    stacklevel=7,  # the caller of OscarCache.update, through ``torch_modes.eager``
                )
        padding, self._padding = self._padding, None
        if padding is not None:
            ids[~padding] = PADDING
        return ids

    def take_packed(self) -> bool:
        """Return whether the current forward pass uses attention "oscar", and clear that flag.

        Each pass with attention "oscar" sets the flag before it runs, unless it has a
        four-dimensional mask: such a pass gets past and new tokens unpacked.
        """
        packed, self._packed = self._packed, False
        return packed

    def _announced(self, batch: int, tokens: int) -> np.ndarray | None:
        if self._ids is None:
            return None
        rows, known = self._ids.shape
        if known < tokens or batch % rows:
            raise InputError(
                f"expect() announced ({rows}, {known}) tokens, but ({batch}, {tokens}) arrived"
            )
        # Beam search repeats each prompt.
        taken = np.repeat(self._ids[:, :tokens], batch // rows, axis=0)
        self._ids = self._ids[:, tokens:] if known > tokens else None
        return taken


class KVCacheManager:
    """Sequences of a batch and the slots that store them.

    Args:
        store: page store of the slots.
        owns_slots: False if other KV cache managers own the same sequences and release the slots.

    Attributes:
        number: process-wide unique id of this KV cache manager.
        changes: counter of changes to the sequences; ``PageStore.trim`` has its own counter.
        marks: lengths to which the sequences can be cropped, with copies of states.
    """

    def __init__(self, store: PageStore, *, owns_slots: bool = True) -> None:
        self.store, self.policy, self.allocators = store, store.policy, store.allocators
        # This list is never replaced: the store releases its slots when the KV cache manager is
        # garbage-collected.
        self.sequences: list[SequenceTable] = []
        self.number, self.changes = next(_NUMBERS), 0
        self.marks = Marks()
        self._planned: list[_PlannedStep] = []
        """Steps planned ahead, each after the one before."""
        if owns_slots:
            store.register(self, self.sequences)

    def fork(self) -> KVCacheManager:
        """Return a KV cache manager with copies of the sequences; the copies share the slots."""
        twin = KVCacheManager(self.store)
        twin.hold([sequence.copy() for sequence in self.sequences])
        return twin

    def hold(self, sequences: list[SequenceTable]) -> None:
        """Replace the sequences and become an owner of their slots; release the old slots."""
        old = self.sequences[:]
        self.changes += 1
        # In this order, an interruption never releases a slot twice.
        self.store.share(sequences)
        self.sequences[:] = sequences
        self.store.release(old)

    @property
    def tables(self) -> list[SequenceTable]:
        """The sequences, to be read only; unlike ``sequences``, they end no steady steps."""
        return [sequence.peek() for sequence in self.sequences]

    @property
    def length(self) -> int:
        """Number of tokens in each row, padding included; the same for all rows."""
        return self.sequences[0].length if self.sequences else 0

    @property
    def stored_length(self) -> int:
        """Length without the padding at the end of all rows: steps of rows that had ended."""
        length, tables = self.length, self.tables
        while length and all(row.codes[length - 1] == NOWHERE for row in tables):
            length -= 1
        return length

    @property
    def version(self) -> tuple[int, ...]:
        """Value that changes whenever a sequence or a slot id changes."""
        return self.number, self.changes, self.store.trims

    def advance(self, modalities: np.ndarray | Sequence[np.ndarray]) -> StepPlan:
        """Add new tokens to the sequences and return the plan that stores them.

        Args:
            modalities: (batch, tokens) modality ids, -1 for padding; or a list of (tokens,) arrays
                for rows of different lengths, whose new tokens are concatenated into a batch of
                one.
        """
        self.store.collect()
        version = self.version
        planned = self._planned.pop(0) if self._planned else None
        self.changes += 1
        if not self.sequences:
            self.sequences += [SequenceTable() for _ in range(len(modalities))]
        with self.store.steady.lock:
            if (
                planned is not None
                and isinstance(modalities, np.ndarray)
                and planned.holds(modalities, self, version)
            ):
                return planned.take_place(modalities, self)
            return self._placed(modalities)

    def _placed(self, modalities: np.ndarray | Sequence[np.ndarray]) -> StepPlan:
        """Add new tokens that were not planned ahead, and return the step for the layers."""
        steady = None
        if isinstance(modalities, np.ndarray) and modalities.shape[1] == 1:
            # No row begins its steady steps here: single rows without graphs gain nothing.
            steady = self.store.steady.plan(self.sequences, modalities[:, 0].tolist(), begins=False)
        past = _PastRows.of(self.sequences, steady)
        placer = TokenPlacer(self.policy, self.allocators, self.store.window_pages)
        rows = list(zip(self.sequences, modalities, strict=True))
        for index in _others(self.sequences, steady):
            placer.place(index, *rows[index])
        step = placer.finish(modalities)
        if steady is not None:
            self.store.steady.take(steady)
            step.add_steady(steady)
        step.past, step.modalities = past, modalities
        several = not isinstance(modalities, np.ndarray) or modalities.shape[1] > 1
        self.store.begin_pages(step, *((self.sequences, past) if several else ()))
        return step

    def planned(self, modalities: np.ndarray) -> StepPlan | None:
        """Plan ahead what ``advance`` will do for (batch, 1) tokens, without changing sequences.

        If ``advance`` then receives the same tokens, the plan it returns refers to this one as
        ``planned``. What a layer writes for this plan becomes visible only after ``advance``. Free
        slots may also be planned or allocated for other sequences (see ``SlotPool.uses``).

        Returns:
            The plan, whose copies of pages may run before ``advance``; None if a pool must grow or
            there is no token to store.
        """
        self.store.collect()
        self._planned = []
        ids = modalities[:, 0].tolist()
        steady = self.store.steady.plan(self.sequences, ids, begins=True)
        free = {bits: DryRunSlots(bits, slots) for bits, slots in self.allocators.items()}
        placer = TokenPlacer(self.policy, free, self.store.window_pages)
        rows = dict[int, _PlannedRow]()
        for index in _others(self.sequences, steady):
            table = _plannable(self.sequences[index])
            try:
                rows[index] = _PlannedRow.of(placer, free, index, table, ids[index])
            except NoFreeSlotsError:
                return None
        step = placer.finish(modalities)
        step.past = _PastRows.of(self.sequences, steady)
        if steady is not None:
            step.add_steady(steady)
        if not (step.writes is not None or step.pack_jobs):
            return None
        self.store.begin_pages(step)
        self._planned = [_PlannedStep(step, self.version, modalities.copy(), rows)]
        return step

    def planned_chain(self, count: int) -> StepPlan | None:
        """Plan a chained step ahead: the next ``count`` text tokens of the only row.

        ``advance`` then takes the tokens one by one, as it takes a step of ``planned``; those that
        it does not receive leave no trace.

        Returns:
            A step with a row for each token. No row writes to a slot from which another reads a
            stored token. None if a page must be copied, or a new token would have to be packed.
        """
        self.store.collect()
        if self.holds_chain(count):
            self.plan_further(count)
            if (step := self.later_chain(0, count)) is not None:
                return step
        self._planned = []
        self._make_room(self.sequences[0], count)
        self.plan_further(count)
        if (step := self.later_chain(0, count)) is None:
            self._planned = []
        return step

    def holds_chain(self, count: int) -> bool:
        """Return whether all plans of ``planned_chain`` still hold, and were made for steps of
        ``count`` tokens."""
        if not self.holds_plan or [row.keeps for row in self.sequences] != [count]:
            return False
        earlier = set[tuple[Bits, int]]()
        for plan in self._planned:
            if plan.step.steady is not None or not plan.rows[0].slots.hold(
                self.allocators, earlier
            ):
                return False
            earlier |= {(bits, slot) for bits, slot, _ in plan.rows[0].slots.given}
        return True

    def plan_further(self, count: int) -> None:
        """Extend the plans of ``planned_chain`` to ``count`` tokens, but only up to a token for
        which a pool must grow or a page must be copied."""
        [sequence] = self.sequences
        rows = [plan.rows[0] for plan in self._planned]
        free = {bits: DryRunSlots(bits, slots) for bits, slots in self.allocators.items()}
        for row in rows:
            for bits, slot, _ in row.slots.given:
                free[bits].skip(slot)
        number, changes, trims = self.version
        table = _plannable(sequence, rows)
        table.keeps = sequence.keeps
        try:
            while len(self._planned) < count:
                version = number, changes + len(self._planned), trims
                table, made = self._planned_after(table, free, version)
                if made.step.copies:
                    break
                self._planned.append(made)
        except NoFreeSlotsError:
            pass

    def later_chain(self, first: int, count: int) -> StepPlan | None:
        """Return the chained step of ``count`` planned tokens after ``first`` others; None if the
        plans do not reach that far, or for a reason of ``planned_chain``."""
        steps = [plan.step for plan in self._planned[first : first + count]]
        return chained(steps) if len(steps) == count else None

    def next_plan(self, first: int = 0) -> StepPlan | None:
        """Return the plan of the token after ``first`` others; None if it is not planned."""
        plans = self._planned[first : first + 1]
        return plans[0].step if plans else None

    def _planned_after(
        self, table: SequenceTable, free: Mapping[Bits, DryRunSlots], version: tuple[int, ...]
    ) -> tuple[SequenceTable, _PlannedStep]:
        """Plan a text token after those of ``table``, to whose codes it is added.

        Returns:
            The table after the token, and its plan.
        """
        modalities = np.full((1, 1), int(Modality.TEXT), np.int8)
        past, after = table.before(), table.before()
        after.keeps = table.keeps
        placer = TokenPlacer(self.policy, free, self.store.window_pages)
        row = _PlannedRow.of(placer, free, 0, after, int(Modality.TEXT))
        step = placer.finish(modalities)
        step.past = [past]
        self.store.begin_pages(step)
        return after, _PlannedStep(step, version, modalities, {0: row})

    def _make_room(self, sequence: SequenceTable, count: int) -> None:
        """Let a sequence keep ``count`` spare slots from now on, and grow pools for the tokens of a
        chained step of ``count`` tokens and of the two after it."""
        sequence.keeps = count
        if (missing := sequence.keeps - len(sequence.spare)) > 0:
            self.changes += 1
            sequence.spare = sequence.spare + self.allocators[PLAIN].allocate(missing)
        self.allocators[PLAIN].ensure_free(3 * count)
        self.allocators[self.policy.bits_for(Modality.TEXT)].ensure_free(1)

    @property
    def holds_plan(self) -> bool:
        """Whether ``advance`` would take the next planned step."""
        return bool(self._planned) and self._planned[0].holds(
            self._planned[0].modalities, self, self.version
        )

    def can_return(self, length: int) -> bool:
        """Return whether layers with sliding windows have all pages that attention after the first
        ``length`` tokens reads."""
        pages = self.store.window_pages
        return all(one.can_return(row, length) for one in pages for row in self.tables)

    def crop(self, count: int) -> None:
        """Remove the last ``count`` tokens of every row."""
        if not 0 <= count <= self.length:
            raise ValueError(f"cannot remove {count} tokens from a cache of {self.length}")
        self.changes += 1
        for sequence in self.sequences if count else ():
            removed = np.frombuffer(bytes(sequence.codes[-count:]), dtype=np.uint8)
            for code, stream in sequence.streams.items():
                pages, slots = stream.drop_last(int((removed == code).sum()))
                self.allocators[PLAIN].release(slots)
                if pages:
                    self.allocators[stream.bits].release(pages)
            sequence.stored -= int((removed != NOWHERE).sum())
            del sequence.codes[-count:]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the given rows of the batch, in the given order; repeated rows share slots."""
        for row in rows:
            if not 0 <= row < len(self.sequences):
                raise IndexError(
                    f"row {row} is out of range: the cache has {len(self.sequences)} sequences"
                )
        self.hold([self.sequences[row].copy() for row in rows])

    def forget(self, row: int, start: int, stop: int) -> None:
        """Remove tokens start to stop - 1 of a row without changing its length and positions."""
        if not 0 <= row < len(self.sequences):
            raise InputError(
                f"forget: row {row} is out of range: the cache has {len(self.sequences)} sequences"
            )
        if not 0 <= start <= stop <= self.length:
            raise InputError(
                f"forget: tokens {start} to {stop} are out of range: the cache has {self.length} "
                "tokens, counted from 0, and start must not be above stop"
            )
        self.changes += 1
        sequence = self.sequences[row]
        codes = np.frombuffer(bytes(sequence.codes[:stop]), dtype=np.uint8)
        before, gone = codes[:start], codes[start:]
        for code in np.unique(gone[gone != NOWHERE]).tolist():
            stream = sequence.streams[code]
            first = int((before == code).sum())
            last = first + int((gone == code).sum())
            sequence.stored -= last - first
            packed = stream.packed
            if first < packed:
                cut, left = stream.cut_pages(first, min(last, packed))
                self.allocators[stream.bits].share(left)
                self.allocators[stream.bits].release(cut)
            if last > packed:
                out = slice(max(first - packed, 0), last - packed)
                self.allocators[PLAIN].release(stream.slots[out])
                del stream.slots[out]
        sequence.codes[start:stop] = bytes([NOWHERE]) * (stop - start)

    def clear(self) -> None:
        """Remove all sequences."""
        self.select([])

    def streams(self) -> Iterator[ModalityTable]:
        """Yield the streams of all rows, to be read only."""
        for sequence in self.tables:
            yield from sequence.streams.values()

    @property
    def spare(self) -> int:
        """Number of spare 16-bit slots of all rows."""
        return sum(len(row.spare) for row in self.tables)

    def holds_all(self, held: SlotSet) -> bool:
        """Return whether this KV cache manager owns every used slot of the store.

        Args:
            held: slots of its sequences' streams.
        """
        taken = held.counts + Counter({PLAIN: self.spare})
        return all(slots.used == taken[bits] for bits, slots in self.allocators.items())

    def release_spare(self) -> None:
        """Release the spare slots of all rows."""
        for row in self.sequences:
            if row.spare:
                self.changes += 1
                self.allocators[PLAIN].release(row.spare)
                row.spare = []

    @property
    def table_bytes(self) -> int:
        """Size of the tables in bytes: 1 per token, 4 per 16-bit slot, 8 per page entry."""
        ids = sum(2 * len(stream.pages) + len(stream.slots) for stream in self.streams())
        return sum(sequence.length for sequence in self.sequences) + 4 * ids


class _SequenceSnapshot(NamedTuple):
    """State of a sequence, for checking later whether the sequence has changed.

    Attributes:
        length: number of tokens, padding included.
        stored: number of stored tokens.
        streams: streams of the sequence; a step replaces each stream that it changes.
        spare: its spare slots, which may be released without a step.
    """

    length: int
    stored: int
    streams: list[ModalityTable]
    spare: list[int]

    @classmethod
    def of(cls, row: SequenceTable) -> _SequenceSnapshot:
        codes, streams, stored, spare = row.fields
        return cls(len(codes), stored, list(streams.values()), spare.copy())

    def is_of(self, row: SequenceTable) -> bool:
        """Return whether ``row`` has not changed since the snapshot."""
        codes, streams, stored, spare = row.fields
        return (
            (len(codes), stored, spare) == (self.length, self.stored, self.spare)
            and len(streams) == len(self.streams)
            and all(map(is_, streams.values(), self.streams))
        )


class _PlannedRow(NamedTuple):
    """Part of a planned step that concerns one row.

    Attributes:
        before: the sequence before the step.
        code: stream code of the row's token.
        table: the sequence after the step, without its codes.
        slots: slots that the step allocates, writes to or empties.
        freed: 16-bit slots that the step releases.
    """

    before: _SequenceSnapshot
    code: int
    table: SequenceTable
    slots: PlannedSlots
    freed: list[int]

    @classmethod
    def of(
        cls,
        placer: TokenPlacer,
        free: Mapping[Bits, DryRunSlots],
        index: int,
        table: SequenceTable,
        modality: int,
    ) -> _PlannedRow:
        """Place a token of a row.

        Args:
            placer: places the tokens of the step.
            free: the placer's allocators.
            index: index of the row.
            table: snapshot of the row with codes of its own, to which the token is added.
            modality: the token's modality.

        Raises:
            NoFreeSlotsError: if a pool must grow.
        """
        before, slots = _SequenceSnapshot.of(table), PlannedSlots()
        for pool in free.values():
            pool.row = slots
        placer.place_one(index, table, modality)
        return cls(before, table.codes[-1], table, slots, placer.freed.get(index, []))

    def holds(self, sequence: SequenceTable, allocators: Mapping[Bits, SlotPool]) -> bool:
        """Return whether the sequence and its slots are as they were when the step was planned."""
        return self.before.is_of(sequence) and self.slots.hold(allocators)

    def take_place(self, sequence: SequenceTable, allocators: Mapping[Bits, SlotPool]) -> None:
        """Apply the effect to the sequence, and release slots; the caller has claimed the allocated
        ones."""
        sequence.codes.append(self.code)
        sequence.streams, sequence.stored = self.table.streams, self.table.stored
        sequence.spare = self.table.spare
        allocators[PLAIN].release(self.freed)
        for bits, page in self.slots.replaced:
            allocators[bits].release([page])


def _plannable(sequence: SequenceTable, rows: Sequence[_PlannedRow] = ()) -> SequenceTable:
    """Return a snapshot of a sequence, after planned tokens, to which further ones can be added.

    It has codes of its own: a token that is only planned must not be seen by other threads, which
    read the sequence's codes and length at any time.
    """
    table = (rows[-1].table if rows else sequence).before()
    table.codes = sequence.codes + bytes(row.code for row in rows)
    return table


class _PlannedStep(NamedTuple):
    """Step planned by ``KVCacheManager.planned``; ``advance`` applies it if the expected tokens
    arrive.

    Attributes:
        step: the planned step.
        version: ``KVCacheManager.version`` when the step was planned.
        modalities: (batch, 1) ids of the tokens.
        rows: index of each row that is not steady -> what the step does to it.
    """

    step: StepPlan
    version: tuple[int, ...]
    modalities: np.ndarray
    rows: dict[int, _PlannedRow]

    def holds(
        self, modalities: np.ndarray, kv_manager: KVCacheManager, version: tuple[int, ...]
    ) -> bool:
        """Return whether the plan is valid for these tokens; rows that have ended may have padding
        instead."""
        if modalities.shape != self.modalities.shape or version != self.version:
            return False
        continues, sequences = modalities[:, 0] != PADDING, kv_manager.sequences
        if not (modalities == self.modalities)[:, 0][continues].all():
            return False
        steady = self.step.steady
        return (
            steady is None or kv_manager.store.steady.holds(steady.among(continues), sequences)
        ) and all(
            row.holds(sequences[index], kv_manager.allocators)
            for index, row in self.rows.items()
            if continues[index]
        )

    def take_place(self, modalities: np.ndarray, kv_manager: KVCacheManager) -> StepPlan:
        """Apply the plan to a KV cache manager, and return the step for the layers."""
        sequences, continues = kv_manager.sequences, modalities[:, 0] != PADDING
        step = StepPlan(planned=self.step, real=real_tokens(modalities))
        if self.step.steady is not None:
            step.steady = self.step.steady.among(continues)
        step.past = _PastRows.of(sequences, step.steady)
        given = [x for index, row in self.rows.items() if continues[index] for x in row.slots.given]
        for bits, slots in kv_manager.allocators.items():
            slots.claim([slot for kind, slot, _ in given if kind == bits])
        claimed = {(bits, slot) for bits, slot, _ in given}
        step.copies = [copy for copy in self.step.copies if (copy[0], copy[2]) in claimed]
        for index in _others(sequences, step.steady):
            row = self.rows.get(index)
            if row is None or not continues[index]:
                sequences[index].codes.append(NOWHERE)
            else:
                row.take_place(sequences[index], kv_manager.allocators)
        if step.steady is not None:
            kv_manager.store.steady.take(step.steady)
        step.pack_jobs = [one for one in self.step.pack_jobs if continues[one.row]]
        if (writes := self.step.writes) is not None:
            step.writes = writes[:, continues[writes[0]]]
            step.writes = step.writes if step.writes.size else None
        return step


def _others(sequences: list[SequenceTable], steady: SteadyStep | None) -> list[int]:
    """Return the rows that are not steady."""
    return [*range(len(sequences))] if steady is None else steady.others(len(sequences))


class _PastRows(Sequence[SequenceTable]):
    """The rows of a batch before a step.

    Tables of steady rows are made only when they are read: attention has arrays instead
    (``SteadyStep.past``).
    """

    def __init__(self, rows: list[SequenceTable], steady: SteadyStep) -> None:
        self._steady, self._count = steady, len(rows)
        self._tables = {index: rows[index].before() for index in steady.others(len(rows))}

    @classmethod
    def of(cls, rows: list[SequenceTable], steady: SteadyStep | None) -> Sequence[SequenceTable]:
        """Return the rows as they are now, before the step."""
        return [row.before() for row in rows] if steady is None else cls(rows, steady)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if index not in self._tables:
            if not 0 <= index < self._count:
                raise IndexError(index)
            position = int(np.searchsorted(self._steady.rows, index))
            steps = int(self._steady.counts[position])
            self._tables[index] = self._steady.deferred[position].after(steps)
        return self._tables[index]
