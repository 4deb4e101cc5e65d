"""Tables of a decode step: where every stored token is, and which thread block attends to what.

Made on the host once a step and used by all layers of a device. ``csrc/decode.cu`` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from oscar_mm.cache.layout import BLOCK_TOKENS
from oscar_mm.cache.sequence import Sequence
from oscar_mm.cache.stream import Stream

COLUMNS = 8
"""Query columns (tokens x query heads of a KV head) that a thread block takes at once."""
FEWEST_ITEMS = 8
"""Of a thread block, where a segment has that many: its warps take one each at a time, and adding
up the parts of many thread blocks takes longer."""
_HALF = BLOCK_TOKENS // 2
SECOND = 1 << 16
"""Set in a page's entry if the page is of the second bit width."""
FIELDS = 16  # 32-bit words of an Assignment in csrc/decode.cu, padding included


@dataclass(frozen=True)
class Tables:
    """Tables on a device, all int32.

    Attributes:
        items: (batch, longest, 2): for each sequence the halves of its 16-bit blocks,
            {2 * block + half, tokens}, then its pages, {slot, stop + 256 * start + second bit width
            flag}, of which tokens start to stop - 1 are in use.
        counts: (batch, 2): halves and pages.
        assignments: (thread blocks, 16).
    """

    items: torch.Tensor
    counts: torch.Tensor
    assignments: torch.Tensor

    @classmethod
    def within(cls, whole: torch.Tensor, arrays: tuple[np.ndarray, ...]) -> Tables:
        """Views of a tensor that holds ``laid_out(arrays)``."""
        parts = whole.split([array.size for array in arrays])
        assignments, items, counts = (
            part.view(array.shape) for part, array in zip(parts, arrays, strict=True)
        )
        return cls(items, counts, assignments)


def tables_of(
    sequences: SequenceOf[Sequence],
    bits: tuple[int, int | None],
    kv_heads: int,
    columns: int,
    workers: int,
    device: torch.device,
) -> Tables:
    """Tables for attention over what sequences hold.

    Args:
        sequences: as they are before the step.
        bits: first and second bit width of pages.
        kv_heads: KV heads of a layer.
        columns: query tokens times query heads of a KV head.
        workers: thread blocks, as many as the device runs at a time.
    """
    arrays = arrays_of(sequences, bits, kv_heads, columns, workers)
    # One copy to the device instead of three.
    return Tables.within(upload(laid_out(arrays), device), arrays)


def upload(table: np.ndarray, device: torch.device) -> torch.Tensor:
    """A table on a device; the host does not wait for the device's work before it."""
    tensor = torch.from_numpy(table)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def laid_out(arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    """All of ``arrays_of`` in one row."""
    return np.concatenate([array.ravel() for array in arrays])


def arrays_of(
    sequences: SequenceOf[Sequence],
    bits: tuple[int, int | None],
    kv_heads: int,
    columns: int,
    workers: int,
    longest: int = 1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assignments, items and counts of ``Tables``, on the host.

    Assignments come first: they are read 16 bytes at a time.

    Args:
        sequences, bits, kv_heads, columns, workers: as of ``tables_of``.
        longest: the least length of the items' second dimension.
    """
    rows = [_entries(sequence, bits) for sequence in sequences]
    counts = np.array([[len(halves), len(pages)] for halves, pages in rows], dtype=np.int32)
    longest = max(1, longest, int(counts.sum(axis=1).max()))
    items = np.zeros((len(rows), longest, 2), dtype=np.int32)
    for row, (halves, pages) in enumerate(rows):
        items[row, : len(halves)] = halves
        items[row, len(halves) : len(halves) + len(pages)] = pages
    assignments = assign(tuple(map(tuple, counts.tolist())), kv_heads, columns, workers)
    return assignments, items, counts


def _entries(sequence: Sequence, bits: tuple[int, int | None]) -> tuple[np.ndarray, np.ndarray]:
    """Halves and pages of a sequence, (n, 2) each."""
    halves, pages = [np.zeros((0, 2), np.int32)], [np.zeros((0, 2), np.int32)]
    for stream in sequence.streams.values():
        if stream.tail:
            halves.append(_halves(stream))
        if stream.pages:
            entries = stream.entries()
            second = np.array([0, SECOND if stream.bits == bits[1] else 0], np.int32)
            pages.append(entries + second)
    return np.concatenate(halves), np.concatenate(pages)


def _halves(stream: Stream) -> np.ndarray:
    """(n, 2) int32 of the 16-bit blocks of a stream."""
    count = -(-stream.tail // _HALF)
    halves = np.empty((count, 2), dtype=np.int32)
    blocks = np.asarray(stream.blocks[: -(-count // 2)], dtype=np.int32)
    halves[::2, 0] = 2 * blocks
    halves[1::2, 0] = 2 * blocks[: count // 2] + 1
    halves[:, 1] = _HALF
    halves[-1, 1] = stream.tail - (count - 1) * _HALF
    return halves


@lru_cache(maxsize=64)
def assign(
    counts: tuple[tuple[int, int], ...], kv_heads: int, columns: int, workers: int
) -> np.ndarray:
    """Share the line of items out to thread blocks: (workers, 16) int32, see csrc/decode.cu.

    With no more segments than thread blocks each thread block works on one segment, and segments
    get thread blocks by their length. Otherwise all get equal parts of the line.
    """
    column_tiles = -(-columns // COLUMNS)
    per_sequence = kv_heads * column_tiles
    lengths = np.repeat([1 + halves + pages for halves, pages in counts], per_sequence)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    total = int(starts[-1])
    if total * workers >= 1 << 31:
        raise ValueError(f"{total} items are more than one launch can share out")
    table = np.zeros((workers, FIELDS), dtype=np.int32)

    def fill(worker: int, begin: int, end: int, segment: int, first: int, parts: int) -> None:
        sequence, within = divmod(segment, per_sequence)
        head, column_tile = divmod(within, column_tiles)
        halves, pages = counts[sequence]
        table[worker, :13] = (
            *(begin, end, total, min(workers, total), sequence, head, column_tile, segment),
            *(starts[segment], halves, pages, first, parts),
        )

    if len(lengths) <= workers:
        first = 0
        for segment, parts in enumerate(_shares(lengths, workers)):
            start, length = int(starts[segment]), int(lengths[segment])
            for part in range(parts):
                begin, end = start + length * part // parts, start + length * (part + 1) // parts
                fill(first + part, begin, end, segment, first, parts)
            first += parts
    else:
        used = min(workers, total)
        for worker in range(used):
            begin, end = total * worker // used, total * (worker + 1) // used
            segment = int(np.searchsorted(starts, begin, side="right")) - 1
            fill(worker, begin, end, segment, 0, 0)
    return table


def _shares(lengths: np.ndarray, workers: int) -> list[int]:
    """Thread blocks for each segment: at least one, no more than have enough to do, the longest
    part minimal."""
    shares, most = np.ones(len(lengths), dtype=np.int64), -(-lengths // FEWEST_ITEMS)
    for _ in range(workers - len(lengths)):
        load = np.where(shares < most, lengths / shares, 0.0)
        longest = int(load.argmax())
        if not load[longest]:
            break
        shares[longest] += 1
    return shares.tolist()
