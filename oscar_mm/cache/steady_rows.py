"""Steady rows: decode steps of many rows at once, in which no row allocates or releases a slot.

In most decode steps, a row's new token takes a spare slot. If the last page of its stream has room,
the token that leaves the window is packed, and its slot becomes the spare slot, unless other
sequences share it. The number of such steady steps is known when the first one is planned. Until
the last one, ``SteadyRows`` keeps the row's slots in arrays and plans its steps together with those
of other rows. The ``SequenceTable`` includes these steps only when something reads it, which ends
them; so code that changes a sequence need not know about steady steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from oscar_mm.cache.block_table import (
    DeferredSteps,
    ModalityTable,
    SequenceTable,
    SlotPool,
    min_page_tokens,
)
from oscar_mm.cache.placement import MAX_SPARE, begins_page_at, max_spare
from oscar_mm.cache.step_plan import SteadyStep
from oscar_mm.cache.window_pages import WindowPages, room
from oscar_mm.modality import Modality
from oscar_mm.ops.decode_tables import StoredTokens, grown
from oscar_mm.pages.codecs.registry import codec_of
from oscar_mm.policy import PLAIN, Bits, KVPolicy

_TEXT = int(Modality.TEXT)
_MIN_ROWS = 8
"""Minimum number of rows by which the arrays grow."""


class SteadyRow:
    """Steady steps of one row, which its table does not include yet.

    Args:
        rows: arrays with the row's slots.
        index: index of the row in these arrays.
        before: the row before these steps, which owns ``spare`` slots.
        packs: whether each step packs a token.
        leaves: whether the slots of the packed tokens are shared with other sequences, to which
            they are left when these steps end.
    """

    def __init__(
        self, rows: SteadyRows, index: int, before: SequenceTable, *, packs: bool, leaves: bool
    ) -> None:
        self.index = index
        self._rows, self._before, self._packs, self._leaves = rows, before, packs, leaves

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Lock of all steady rows of the store."""
        return self._rows.lock

    @property
    def count(self) -> int:
        """Number of steps so far."""
        return int(self._rows.counts[self.index])

    def after(self, steps: int) -> SequenceTable:
        """Return the row's table after a number of steps."""
        before, stream = self._before, self._before.streams[_TEXT].copy()
        slots = _in_order(before)
        kept = len(stream.slots)
        if self._packs:
            first = steps % len(slots)
            slots = slots[first:] + ([] if self._leaves else slots[:first])
            stream.fill(steps, [], 0)
        else:
            kept += steps
        stream.slots, spare = stream.slots[:0], slots[kept:]
        stream.slots.extend(slots[:kept])
        return SequenceTable(
            before.codes + bytes([_TEXT]) * steps,
            {**before.streams, _TEXT: stream},
            before.stored + steps,
            spare,
        )

    def end(self) -> SequenceTable:
        """Return the row's table, and leave the arrays."""
        steps = self.count
        table = self.after(steps)
        if self._leaves:
            left = self._before.streams[_TEXT].slots[:steps].tolist()
            self._rows.drop([SequenceTable(spare=left)])
        self._rows.free.append(self.index)
        return table


def _in_order(row: SequenceTable) -> list[int]:
    """Return the 16-bit slots of a row's text, and then its spare slots, first the next to use."""
    return [*row.streams[_TEXT].slots, *row.spare]


class SteadyRows:
    """Rows of a store whose next decode steps allocate and release no slots, as arrays.

    Args:
        policy: how keys and values are stored.
        allocators: slot pools of the store, by bits.
        drop: function that releases the slots of sequences later, as any thread may end steps.
        window_pages: see ``room``.

    Attributes:
        lock: reentrant lock, held while steps are added or a table takes them.
        counts: number of steps of each row that its table does not include.
        free: indices without a row.
    """

    def __init__(
        self,
        policy: KVPolicy,
        allocators: Mapping[Bits, SlotPool],
        drop: Callable[[list[SequenceTable]], None],
        window_pages: Sequence[WindowPages] = (),
    ) -> None:
        self._policy, self._allocators, self.drop = policy, allocators, drop
        self._window_pages = window_pages
        self._bits = policy.bits_for(Modality.TEXT)
        first, second, *_ = *policy.packed_bits, None, None
        self._formats = first, second
        self._appends_tokens = codec_of(policy).appends_tokens
        self._begins_page_at = begins_page_at(policy)
        self.lock, self.free = threading.RLock(), list[int]()
        # By row: steps so far, and steps left. Index in ``_slots`` of the oldest slot in use, or of
        # the next spare slot if no tokens are packed. Page that tokens move to, or -1, and the
        # index in it of the next token.
        self.counts, self._left, self._head, self._page, self._first = np.zeros((5, 0), np.int32)
        # By row, ``SteadyStep.text`` of its first steady step.
        self._text = np.zeros((0, 4), np.int32)
        # The slots of a row whose packed tokens pass theirs on are a ring. They come twice, so that
        # those in use are adjacent wherever its head is.
        self._slots = np.zeros((0, max(2 * (policy.window + 1), MAX_SPARE + 1)), np.int32)
        self._past = StoredTokens.of([SequenceTable().entries(self._formats)])

    def _begin(self, row: SequenceTable) -> SteadyRow | None:
        """Begin the steady steps of a row whose next tokens are text; return None if the next step
        is not steady."""
        steps = self._steps(*row.fields)
        if steps <= 0:
            return None
        before = SequenceTable(*row.fields)
        stream, index = before.streams[_TEXT], self._free_index()
        packs = self._room(stream) > 0
        leaves = packs and self._allocators[PLAIN].count_shared(stream.slots) > 0
        self.counts[index] = self._head[index] = 0
        self._left[index] = steps
        self._page[index] = stream.pages[-1] if packs else -1
        self._first[index] = stream.stops[-1] if packs else 0
        tail = len(before.codes) - len(before.codes.rstrip(bytes([_TEXT])))
        self._text[index] = tail, len(stream.slots), len(stream.pages), len(before.codes)
        slots = _in_order(before) if packs else before.spare
        if packs and not leaves:
            slots = 2 * slots
        self._slots[index, : len(slots)] = slots
        self._write_past(index, row, 0 if packs else steps)
        row.deferred = deferred = SteadyRow(self, index, before, packs=packs, leaves=leaves)
        return deferred

    def _steps(
        self, codes: bytearray, streams: dict[int, ModalityTable], stored: int, spare: list[int]
    ) -> int:
        """Return the number of steady steps that follow, 0 or less if there are none; the arguments
        are the ``fields`` of a row.

        All tokens in the window must be text, since another stream's token may leave it otherwise.
        """
        policy, stream = self._policy, streams.get(_TEXT)
        if not policy.window or not spare or stream is None:
            return 0
        next_is_sink = self._bits.packed and stored < policy.sinks
        if next_is_sink or codes.count(_TEXT, -policy.window) < policy.window:
            return 0
        waiting = len(stream.slots) + 1 - policy.window
        if room := self._room(stream):
            is_own = self._allocators[self._bits].owners(stream.pages[-1]) == 1
            if waiting != 1 or not is_own:
                return 0
            # A shared slot cannot be passed on to the next token.
            if shared := self._allocators[PLAIN].count_shared(stream.slots):
                # Each token takes a spare slot instead; the arrays have room for window + 1.
                if len(spare) > policy.window + 1:
                    return 0
                steps = min(room, shared, len(spare))
                # The step that fills the page releases spare slots if there are too many.
                many = len(spare) - steps > self._max_spare(stream)
                return steps - 1 if steps == room and many else steps
            if len(spare) > 1:
                return 0
            first = self._allocators[PLAIN].first_shared(stream.slots)
            return room if first is None else min(room, first)
        # The sequence may have more tokens in 16-bit precision, and so more spare slots.
        if len(spare) > 1 + self._max_spare(stream):
            return 0
        if not self._bits.packed:
            return len(spare)
        # ``packed_count`` without room
        return min(len(spare), min_page_tokens(policy, self._bits) - waiting)

    def _max_spare(self, stream: ModalityTable) -> int:
        """Return ``max_spare`` when the stream's last page is full, from its own tokens alone."""
        to_page = self._begins_page_at - len(stream.slots) if stream.pages else 0
        return max_spare(len(stream.slots), 0, to_page)

    def _room(self, stream: ModalityTable) -> int:
        return room(stream, self._window_pages) if self._appends_tokens else 0

    def _free_index(self) -> int:
        """Return a free index; the arrays grow if there is none."""
        if not self.free:
            rows = len(self.counts)
            more = max(rows, _MIN_ROWS)
            self.free += range(rows, rows + more)
            for name in ("counts", "_left", "_head", "_page", "_first", "_text", "_slots"):
                array = getattr(self, name)
                setattr(self, name, grown(array, (rows + more, *array.shape[1:])))
            self._past = StoredTokens(
                *(grown(table, (rows + more, *table.shape[1:])) for table in self._past)
            )
        return self.free.pop()

    def _write_past(self, index: int, row: SequenceTable, more: int) -> None:
        """Write the stored tokens of a row, with capacity for ``more`` 16-bit tokens."""
        pages, slots = (np.array(x, np.int32) for x in row.entries(self._formats))
        items, recents, counts = self._past
        pages = pages.reshape(-1, 2)
        if len(pages) > items.shape[1]:
            items = grown(items, (len(items), 2 * len(pages), 2))
        if len(slots) + more > recents.shape[1]:
            recents = grown(recents, (len(recents), 2 * (len(slots) + more)))
        for table, values in ((items, pages), (recents, slots)):
            table[index, : len(values)], table[index, len(values) :] = values, 0
        counts[index] = len(slots), len(pages)
        self._past = StoredTokens(items, recents, counts)

    def plan(
        self, sequences: Sequence[SequenceTable], modalities: list[int], *, begins: bool
    ) -> SteadyStep | None:
        """Plan a step of the steady rows of a batch, without changing anything but how their tables
        are kept.

        Args:
            sequences: rows of the batch.
            modalities: modality of each row's new token.
            begins: whether rows may begin their steady steps.

        Returns:
            The step; None if no row is steady.
        """
        with self.lock:
            return self._plan(sequences, modalities, begins)

    def _plan(
        self, sequences: Sequence[SequenceTable], modalities: list[int], begins: bool
    ) -> SteadyStep | None:
        rows, found, left = list[int](), list[DeferredSteps](), self._left.tolist()
        for batch_row, (row, modality) in enumerate(zip(sequences, modalities, strict=True)):
            if modality != _TEXT:
                continue
            deferred = row.deferred
            if deferred is None or not left[deferred.index]:
                deferred = self._begin(row) if begins else None
            if deferred is not None:
                rows.append(batch_row)
                found.append(deferred)
        if not rows:
            return None
        indices = np.array([one.index for one in found])
        head, page, text = self._head[indices], self._page[indices], self._text[indices]
        text[:, [0, 3]] += self.counts[indices, None]
        text[:, 1] += np.where(page >= 0, 0, self.counts[indices])
        # A row that packs tokens takes the spare slot, which comes after those of the window.
        window = self._policy.window
        return SteadyStep(
            rows=np.array(rows),
            deferred=found,
            indices=indices,
            counts=self.counts[indices],
            slots=self._slots[indices, head + window * (page >= 0)],
            sources=np.where(page >= 0, self._slots[indices, head], -1),
            pages=page,
            first=self._first[indices],
            bits=self._bits,
            past=self._past_of(indices),
            text=text,
        )

    def _past_of(self, indices: np.ndarray) -> StoredTokens:
        items, recents, lengths = self._past
        lengths = lengths[indices]
        in_16_bit, in_pages = lengths.max(0).tolist()
        return StoredTokens(items[indices, :in_pages], recents[indices, :in_16_bit], lengths)

    def holds(self, step: SteadyStep, sequences: Sequence[SequenceTable]) -> bool:
        """Return whether a planned step still comes next for its rows of these sequences.

        The caller holds ``lock``.
        """
        if [sequences[row].deferred for row in step.rows.tolist()] != step.deferred:
            return False
        return bool((self.counts[step.indices] == step.counts).all())

    def take(self, step: SteadyStep) -> None:
        """Add a planned step that ``holds``; the caller holds ``lock``."""
        indices = step.indices
        self.counts[indices] += 1
        self._left[indices] -= 1
        self._head[indices] += 1
        items, recents, lengths = self._past
        packs = step.sources >= 0
        window, packing, others = self._policy.window, indices[packs], indices[~packs]
        recents[others, lengths[others, 0]] = step.slots[~packs]
        lengths[others, 0] += 1
        if len(packing):
            self._head[packing] %= window + 1
            self._first[packing] += 1
            items[packing, lengths[packing, 1] - 1, 1] += 1
            columns = lengths[packing, :1] + np.arange(-window, 0)
            in_use = sliding_window_view(self._slots, window, 1)[packing, self._head[packing]]
            recents[packing[:, None], columns] = in_use
