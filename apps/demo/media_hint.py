"""Hints about media that a question names by number but that the model cannot see."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oscar_mm.apps.demo.transcript import KINDS, counted
from oscar_mm.modality import Modality

if TYPE_CHECKING:
    from oscar_mm.chat.chat import Segment

_WORDS = {
    "picture": Modality.IMAGE,
    "image": Modality.IMAGE,
    "video": Modality.VIDEO,
    "clip": Modality.AUDIO,
    "recording": Modality.AUDIO,
}
_NAMED = re.compile(
    rf"\b({'|'.join(_WORDS)})s?\s+((?:\d{{1,6}}(?:,? and |, ?| & )?)+)", re.IGNORECASE
)


def media_hint(question: str, segments: Sequence[Segment]) -> str:
    """Return a sentence about each named medium that was forgotten or never shown, or "".

    Args:
        question: text such as "Add the sums of pictures 2, 7 and 9."
        segments: all segments of the conversation; media are numbered by modality, from 1.
    """
    hints: list[str] = []
    for word, numbers in _NAMED.findall(question):
        modality = _WORDS[word.lower()]
        media = [one for one in segments if one.modality == modality]
        for number in map(int, re.findall(r"\d+", numbers)):
            if not 0 < number <= len(media):
                hints.append(_count(len(media), KINDS[modality]))
            elif media[number - 1].forgotten:
                hints.append(f"{KINDS[modality]} {number} was forgotten")
    hint = "; ".join(dict.fromkeys(hints))
    return hint[:1].upper() + hint[1:]


def _count(number: int, kind: str) -> str:
    if number == 0:
        return f"there is no {kind}"
    return f"there {'is' if number == 1 else 'are'} {counted(number, kind)}"
