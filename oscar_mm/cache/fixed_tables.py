"""FixedTables: tables of decode steps at addresses that stay, where a replayed graph reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oscar_mm.cache.rows import Row
from oscar_mm.cache.step import Slots, Step
from oscar_mm.ops.decode_tables import Tables, arrays_of, laid_out, lengths_of
from oscar_mm.ops.store_torch import CENTER_TOKENS, HEAD, TILE
from oscar_mm.policy import Bits, KVPolicy

_LEAST = 64
"""Items, and tokens in 16 bit, that there is room for."""
_WRITES = "writes"


@dataclass
class _Kind:
    """Tables of all layers that attend in the same way."""

    make: Callable[[Sequence[Row], tuple[int, int]], tuple[np.ndarray, ...]]
    longest: tuple[int, int]
    whole: torch.Tensor
    tables: Tables

    @classmethod
    def with_room(
        cls,
        make: Callable[[Sequence[Row], tuple[int, int]], tuple[np.ndarray, ...]],
        past: Sequence[Row],
        device: torch.device,
    ) -> _Kind:
        """New tensors with room for twice the items, and twice the tokens in 16 bit."""
        items, recents = lengths_of(make(past, (1, 1)))
        longest = max(_LEAST, 2 * items), max(_LEAST, 2 * recents)
        arrays = make(past, longest)
        whole = torch.from_numpy(laid_out(arrays)).to(device, copy=True)
        return cls(make, longest, whole, Tables.within(whole, arrays))


class FixedTables:
    """The tables that ``Step`` would make anew for each step, in tensors that are written over.

    Layers ask for their tables during a forward pass; from then on ``refill`` writes what a later
    step needs into the same tensors.

    Args:
        rows: of the batch.
        policy: of the cache.

    Attributes:
        version: grows whenever a tensor had to be replaced, after which a graph that was captured
            before reads stale tables.
        packs_at_end: whether what is packed is in 16 bit at the end of the step, the new token too:
            in no window it is not.
    """

    def __init__(self, rows: int, policy: KVPolicy) -> None:
        self.rows, self.version, self._policy = rows, 0, policy
        self.packs_at_end = policy.by_token and policy.window > 0
        self._kinds: dict[Any, _Kind] = {}
        # Of a step's own tokens, by kind; and by kind and device what layers have asked for.
        self._tokens: dict[str, np.ndarray] = {}
        self._on_device: dict[tuple[str, torch.device], torch.Tensor] = {}

    @property
    def known(self) -> bool:
        """Whether layers have asked yet."""
        return bool(self._kinds)

    def refill(self, past: Sequence[Row]) -> None:
        """Write the tables of attention over the sequences before a step."""
        for key, kind in self._kinds.items():
            arrays = kind.make(past, kind.longest)
            if lengths_of(arrays) != kind.longest:
                self._kinds[key] = _Kind.with_room(kind.make, past, kind.whole.device)
                self.version += 1
            else:
                _write(kind.whole, laid_out(arrays))

    def refill_tokens(self, step: Step) -> None:
        """Write where a step, which ``takes`` accepts, puts its tokens and what it packs.

        Whole pages are not packed by tables. With ``packs_at_end`` a new token is named by its
        slot.
        """
        writes = np.full((self.rows, 3), -1, dtype=np.int32)
        if step.writes is not None:
            writes[: step.writes.shape[1]] = step.writes.T
        self._tokens[_WRITES] = writes
        written = {row: slot for row, _, slot in writes.tolist()} if self.packs_at_end else {}
        fillings = [
            one.after_write(written[one.row]) if one.row in written else one
            for one in step.fillings
        ]
        for bits in self._policy.packed_bits if self._policy.by_token else ():
            jobs = np.full((self.rows, HEAD + TILE), -1, dtype=np.int32)
            begins = np.full((self.rows, HEAD + CENTER_TOKENS), -1, dtype=np.int32)
            for filling in fillings:
                if filling.bits == bits:
                    jobs[filling.row] = filling.jobs()
                    if filling.begins:
                        begins[filling.row] = filling.beginnings()
            self._tokens[f"{bits} jobs"] = jobs
            self._tokens[f"{bits} begins"] = begins[: self.rows * self._policy.center]
        for (key, _), tensor in self._on_device.items():
            _write(tensor, self._tokens[key])

    def write(self, step: Step) -> None:
        """Write all tables of a step that ``takes`` accepts."""
        self.refill(step.past)
        self.refill_tokens(step)

    def takes(self, step: Step) -> bool:
        """Whether a step copies no page, and packs a token of each row at most; of a policy that
        packs whole pages, none of the new tokens."""
        if not self._policy.by_token:
            return not any((filling.source >= 0).any() for filling in step.fillings)
        if step.copies:
            return False
        rows = [filling.row for filling in step.fillings]
        return len(set(rows)) == len(rows) and all(len(one.source) == 1 for one in step.fillings)

    def tables(
        self,
        past: Sequence[Row],
        bits: tuple[Bits | None, Bits | None],
        kv_heads: int,
        columns: int,
        workers: int,
        device: torch.device,
    ) -> Tables:
        """``Step.tables`` of the step that ``refill`` has written."""
        key = (bits, kv_heads, columns, workers, device)
        if key not in self._kinds:

            def make(past: Sequence[Row], longest: tuple[int, int]) -> tuple[np.ndarray, ...]:
                entries = [row.entries(bits) for row in past]
                return arrays_of(entries, kv_heads, columns, workers, longest)

            self._kinds[key] = _Kind.with_room(make, past, device)
            self.version += 1
        return self._kinds[key].tables

    def writes(self, device: torch.device) -> torch.Tensor:
        """(rows, 3) int32 as ``oscar_mm.ops.append`` takes them, slot -1 for rows without."""
        return self._upload(_WRITES, device)

    def slots(self, device: torch.device) -> dict[Bits, Slots]:
        """``Step.slots_on``, with a line for each row and page -1 for rows without."""
        return {
            bits: Slots(*(self._upload(f"{bits} {kind}", device) for kind in ("jobs", "begins")))
            for bits in self._policy.packed_bits
        }

    def _upload(self, key: str, device: torch.device) -> torch.Tensor:
        if (key, device) not in self._on_device:
            self._on_device[key, device] = torch.from_numpy(self._tokens[key]).to(device, copy=True)
        return self._on_device[key, device]


def _write(target: torch.Tensor, table: np.ndarray) -> None:
    source = torch.from_numpy(table)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
