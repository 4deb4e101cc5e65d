"""KV cache manager: what the coming tokens are, and which token is where. Host-side, once for all
layers; layers only move bytes.

Callers and attention announce tokens (``PendingModalities``). A forward pass brings every layer the
keys and values of the same new tokens. The KV cache manager decides once what is to happen to them
(a ``StepPlan``: slots to fill, slots to write) and every layer carries it out on its own pools. New
tokens are in 16-bit precision. A token that has left the window is packed: it takes the next slot
of its stream's last page. Where that one is full it waits until enough tokens do for another page,
and where pages are packed as a whole until a page is full.
Crop, fork, beam reordering, forgetting tokens and reset are changes of the KV cache manager alone.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import NamedTuple

import numpy as np
import torch

from oscar_mm.cache.block_table import (
    NOWHERE,
    DryRunSlots,
    ModalityTable,
    NoFreeSlotsError,
    SequenceTable,
    SlotPool,
    SlotSet,
)
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.placement import TokenPlacer, real_tokens
from oscar_mm.cache.step_plan import StepPlan
from oscar_mm.errors import InputError
from oscar_mm.modality import PADDING, Modality
from oscar_mm.policy import PLAIN, Bits

_NUMBERS = itertools.count()


class PendingModalities:
    """Modality ids of tokens to come, taken in pieces as they come."""

    def __init__(self) -> None:
        self._packed = False
        self._ids: np.ndarray | None = None
        self._padding: np.ndarray | None = None

    def announce(
        self, modalities: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> None:
        """Expect these tokens instead of those announced before; ``OscarCache.expect`` has the
        arguments and errors."""
        if modalities is None:
            if attention_mask is None:
                raise InputError("expect: give modalities, attention_mask or both")
            modalities = torch.zeros_like(attention_mask, dtype=torch.int8)
        ids = modalities.detach().to("cpu").numpy()
        if ids.ndim != 2 or not set(np.unique(ids).tolist()) <= {PADDING, *Modality}:
            raise InputError(
                "expect: modalities must be (batch, tokens) of 0 text, 1 image, 2 video, 3 audio, "
                f"-1 padding, not {tuple(ids.shape)} of {np.unique(ids).tolist()[:8]}"
            )
        ids = ids.astype(np.int8)
        if attention_mask is not None:
            if attention_mask.shape != modalities.shape:
                raise InputError(
                    f"expect: attention_mask {tuple(attention_mask.shape)} and modalities "
                    f"{tuple(ids.shape)} must have one shape: that of the new tokens"
                )
            ids[attention_mask.to("cpu").numpy() == 0] = PADDING
        self._ids = ids

    def attention(self, *, packed: bool, padding: torch.Tensor | None = None) -> None:
        """Attention "oscar" (``packed``) or another one runs the coming forward pass.

        Args:
            packed: whether the past is read from its pages.
            padding: (batch, tokens), False or 0 for padding; None if nothing is known of it.
        """
        self._packed = packed
        self._padding = None if padding is None else padding.to("cpu").numpy().astype(bool)

    def take(self, batch: int, tokens: int) -> np.ndarray:
        """(batch, tokens) int8 modality ids of the coming forward pass; -1 for padding."""
        ids = self._announced(batch, tokens)
        if ids is None:
            ids = np.zeros((batch, tokens), dtype=np.int8)
            if self._padding is None and not self._packed and batch > 1 and tokens > 1:
                warnings.warn(
                    "OscarCache: a batch without expect(attention_mask=...): if it has padding, "
                    "that is stored too. Call cache.expect, or use attention 'oscar'",
                    stacklevel=7,  # who called OscarCache.update, through ``torch_modes.eager``
                )
        padding, self._padding = self._padding, None
        if padding is not None:
            ids[~padding] = PADDING
        return ids

    def take_packed(self) -> bool:
        """Whether attention "oscar" runs the forward pass that has begun.

        The next pass has to announce itself again: one with a mask of four dimensions does not,
        and it gets past and new tokens, whatever its attention is.
        """
        packed, self._packed = self._packed, False
        return packed

    def _announced(self, batch: int, tokens: int) -> np.ndarray | None:
        if self._ids is None:
            return None
        rows, known = self._ids.shape
        if known < tokens or batch % rows:
            raise InputError(
                f"expect() announced ({rows}, {known}) tokens, but ({batch}, {tokens}) came"
            )
        # Beam search repeats each prompt.
        taken = np.repeat(self._ids[:, :tokens], batch // rows, axis=0)
        self._ids = self._ids[:, tokens:] if known > tokens else None
        return taken


class KVCacheManager:
    """Sequences of a batch and the slots that hold them.

    Args:
        store: that the slots are of.
        owns_slots: False where other KV cache managers have the same sequences and give the slots
            back.

    Attributes:
        number: of this ledger, which no other one has.
        changes: grows with every change of a sequence. ``PageStore.trim`` counts its own.
    """

    def __init__(self, store: PageStore, *, owns_slots: bool = True) -> None:
        self.store, self.policy, self.allocators = store, store.policy, store.allocators
        # Always the same list: the store takes its slots back once the KV cache manager is gone.
        self.sequences: list[SequenceTable] = []
        self.number, self.changes = next(_NUMBERS), 0
        self._foretold: _PlannedStep | None = None
        if owns_slots:
            store.register(self)

    def fork(self) -> KVCacheManager:
        """A ledger of the same sequences, over the same slots; what it adds is its own."""
        twin = KVCacheManager(self.store)
        twin.hold([sequence.copy() for sequence in self.sequences])
        return twin

    def hold(self, sequences: list[SequenceTable]) -> None:
        """Put these sequences in the place of those before, as an owner of all their slots."""
        old = self.sequences[:]
        self.changes += 1
        # In this order, so that whatever interrupts it no slot is given back twice.
        self.store.share(sequences)
        self.sequences[:] = sequences
        self.store.release(old)

    @property
    def length(self) -> int:
        """Tokens of a row, padding included; the same for all rows."""
        return len(self.sequences[0].codes) if self.sequences else 0

    @property
    def version(self) -> tuple[int, ...]:
        """The same as long as the sequences and the ids of their slots are."""
        return self.number, self.changes, self.store.trims

    def advance(self, modalities: np.ndarray | Sequence[np.ndarray]) -> StepPlan:
        """Take in new tokens: (batch, tokens) modality ids, -1 for padding.

        Args:
            modalities: a list of (tokens,) instead for rows of unequal length, whose new tokens
                come one row after the other as a batch of one.
        """
        self.store.collect()
        version = self.version
        planned, self._foretold = self._foretold, None
        self.changes += 1
        if not self.sequences:
            self.sequences += [SequenceTable() for _ in range(len(modalities))]
        if (
            planned is not None
            and isinstance(modalities, np.ndarray)
            and planned.holds(modalities, self.sequences, version, self.store)
        ):
            return planned.take_place(modalities, self.sequences, self.allocators)
        past = [sequence.before() for sequence in self.sequences]
        step = TokenPlacer(self.policy, self.allocators).of(self.sequences, modalities)
        step.past = past
        return step

    def planned(self, modalities: np.ndarray) -> StepPlan | None:
        """The ``StepPlan`` of ``advance`` for (batch, 1) tokens, if it needs no more room.

        No sequence changes, and nobody sees what the step writes before ``advance``, whose step
        names this one as ``planned`` if it does the same. Slots that were free may be foretold to
        others too (``SlotPool.epoch``).

        Returns:
            None where a page would be copied or a pool grown, or no token stored.
        """
        self.store.collect()
        self._foretold = None
        free = {bits: DryRunSlots(slots) for bits, slots in self.allocators.items()}
        rows = [sequence.before() for sequence in self.sequences]
        for row, sequence in zip(rows, self.sequences, strict=True):
            row.spare = sequence.spare.copy()
        before = [_SequenceSnapshot.of(row) for row in rows]
        advance = TokenPlacer(self.policy, free)
        try:
            step = advance.of(rows, modalities)
            codes = [row.codes[-1] for row in rows]
        except NoFreeSlotsError:
            return None
        finally:
            for row, (length, *_) in zip(rows, before, strict=True):
                del row.codes[length:]  # They are the sequence's own.
        step.past = self.sequences
        if step.copies or not (step.writes is not None or step.fillings):
            return None
        given = {bits: slots.given for bits, slots in free.items() if slots.given}
        owners = {
            (bits, slot): self.allocators[bits].owners(slot)
            for bits, slots in free.items()
            for slot in slots.counted
        }
        self._foretold = _PlannedStep(
            *(step, self.version, self.store.epoch, before, modalities.copy()),
            *(codes, rows, given, advance.freed, owners),
        )
        return step

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
        """Make the batch these rows of it, in this order, with repetition: slots are shared."""
        for row in rows:
            if not 0 <= row < len(self.sequences):
                raise IndexError(f"row {row} of a cache of {len(self.sequences)} sequences")
        self.hold([self.sequences[row].copy() for row in rows])

    def forget(self, row: int, start: int, stop: int) -> None:
        """Take the tokens start to stop - 1 of a row out; its length and positions stay."""
        if not 0 <= row < len(self.sequences):
            raise InputError(f"forget: row {row} of a cache of {len(self.sequences)} sequences")
        if not 0 <= start <= stop <= self.length:
            raise InputError(
                f"forget: tokens {start} to {stop} of a cache of {self.length}; "
                "start <= stop, counted from 0"
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
        """Forget all sequences."""
        self.select([])

    def streams(self) -> Iterator[ModalityTable]:
        """All streams of all rows."""
        for sequence in self.sequences:
            yield from sequence.streams.values()

    @property
    def spare(self) -> int:
        """Slots of 16 bit that rows have to spare."""
        return sum(len(row.spare) for row in self.sequences)

    def holds_all(self, held: SlotSet) -> bool:
        """Whether these sequences have all slots of the store that anybody has.

        Args:
            held: of their streams.
        """
        taken = held.counts + Counter({PLAIN: self.spare})
        return all(slots.used == taken[bits] for bits, slots in self.allocators.items())

    def release_spare(self) -> None:
        """Give back the slots that rows have to spare."""
        for row in self.sequences:
            if row.spare:
                self.changes += 1
                self.allocators[PLAIN].release(row.spare)
                row.spare = []

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables: one per token, four per slot of 16 bit, eight per page's entry."""
        ids = sum(2 * len(stream.pages) + len(stream.slots) for stream in self.streams())
        return sum(len(sequence.codes) for sequence in self.sequences) + 4 * ids


class _SequenceSnapshot(NamedTuple):
    """A sequence as it is, to be compared later.

    Attributes:
        length: of the sequence.
        stored: tokens.
        streams: in whose place a step puts others where it changes them.
    """

    length: int
    stored: int
    streams: list[ModalityTable]

    @classmethod
    def of(cls, row: SequenceTable) -> _SequenceSnapshot:
        return cls(len(row.codes), row.stored, list(row.streams.values()))

    def is_of(self, row: SequenceTable) -> bool:
        """Whether the sequence has not changed since."""
        return (
            (len(row.codes), row.stored) == self[:2]
            and len(row.streams) == len(self.streams)
            and all(map(is_, row.streams.values(), self.streams))
        )


class _PlannedStep(NamedTuple):
    """What ``KVCacheManager.advance`` is to do if it comes as foretold.

    Attributes:
        step: that was foretold.
        version: ``KVCacheManager.version`` then.
        promises: ``PageStore.epoch`` once all was foretold.
        before: the step, each sequence.
        modalities: (batch, 1) ids of the tokens.
        codes: stream code of each row's token.
        rows: the sequences after the step, but for their codes.
        given: slots that the step takes.
        freed: slots of 16 bit that each row gives up.
        owners: how many owners slots have that the step writes to or empties.
    """

    step: StepPlan
    version: tuple[int, ...]
    epoch: int
    before: list[_SequenceSnapshot]
    modalities: np.ndarray
    codes: list[int]
    rows: list[SequenceTable]
    given: dict[Bits, list[int]]
    freed: dict[int, list[int]]
    owners: dict[tuple[Bits, int], int]

    def holds(
        self,
        modalities: np.ndarray,
        sequences: list[SequenceTable],
        version: tuple[int, ...],
        store: PageStore,
    ) -> bool:
        """Whether these tokens do what was foretold; rows that have ended since do nothing."""
        if modalities.shape != self.modalities.shape:
            return False
        changed = modalities != self.modalities
        if changed.any() and (self.given or (modalities[changed] != PADDING).any()):
            return False
        if version != self.version or (self.given and store.epoch != self.epoch):
            return False
        for row, before, goes_on in zip(sequences, self.before, modalities != PADDING, strict=True):
            if goes_on and not before.is_of(row):
                return False
        return all(
            store.allocators[bits].owners(slot) == owners
            for (bits, slot), owners in self.owners.items()
        )

    def take_place(
        self,
        modalities: np.ndarray,
        sequences: list[SequenceTable],
        allocators: Mapping[Bits, SlotPool],
    ) -> StepPlan:
        """Change the sequences and allocators as foretold, and give the step that does it."""
        step = StepPlan(planned=self.step, real=real_tokens(modalities))
        step.past = [SequenceTable(row.codes, row.streams, row.stored) for row in sequences]
        goes_on = (modalities[:, 0] != PADDING).tolist()
        for bits, slots in self.given.items():
            allocators[bits].claim(slots)
        for place, sequence in enumerate(sequences):
            if not goes_on[place]:
                sequence.codes.append(NOWHERE)
                continue
            row = self.rows[place]
            sequence.codes.append(self.codes[place])
            sequence.streams, sequence.stored = row.streams, row.stored
            sequence.spare = row.spare
            allocators[PLAIN].release(self.freed.get(place, ()))
        step.fillings = [one for one in self.step.fillings if goes_on[one.row]]
        if (writes := self.step.writes) is not None:
            step.writes = writes[:, [goes_on[row] for row in writes[0].tolist()]]
            step.writes = step.writes if step.writes.size else None
        return step
