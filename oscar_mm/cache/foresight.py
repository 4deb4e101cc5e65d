"""Foresight: the slots that new tokens will take, told before any of them comes.

What ``Ledger.advance`` does to the tokens of a prompt, and then to those of its answer one by one,
as formulas over the length of the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from oscar_mm.cache.layout import BLOCK_TOKENS, PAGE_TOKENS
from oscar_mm.cache.sequence import SINK, Sequence
from oscar_mm.cache.stream import Stream
from oscar_mm.modality import PADDING, Modality
from oscar_mm.policy import KVPolicy

_BLOCKS_PER_PAGE = PAGE_TOKENS // BLOCK_TOKENS


@dataclass(frozen=True, eq=False)
class Growth:
    """Slots by bit width (16: blocks) after 0, 1, 2, ... tokens of the answer.

    Attributes:
        held: all that the sequence has then.
        added: without those that it had before and still has. What it had before is not given
            back meanwhile, as a turn goes on from a fork.
    """

    held: dict[int, np.ndarray]
    added: dict[int, np.ndarray]

    @staticmethod
    def together(rows: Iterable[Growth]) -> Growth:
        """Of the rows of a batch, in which a row whose answer has ended stays as it is."""
        rows = list(rows)
        steps = max(len(next(iter(row.held.values()))) for row in rows)

        def total(slots: Iterable[dict[int, np.ndarray]]) -> dict[int, np.ndarray]:
            found: dict[int, np.ndarray] = {}
            for row in slots:
                for bits, counts in row.items():
                    longer = np.pad(counts, (0, steps - len(counts)), mode="edge")
                    found[bits] = found.get(bits, 0) + longer
            return found

        return Growth(total(row.held for row in rows), total(row.added for row in rows))


def bytes_over_time(slots: Mapping[int, np.ndarray], slot_bytes: Mapping[int, int]) -> np.ndarray:
    """Bytes after 0, 1, 2, ... tokens of the answer.

    Args:
        slots: by bit width, as of ``Growth``.
        slot_bytes: of one slot, by bit width.
    """
    sizes = [counts.astype(np.int64) * slot_bytes[bits] for bits, counts in slots.items()]
    return np.sum(sizes, axis=0)


def pool_bytes(slots: Mapping[int, np.ndarray], slot_bytes: Mapping[int, int]) -> int:
    """Bytes by which pools without free slots grow; unlike slots they do not shrink meanwhile.

    Arguments as of ``bytes_over_time``.
    """
    total = 0
    for bits, counts in slots.items():
        first, most = int(counts[0]), int(counts.max())
        # As ``SlotAllocator`` grows: the prompt takes what it needs, an answer a bit in advance.
        total += slot_bytes[bits] * (most if most == first else most + most // 32)
    return total


def foreseen(
    policy: KVPolicy, new: np.ndarray, answer: int, past: Sequence | None = None
) -> Growth:
    """What one sequence will take.

    Args:
        policy: how keys and values are stored.
        new: (tokens,) modality ids of a prompt; padding, -1, is left out.
        answer: tokens of text that are stored after it.
        past: what the sequence holds before.
    """
    past = Sequence() if past is None else past
    codes = new[new != PADDING].astype(np.uint8)
    sinks = max(0, policy.sinks - past.stored)
    packs = np.array([policy.bits_for(modality) < 16 for modality in Modality])
    codes[:sinks] += (SINK * packs[codes[:sinks]]).astype(np.uint8)
    # Of the answer, in the 16-bit stream of the sinks and in the usual one.
    time = np.arange(answer + 1)
    left = max(0, sinks - len(codes)) if packs[Modality.TEXT] else 0
    said = {int(Modality.TEXT): np.maximum(time - left, 0)}
    said[Modality.TEXT + SINK] = np.minimum(time, left)
    recent = np.concatenate([past.recent(policy.window), codes])
    recent = recent[len(recent) - min(policy.window, len(recent)) :]
    held = {bits: np.zeros(answer + 1, np.int64) for bits in {*policy.bits, 16}}
    added = {bits: np.zeros(answer + 1, np.int64) for bits in held}
    for code in sorted({*past.streams, *np.unique(codes).tolist(), *said}):
        modality = Modality(code % SINK)
        bits = 16 if code >= SINK else policy.bits_for(modality)
        stream = past.streams.get(code) or Stream(modality, bits)
        grown = int((codes == code).sum()) + said.get(code, np.zeros_like(time))
        total = stream.tail + grown
        pages = np.zeros_like(time)
        if bits < 16:
            in_window = _in_window(recent, code, time, policy.window)
            if code == Modality.TEXT:
                in_window = in_window + np.minimum(said[code], np.minimum(time, policy.window))
            pages = np.maximum(total - in_window, 0) // PAGE_TOKENS
            held[bits] += len(set(stream.pages)) + pages
            added[bits] += pages
        blocks = -(-(total - pages * PAGE_TOKENS) // BLOCK_TOKENS)
        # Blocks of the past that are still in use; one that is not full is copied when it grows.
        kept = np.maximum(len(stream.blocks) - _BLOCKS_PER_PAGE * pages, 0)
        kept -= (kept > 0) & (stream.tail % BLOCK_TOKENS > 0) & (grown > 0)
        held[16] += blocks
        added[16] += blocks - kept
    return Growth(held, added)


def _in_window(recent: np.ndarray, code: int, time: np.ndarray, window: int) -> np.ndarray:
    """How many of the tokens before the answer are of a stream and in the window still."""
    # By how many of the last ones are looked at, from none to all.
    counts = np.concatenate([[0], (recent[::-1] == code).cumsum()])
    return counts[(window - time).clip(0, len(recent))]
