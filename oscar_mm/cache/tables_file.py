"""Conversion of a cache's tables to tensors in a file and back; every number read is checked."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from oscar_mm.cache.block_table import NOWHERE, SINK, ModalityTable, SequenceTable, SlotSet
from oscar_mm.cache.checked_file import Kind
from oscar_mm.cache.kv_manager import KVCacheManager
from oscar_mm.modality import Modality
from oscar_mm.ops.decode_tables import INT32
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import PLAIN, Bits, KVPolicy

_MAX_ROWS, _MAX_TOKENS = 4096, 1 << 25


@dataclass
class SavedTables:
    """Tables of a cache's sequences, with slots numbered from 0, as they are stored in a file.

    ``oscar_mm.cache.saved_cache`` describes the arrays.

    Attributes:
        counts: bits -> number of slots of that kind.
    """

    KINDS: ClassVar = {
        "codes": ("U8", None),
        "streams": ("I64", 4),
        "entries": ("I32", 3),
        "recent": ("I32", None),
    }
    """Dtype and number of columns of each array."""

    policy: KVPolicy
    codes: np.ndarray
    streams: np.ndarray
    entries: np.ndarray
    recent: np.ndarray
    counts: dict[Bits, int]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the arrays by name, as tensors to save."""
        return {name: torch.from_numpy(getattr(self, name)) for name in self.KINDS}

    @classmethod
    def check_kinds(cls, kinds: Mapping[str, Kind]) -> None:
        """Check the dtypes, shapes and counts of a file's tensors before any tensor is read.

        Raises:
            KeyError, ValueError: if they are not the tables of a cache.
        """
        for name, (dtype, width) in cls.KINDS.items():
            found = kinds[name]
            if found.dtype != dtype or len(found.shape) != 2 - (name == "recent"):
                raise ValueError(
                    f"{name} has unexpected shape {found.shape} or dtype {found.dtype}"
                )
            if width and found.shape[1] != width:
                raise ValueError(f"{name} has shape {found.shape}; it must have {width} columns")
        rows, length = kinds["codes"].shape
        if rows > _MAX_ROWS or length > _MAX_TOKENS or (rows and not length):
            raise ValueError(
                f"its tables have {rows} rows of {length} tokens, which is not a valid size"
            )
        limits = {"streams": 2 * SINK * rows, "entries": rows * length, "recent": rows * length}
        for name, count in limits.items():
            if kinds[name].shape[0] > count:
                raise ValueError(
                    f"it has {kinds[name].shape[0]} {name}, too many for {rows} rows of {length} "
                    "tokens"
                )

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor], policy: KVPolicy) -> SavedTables:
        """Create the tables from a file's tensors, whose kinds have been checked.

        Raises:
            ValueError: if they are not the tables of a cache.
        """
        arrays = {name: tensors[name].numpy() for name in cls.KINDS}
        tables = cls(policy, **arrays, counts={})
        tables._check_streams()
        tables.counts = tables._checked_counts()
        return tables

    def _parts(self) -> list[tuple[int, ModalityTable]]:
        """Return (row, stream) for every line of ``streams``."""
        parts, entry, slot = [], 0, 0
        for row, code, entries, count in self.streams.tolist():
            modality = Modality(code % SINK)
            bits = PLAIN if code >= SINK else self.policy.bits_for(modality)
            pages, starts, stops = map(tuple, self.entries[entry : entry + entries].T.tolist())
            slots = array(INT32, self.recent[slot : slot + count].tolist())
            parts.append((row, ModalityTable(modality, bits, pages, starts, stops, slots)))
            entry, slot = entry + entries, slot + count
        return parts

    def _check_streams(self) -> None:
        """Check that the counts of all streams are in range and match the codes."""
        rows, length = self.codes.shape
        if not np.isin(self.codes, [*range(2 * SINK), NOWHERE]).all():
            raise ValueError("codes contains unknown stream codes")
        row, code, entries, recent = self.streams.T
        limits = ((row, rows), (code, 2 * SINK), (entries, length + 1), (recent, length + 1))
        if any(((column < 0) | (column >= limit)).any() for column, limit in limits):
            raise ValueError("a row, code or count of a stream is out of range")
        keys = row * 2 * SINK + code
        if len(np.unique(keys)) < len(keys):
            raise ValueError("streams contains a stream twice")
        if entries.sum() != len(self.entries) or recent.sum() != len(self.recent):
            raise ValueError(
                "the slots counted in streams and the slots in the file differ in number"
            )
        page, start, stop = self.entries.T
        if ((start < 0) | (start >= stop) | (stop > PAGE_TOKENS)).any():
            raise ValueError("the used tokens of a page are out of range")
        stream = np.repeat(np.arange(len(entries)), entries)
        order = np.lexsort((start, page, stream))
        before, after = order[:-1], order[1:]
        same = (stream[before] == stream[after]) & (page[before] == page[after])
        if (same & (stop[before] > start[after])).any():
            raise ValueError("a stream uses tokens of a page twice")
        used = np.concatenate([[0], np.cumsum(stop - start, dtype=np.int64)])
        last = np.cumsum(entries)
        stored = np.zeros((rows, 256), dtype=np.int64)
        stored[row, code] = used[last] - used[last - entries] + recent
        for index, codes in enumerate(self.codes):
            stored[index, NOWHERE] = (codes == NOWHERE).sum()
            if (np.bincount(codes, minlength=256) != stored[index]).any():
                raise ValueError(
                    f"row {index}: codes and streams count different numbers of tokens"
                )

    def _checked_counts(self) -> dict[Bits, int]:
        """Check that slot ids start at 0 without gaps, and return bits -> number of slots."""
        named: dict[Bits, set[int]] = {bits: set() for bits in (*self.policy.packed_bits, PLAIN)}
        for _, stream in self._parts():
            if stream.pages and stream.bits == PLAIN:
                raise ValueError("a 16-bit stream has pages")
            if len(set(stream.slots)) < len(stream.slots):
                raise ValueError("a stream uses a slot twice")
            named[stream.bits].update(stream.pages)
            named[PLAIN].update(stream.slots)
        for bits, slots in named.items():
            if slots and (min(slots), max(slots)) != (0, len(slots) - 1):
                raise ValueError(f"the {bits}-bit slots are not numbered from 0 without gaps")
        return {bits: len(slots) for bits, slots in named.items()}

    def places_in_use(self) -> dict[Bits, np.ndarray]:
        """Return bits -> (pages, 128) bool: whether each token of a page is part of a stream."""
        used = {
            bits: np.zeros((count, PAGE_TOKENS), dtype=bool)
            for bits, count in self.counts.items()
            if bits.packed
        }
        for _, stream in self._parts():
            for page, start, stop in zip(stream.pages, stream.starts, stream.stops, strict=True):
                used[stream.bits][page, start:stop] = True
        return used

    def sequences(self, slots: dict[Bits, list[int]]) -> list[SequenceTable]:
        """Return the sequences with new slots: slot number i becomes ``slots[bits][i]``."""
        made = [SequenceTable(bytearray(codes.tobytes())) for codes in self.codes]
        for (row, stream), code in zip(self._parts(), self.streams[:, 1].tolist(), strict=True):
            stream.pages = tuple(slots[stream.bits][page] for page in stream.pages)
            stream.slots = array(INT32, [slots[PLAIN][slot] for slot in stream.slots])
            made[row].streams[code] = stream
            made[row].stored += stream.tokens
        return made


def renumbered(kv_manager: KVCacheManager) -> tuple[SavedTables, dict[Bits, list[int]]]:
    """Return the tables of a KV cache manager with slots renumbered from 0, and bits -> old slot
    ids in the order of their new numbers."""
    rows = kv_manager.sequences if kv_manager.length else []
    stored = SlotSet.of(stream for row in rows for stream in row.streams.values())
    slots = {bits: stored.slots(bits) for bits in kv_manager.allocators}
    numbers = {bits: {slot: n for n, slot in enumerate(ids)} for bits, ids in slots.items()}

    def number(bits: Bits, ids: Iterable[int]) -> list[int]:
        return [numbers[bits][slot] for slot in ids]

    streams, entries, recent = [], [np.empty((0, 3), np.int32)], []
    for row, sequence in enumerate(rows):
        for code, stream in sequence.streams.items():
            streams.append((row, code, len(stream.pages), len(stream.slots)))
            columns = number(stream.bits, stream.pages), stream.starts, stream.stops
            entries.append(np.array(columns, dtype=np.int32).T)
            recent += number(PLAIN, stream.slots)
    codes = b"".join(bytes(sequence.codes) for sequence in rows)
    tables = SavedTables(
        kv_manager.policy,
        np.frombuffer(bytearray(codes), np.uint8).reshape(len(rows), kv_manager.length),
        np.array(streams, dtype=np.int64).reshape(-1, 4),
        np.ascontiguousarray(np.concatenate(entries)),
        np.array(recent, dtype=np.int32),
        {bits: len(ids) for bits, ids in slots.items()},
    )
    return tables, slots
