"""Slot growth: the rules by which tokens take slots, and the slots that a request will take.

``Advance`` follows the rules with the tokens of a prompt, and then with those of its answer
one by one; ``slot_growth`` tells the result beforehand, by formulas over the length of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from oscar_mm.cache.rows import SINK, Row, Stream
from oscar_mm.modality import PADDING, Modality
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import PLAIN, Bits, KVPolicy

Count = TypeVar("Count", int, np.ndarray)
_MOST_SPARE = 32


def packed_of(policy: KVPolicy, bits: Bits, waiting: Count, *, begun: bool) -> Count:
    """How many of a stream's tokens that have left the window are packed.

    A stream page takes any number. The first one begins when so many wait that it takes no more
    bytes than they do in 16 bit.

    Args:
        waiting: tokens of the stream that are in 16 bit and not in the window; of an array each
            number by itself.
        begun: whether the stream has a page.
    """
    if bits == PLAIN:
        return waiting * 0
    if not policy.by_token:
        return waiting // PAGE_TOKENS * PAGE_TOKENS
    return waiting * (begun | (waiting >= first_page_tokens(bits)))


def most_spare(policy: KVPolicy, bits: Bits, in_16_bit: int, *, begun: bool) -> int:
    """Slots of 16 bit that a sequence may have to spare when a decode step brings it a token.

    One, where a token leaves its slot to the next. Else so many are asked for at once, as nobody
    else can take them from a step that was launched ahead, and pools grow seldom; few next to the
    tokens that the sequence has in 16 bit.

    Args:
        bits: of the token's stream.
        in_16_bit: tokens that the sequence has there.
        begun: whether the stream has a page.
    """
    if begun and bits.packed and policy.by_token:
        return 1
    return min(max(1, in_16_bit // 4), _MOST_SPARE)


def first_page_tokens(bits: Bits) -> int:
    """Tokens that in 16 bit take as much as a page of 128: 4 for each bit of keys and of values,
    and 8 for scales, zeros and center (of head_dim 64, less of larger ones)."""
    return PAGE_TOKENS * (bits.keys + bits.values + 2) // 32


@dataclass(frozen=True, eq=False)
class Growth:
    """Slots of a sequence after 0, 1, 2, ... tokens of the answer, by bits (``PLAIN``:
    tokens in 16 bit).

    Attributes:
        held: all slots that the sequence has then.
        added: slots that it has taken by then. What it had before is not given back meanwhile, as a
            turn goes on from a fork.
    """

    held: dict[Bits, np.ndarray]
    added: dict[Bits, np.ndarray]


def bytes_over_time(slots: Mapping[Bits, np.ndarray], slot_bytes: Mapping[Bits, int]) -> np.ndarray:
    """Bytes after 0, 1, 2, ... tokens of the answer.

    Args:
        slots: of a ``Growth``, by bits.
        slot_bytes: of one slot, by bits.
    """
    sizes = [counts.astype(np.int64) * slot_bytes[bits] for bits, counts in slots.items()]
    return np.sum(sizes, axis=0)


def pool_bytes(slots: Mapping[Bits, np.ndarray], slot_bytes: Mapping[Bits, int]) -> int:
    """Bytes by which pools without free slots grow; unlike slots they do not shrink meanwhile.

    Args:
        slots: of a ``Growth``, by bits.
        slot_bytes: of one slot, by bits.
    """
    total = 0
    for bits, counts in slots.items():
        first, most = int(counts[0]), int(counts.max())
        # As ``SlotAllocator`` grows: the prompt takes what it needs, an answer a bit in advance.
        total += slot_bytes[bits] * (most if most == first else most + most // 32)
    return total


def slot_growth(policy: KVPolicy, new: np.ndarray, answer: int, past: Row | None = None) -> Growth:
    """The slots that one sequence will take.

    Args:
        policy: how keys and values are stored.
        new: (tokens,) modality ids of a prompt; padding, -1, is left out.
        answer: tokens of text that are stored after it.
        past: what the sequence holds before.
    """
    past = Row() if past is None else past
    codes = new[new != PADDING].astype(np.uint8)
    sinks = max(0, policy.sinks - past.stored)
    packs = np.array([policy.bits_for(modality).packed for modality in Modality])
    codes[:sinks] += (SINK * packs[codes[:sinks]]).astype(np.uint8)
    # Of the answer, in the 16-bit stream of the sinks and in the usual one.
    time = np.arange(answer + 1)
    left = max(0, sinks - len(codes)) if packs[Modality.TEXT] else 0
    said = {int(Modality.TEXT): np.maximum(time - left, 0)}
    said[Modality.TEXT + SINK] = np.minimum(time, left)
    recent = np.concatenate([np.frombuffer(past.recent(policy.window), np.uint8), codes])
    recent = recent[len(recent) - min(policy.window, len(recent)) :]
    held = {bits: np.zeros(answer + 1, np.int64) for bits in (*policy.packed_bits, PLAIN)}
    added = {bits: np.zeros(answer + 1, np.int64) for bits in held}
    # All that are packed, and those of them whose slots no past has.
    all_packed, own_packed = np.zeros_like(time), np.zeros_like(time)
    pages: dict[int, np.ndarray] = {}
    for code in sorted({*past.streams, *np.unique(codes).tolist(), *said}):
        modality = Modality(code % SINK)
        bits = PLAIN if code >= SINK else policy.bits_for(modality)
        stream = past.streams.get(code) or Stream(modality, bits)
        grown = int((codes == code).sum()) + said.get(code, np.zeros_like(time))
        total, packed = len(stream.slots) + grown, np.zeros_like(time)
        if bits.packed:
            in_window = _in_window(recent, code, time, policy.window)
            if code == Modality.TEXT:
                in_window = in_window + np.minimum(said[code], np.minimum(time, policy.window))
            waiting = np.maximum(total - in_window, 0)
            packed = packed_of(policy, bits, waiting, begun=bool(stream.pages))
            room = stream.room if policy.by_token else 0
            begun = -(-np.maximum(packed - room, 0) // PAGE_TOKENS)
            held[bits] += len(set(stream.pages)) + begun
            pages[code] = len(stream.pages) + begun
            # The page whose room is filled is copied first.
            added[bits] += begun + ((packed > 0) & (room > 0))
        all_packed += packed
        own_packed += np.maximum(packed - len(stream.slots), 0)
        held[PLAIN] += total - packed
        added[PLAIN] += total - packed - np.maximum(len(stream.slots) - packed, 0)
    # Spare slots; a prompt of one token comes as the tokens of the answer do.
    steps = [(int(codes[0]), 0)] if len(new) == len(codes) == 1 else []
    steps += [(int(Modality.TEXT), step) for step in range(1, answer + 1)]
    before, packed, own = (
        np.concatenate([[first], counts])
        for first, counts in ((past.in_16_bit, held[PLAIN]), (0, all_packed), (0, own_packed))
    )
    spare, found = 0, np.zeros_like(time)
    for code, step in steps:
        begun = bool(pages[code][step]) if code in pages else False
        bits = PLAIN if code >= SINK else policy.bits_for(Modality(code))
        most = most_spare(policy, bits, int(before[step]), begun=begun)
        # Without a window the new token is among those that are packed.
        is_packed = policy.window == 0 and packed[step + 1] > packed[step]
        if not is_packed:
            spare = (spare or most) - 1
        emptied = max(0, int(own[step + 1] - own[step]) - is_packed)
        found[step] = spare = min(spare + emptied, most)
    for slots in (held[PLAIN], added[PLAIN]):
        slots += found
    return Growth(held, added)


def _in_window(recent: np.ndarray, code: int, time: np.ndarray, window: int) -> np.ndarray:
    """How many of the tokens before the answer are of a stream and in the window still."""
    # By how many of the last ones are looked at, from none to all.
    counts = np.concatenate([[0], (recent[::-1] == code).cumsum()])
    return counts[(window - time).clip(0, len(recent))]
