"""FixedTables: tables of decode steps at addresses that stay, for a graph that is replayed."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oscar_mm.cache.sequence import Sequence
from oscar_mm.cache.tables import Tables, arrays_of, laid_out

_LEAST_ITEMS = 64


@dataclass
class _Kind:
    """Tables of all layers that attend in the same way."""

    make: Callable[[SequenceOf[Sequence], int], tuple[np.ndarray, ...]]
    longest: int
    whole: torch.Tensor
    tables: Tables

    @classmethod
    def with_room(
        cls,
        make: Callable[[SequenceOf[Sequence], int], tuple[np.ndarray, ...]],
        past: SequenceOf[Sequence],
        device: torch.device,
    ) -> _Kind:
        """In new tensors with room for twice the items."""
        needed = make(past, 1)[1].shape[1]
        arrays = make(past, max(_LEAST_ITEMS, 2 * needed))
        whole = torch.from_numpy(laid_out(arrays)).to(device, copy=True)
        return cls(make, arrays[1].shape[1], whole, Tables.within(whole, arrays))


class FixedTables:
    """What ``Step`` would make anew for each step, in tensors that are written over instead.

    Layers ask for their tables while a forward pass runs, by which these become known;
    ``refill`` writes what the next step needs into the same tensors.

    Args:
        rows: of the batch.

    Attributes:
        version: grows whenever a tensor had to be replaced, after which a graph that was captured
            before reads stale tables.
    """

    def __init__(self, rows: int) -> None:
        self.rows, self.version = rows, 0
        self._kinds: dict[Any, _Kind] = {}
        self._writes: dict[torch.device, torch.Tensor] = {}
        self._table: np.ndarray | None = None

    @property
    def known(self) -> bool:
        """Whether layers have asked yet."""
        return bool(self._kinds)

    def refill(self, past: SequenceOf[Sequence]) -> None:
        """Write the tables of attention of a step that is to come: of sequences before it."""
        for key, kind in self._kinds.items():
            arrays = kind.make(past, kind.longest)
            if arrays[1].shape[1] > kind.longest:
                self._kinds[key] = _Kind.with_room(kind.make, past, kind.whole.device)
                self.version += 1
            else:
                _write(kind.whole, laid_out(arrays))

    def refill_writes(self, writes: np.ndarray | None) -> None:
        """Write where its tokens go: (4, n) of ``Step``; None for nowhere."""
        self._table = np.full((self.rows, 4), -1, dtype=np.int32)
        if writes is not None:
            self._table[: writes.shape[1]] = writes.T
        for tensor in self._writes.values():
            _write(tensor, self._table)

    def tables(
        self,
        past: SequenceOf[Sequence],
        bits: tuple[int, int | None],
        kv_heads: int,
        columns: int,
        workers: int,
        device: torch.device,
    ) -> Tables:
        """As ``oscar_mm.cache.tables.tables_of``, of the step that ``refill`` was told of."""
        key = (bits, kv_heads, columns, workers, device)
        if key not in self._kinds:

            def make(past: SequenceOf[Sequence], longest: int) -> tuple[np.ndarray, ...]:
                return arrays_of(past, bits, kv_heads, columns, workers, longest)

            self._kinds[key] = _Kind.with_room(make, past, device)
            self.version += 1
        return self._kinds[key].tables

    def writes(self, device: torch.device) -> torch.Tensor:
        """(rows, 4) int32 as ``oscar_mm.ops.append`` takes them, slot -1 for rows without."""
        if device not in self._writes:
            self._writes[device] = torch.from_numpy(self._table).to(device, copy=True)
        return self._writes[device]


def _write(target: torch.Tensor, table: np.ndarray) -> None:
    source = torch.from_numpy(table)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
