"""Token counts of a turn by the sizes of its media, without running the model or its towers."""

from __future__ import annotations

from dataclasses import replace

import torch

from oscar_mm.generation.family import Family
from oscar_mm.media.media import Media, Medium
from oscar_mm.modality import Modality, token_modalities

_QUESTION = "?"
"""Stands for the question where only media are counted."""


def count_tokens(family: Family, media: Media) -> dict[str, int]:
    """Tokens by modality of a first turn with ``media`` and the shortest question.

    Raises:
        InputError: a medium that the family does not read.
    """
    counts = dict.fromkeys((modality.label for modality in Modality), 0)
    counts["text"] = text_tokens(family, media)
    for medium in media:
        for name, count in medium_tokens(family, medium).items():
            counts[name] += count
    return counts


def medium_tokens(family: Family, medium: Medium) -> dict[str, int]:
    """Tokens by modality that a medium brings into a turn.

    Sizes are enough: the family's estimate is exact for images and recordings, and for videos the
    processor runs on frames of the device meta.

    Raises:
        InputError: a medium that the family does not read.
    """
    family.check_reads([medium])
    if medium.modality is not Modality.VIDEO:
        return {medium.modality.label: family.least_tokens(medium)}
    alone = Media(videos=[replace(medium.content, sound=None)])
    text = family.render(family.messages(_QUESTION, None, alone))
    ids = family.encode(text, list(alone)).input_ids
    counts = torch.bincount(token_modalities(ids, config=family.model.config)[0].int())
    return {
        "video": int(counts[Modality.VIDEO]),
        # Timestamps between frames.
        "text": int(counts[Modality.TEXT]) - text_tokens(family, alone),
        "audio": family.least_tokens(medium),
    }


def text_tokens(
    family: Family, media: Media, prompt: str = _QUESTION, system: str | None = None
) -> int:
    """Tokens of text of a first turn as the chat template writes it.

    Raises:
        InputError: a medium that the family does not read.
    """
    text = family.render(family.messages(prompt, system, media))
    return family.tokenize(text).shape[1] - len(media)
