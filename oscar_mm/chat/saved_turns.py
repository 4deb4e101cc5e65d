"""Checks that the turns and media of a saved chat match its tokens, positions and tables.

If a file was altered and its checksum recomputed, these checks cannot detect changes to keys,
values or texts.
"""

from __future__ import annotations

import re

import numpy as np
import torch

from oscar_mm.cache.block_table import NOWHERE, SINK
from oscar_mm.chat.conversation import Conversation
from oscar_mm.engine.family import Family
from oscar_mm.modality import Modality
from oscar_mm.policy import KVPolicy

_REASONS = ("stop", "tool_calls", "length", "interrupted")
_DIGEST = re.compile("[0-9a-f]{64}")
_SUMS, _SUM_BITS = 64, 1 << 16
"""Limits up to which positions are checked exactly: number of media in a turn, and size of the
range of positions that they may take."""


def check_turns(
    conversation: Conversation, codes: np.ndarray, policy: KVPolicy, family: Family
) -> None:
    """Raise ValueError if the turns contradict token ids, positions or the tables of the cache.

    Args:
        conversation: conversation with consecutive turns; its cache is not needed.
        codes: (tokens,) uint8 stream codes of the cache.
        policy: policy of the cache.
        family: model family, which defines the modalities of token ids and the positions of media.
    """
    ids = conversation.token_ids
    found = family.modalities_of(ids)[0]
    family.mark_frames(found, [span for turn in conversation.turns for span in turn.media])
    by_ids = found.numpy()
    stored = codes != NOWHERE
    kinds = np.where(stored, codes % SINK, by_ids).astype(np.int8)
    if not np.array_equal(_forgotten(conversation), ~stored):
        raise ValueError("its turns and its cache disagree on forgotten tokens")
    media = kinds != Modality.TEXT
    if (kinds[media] != by_ids[media]).any():
        raise ValueError("its tokens and its cache disagree on modalities")
    if int((stored & (codes >= SINK)).sum()) > policy.sinks:
        raise ValueError(f"its cache has more than {policy.sinks} sinks")
    _check_media(conversation, kinds)
    _check_positions(conversation, kinds, family)
    _check_pending(conversation, family)
    for turn in conversation.turns:
        if turn.finish_reason not in _REASONS:
            raise ValueError(f"a turn has the unknown finish_reason {turn.finish_reason[:40]!r}")


_WITHIN = {Modality.IMAGE: {Modality.TEXT}, Modality.VIDEO: {Modality.TEXT, Modality.AUDIO}}
"""Modalities of further tokens within a media item: ends of rows, timestamps, sound."""


def _forgotten(conversation: Conversation) -> np.ndarray:
    """Return (tokens,) bool: whether each token is forgotten according to the turns."""
    found = np.zeros(conversation.tokens, dtype=bool)
    for turn in conversation.turns:
        for span, forgotten in zip(turn.media, turn.forgotten, strict=True):
            found[span.start : span.stop] |= forgotten
    return found


def _check_media(conversation: Conversation, kinds: np.ndarray) -> None:
    """Raise ValueError if the spans of media do not match the modalities of the tokens."""
    named = np.zeros(len(kinds), dtype=bool)
    for turn in conversation.turns:
        for span in turn.media:
            found = kinds[span.start : span.stop]
            named[span.start : span.stop] = True
            inside = set(np.unique(found).tolist())
            others = _WITHIN.get(span.modality, set())
            ends = found[0], found[-1]
            if Modality.TEXT in ends or not {span.modality} <= inside <= {span.modality, *others}:
                raise ValueError("the tokens of a media item have a different modality")
            if not _DIGEST.fullmatch(span.digest):
                raise ValueError("the digest of a media item is not valid")
    if (kinds[~named] != Modality.TEXT).any():
        raise ValueError("some media tokens of the cache belong to no media item")


def _check_positions(conversation: Conversation, kinds: np.ndarray, family: Family) -> None:
    """Raise ValueError if the turns' positions do not follow from the preceding tokens."""
    turns = conversation.turns
    places = [*(float(turn.position) for turn in turns), float(conversation.next_position)]
    if places[0] != 0:
        raise ValueError("its first position is not 0")
    for turn, place, following in zip(turns, places, places[1:], strict=False):
        if not _can_advance(family, kinds[turn.start : turn.stop], following - place):
            raise ValueError("its positions do not follow from its tokens")


def _can_advance(family: Family, kinds: np.ndarray, advance: float) -> bool:
    """Return whether tokens of these modalities can advance the position by ``advance``."""
    starts = np.flatnonzero(np.diff(kinds, prepend=-1))
    lengths = np.diff(starts, append=len(kinds))
    fixed, runs = 0, []
    pairs, counts = np.unique(np.stack([kinds[starts], lengths]), axis=1, return_counts=True)
    for (kind, length), count in zip(pairs.T.tolist(), counts.tolist(), strict=True):
        steps = family.position_steps(Modality(kind), length)
        if steps is None:
            # A media item of this kind may take any number of positions.
            return advance >= int((kinds == Modality.TEXT).sum())
        fixed, runs = fixed + count * steps[0], [*runs, (steps, count)]
    highest = fixed + sum(count * (steps[-1] - steps[0]) for steps, count in runs)
    if not fixed <= advance <= highest or advance != int(advance):
        return False
    if sum(count for steps, count in runs if len(steps) > 1) > _SUMS or highest - fixed > _SUM_BITS:
        return True
    sums = 1  # Bit i: the runs so far can take i positions more than the minimum.
    for steps, count in runs:
        for _ in range(count if len(steps) > 1 else 0):
            shifted = [sums << (step - steps[0]) for step in steps]
            sums = 0
            for one in shifted:
                sums |= one
    return bool(sums >> (int(advance) - fixed) & 1)


def _check_pending(conversation: Conversation, family: Family) -> None:
    """Raise ValueError if a turn does not begin with the end of the previous answer."""
    for index, turn in enumerate(conversation.turns):
        # ``next_prompt`` leaves out media placeholders, which a model should not write.
        pending = torch.tensor([turn.pending], dtype=torch.long)
        read = pending[family.modalities_of(pending) == Modality.TEXT]
        begin = conversation.token_ids[0, turn.start : turn.start + len(read)]
        if (index == 0 and len(read)) or not torch.equal(begin, read):
            raise ValueError("a turn does not begin with the end of the previous answer")
