"""RequestSize: the tokens of a request, what they are of, and what to lower."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from oscar_mm.engine.family import Family
from oscar_mm.engine.message import Message, media_of, user_message
from oscar_mm.engine.template import USUAL, TemplateOptions
from oscar_mm.errors import RequestTooLarge
from oscar_mm.media.media import Media, Medium
from oscar_mm.modality import Modality, token_modalities

if TYPE_CHECKING:
    from oscar_mm.engine.prompt import Prompt

_QUESTION = "?"
"""Stands for the question where only media are counted."""


def count_tokens(family: Family, media: Media) -> dict[str, int]:
    """Tokens by modality of a first turn with ``media`` and the shortest question.

    Raises:
        InputError: a medium that the family does not read.
    """
    counts = dict.fromkeys((modality.label for modality in Modality), 0)
    counts["text"] = text_tokens(family, [user_message(_QUESTION, media.parts)])
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
        return {medium.modality.label: family.min_tokens(medium)}
    alone = Media(videos=[replace(medium.content, sound=None)], sized=[medium.sized])
    question = [user_message(_QUESTION, alone.parts)]
    ids = family.encode(family.render(question), list(alone)).input_ids
    counts = torch.bincount(token_modalities(ids, config=family.model.config)[0].int())
    return {
        "video": int(counts[Modality.VIDEO]),
        # Timestamps between frames.
        "text": int(counts[Modality.TEXT]) - text_tokens(family, question),
        "audio": family.min_tokens(medium),
    }


def text_tokens(
    family: Family, messages: Sequence[Message], template: TemplateOptions = USUAL
) -> int:
    """Tokens of text of a conversation as the chat template writes it.

    Raises:
        InputError: a medium that the family does not read.
    """
    text = family.render(messages, template=template)
    return family.tokenize(text).shape[1] - len(media_of(messages))


_NAMED = 3
"""Most media of a kind that a refusal names."""
_TEMPLATE = 32
"""About how many tokens a chat template writes itself, which no shorter prompt saves."""


@dataclass(frozen=True)
class RequestSize:
    """The tokens of a request by their kinds.

    Attributes:
        tokens: of the prompt, by modality: "text", "image", "video", "audio".
        answer: max_new_tokens.
        media: labels and tokens of the media of each modality. Tokens of a video include the text
            of its timestamps and its sound.
        past: tokens of earlier turns.
        frees: tells what a chat can do to hold fewer of these.
        at_least: the true size may be larger: media were counted by their headers, as far as these
            tell, and a later turn without what the chat template adds.
    """

    tokens: Mapping[str, int]
    answer: int
    media: Mapping[Modality, list[tuple[str, int]]] = field(default_factory=dict)
    past: int = 0
    frees: Callable[[], list[str]] = list
    at_least: bool = False

    @classmethod
    def of(cls, prompt: Prompt, answer: int) -> RequestSize:
        """The size of a prompt of a single row and its answer."""
        row = prompt.modalities[0]
        media: dict[Modality, list[tuple[str, int]]] = {}
        for span in prompt.media:
            media.setdefault(span.modality, []).append((span.label, span.tokens))
        return cls(
            tokens={one.label: int((row == one).sum()) for one in Modality},
            answer=answer,
            media=media,
        )

    @property
    def total(self) -> int:
        """Tokens of past, prompt and answer."""
        return self.past + sum(self.tokens.values()) + self.answer

    def refusal(self, fits: int, bound: str, otherwise: str = "") -> RequestTooLarge:
        """The error for a request that is too long.

        Args:
            fits: tokens that would fit, fewer than ``total``.
            bound: what the request is over, with its numbers.
            otherwise: what would help beside fewer tokens.
        """
        parts = [f"{self.past:,} held"] if self.past else []
        for modality in reversed(Modality):
            if count := self.tokens[modality.label]:
                parts.append(f"{modality.label} {count:,}{self._names(modality)}")
        if self.answer:
            parts.append(f"max_new_tokens {self.answer:,}")
        remedies = [*self._remedies(self.total - fits), *([otherwise] if otherwise else [])]
        least = "at least " if self.at_least else ""
        return RequestTooLarge(
            f"{least}{self.total:,} tokens are asked, over {bound}, where {max(0, fits):,} fit: "
            f"{', '.join(parts)}; {', or '.join(remedies)}",
            self.total,
            max(0, fits),
        )

    def _names(self, modality: Modality) -> str:
        media = sorted(self.media.get(modality, ()), key=lambda medium: -medium[1])
        named = [f"{label}: {count:,}" for label, count in media[:_NAMED]]
        more = ["..."] if len(media) > _NAMED else []
        return f" ({', '.join([*named, *more])})" if named else ""

    def _remedies(self, excess: int) -> list[str]:
        """What to lower: the largest parts, until the excess is gone."""
        sizes = {"past": self.past, "answer": self.answer} | dict(self.tokens)
        sizes["text"] = max(0, sizes["text"] - _TEMPLATE)
        remedies: dict[str, str] = {}
        for name in sorted(filter(sizes.get, sizes), key=sizes.__getitem__, reverse=True):
            left = sizes[name] - excess
            remedies[name] = self._remedy(name, left)
            excess = -left
            if excess <= 0:
                break
        others = [self._remedy("past", 0)] if self.past and "past" not in remedies else []
        return [" and ".join(remedies.values()), *others]

    def _remedy(self, name: str, left: int) -> str:
        """How to bring one part down to ``left`` tokens."""
        if name == "past":
            return ", ".join([*self.frees(), "begin a new chat"])
        if name == "answer":
            return f"lower max_new_tokens to {max(1, left):,}"
        what, fits = self._medium_remedy(name, left)
        return f"{what} ({fits} fit)" if left > 0 else what

    def _medium_remedy(self, name: str, left: int) -> tuple[str, str]:
        """What to give less of, and how much of it fits at least."""
        share = f"{left / max(1, self.tokens[name]):.0%}"
        if name == "text":
            return "give a shorter prompt", f"{left:,} tokens of it"
        if name == "audio":
            return "give shorter recordings", f"{share} of the seconds"
        if name == "video":
            less = "give shorter or smaller videos, or keep fewer frames of them with video_fps"
            return less, f"{share} of their tokens"
        images = [tokens for _, tokens in self.media.get(Modality.IMAGE, ())]
        if len(images) < 2:
            return "give a smaller image", f"{left:,} tokens of it"
        fit = sum(total <= left for total in accumulate(images))
        return "give fewer or smaller images", f"at least {fit} of these {len(images)}"
