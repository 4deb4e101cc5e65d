"""RequestSize: token counts of a request by modality, and the error for a too large request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from oscar_mm.engine.family import Family
from oscar_mm.engine.message import Message, media_of, user_message
from oscar_mm.engine.template import USUAL, TemplateOptions
from oscar_mm.errors import RequestTooLarge
from oscar_mm.media.media import Media, Medium
from oscar_mm.modality import Modality

if TYPE_CHECKING:
    from oscar_mm.engine.prompt import Prompt

_QUESTION = "?"
"""Stand-in for the question if only media are counted."""


def count_tokens(family: Family, media: Media) -> dict[str, int]:
    """Count the tokens of a first turn with ``media`` and a minimal question, by modality.

    Raises:
        InputError: if the family does not support the modality of a media item.
    """
    counts = dict.fromkeys((modality.label for modality in Modality), 0)
    counts["text"] = text_tokens(family, [user_message(_QUESTION, media.parts)])
    for medium in media:
        for name, count in medium_tokens(family, medium).items():
            counts[name] += count
    return counts


def medium_tokens(family: Family, medium: Medium) -> dict[str, int]:
    """Count the tokens that a media item adds to a turn, by modality.

    Only the sizes of media are needed: the family's estimate is exact for images and recordings,
    and for videos the processor runs on frames on the meta device.

    Raises:
        InputError: if the family does not support the modality of the media item.
    """
    family.check_reads([medium])
    if medium.modality is not Modality.VIDEO:
        return {medium.modality.label: family.min_tokens(medium)}
    alone = Media(videos=[replace(medium.content, sound=None)], sized=[medium.sized])
    question = [user_message(_QUESTION, alone.parts)]
    encoded = family.encode(family.render(question), list(alone))
    [shown] = encoded.media_tokens
    return {
        "video": shown,
        # Timestamps between the frames.
        "text": encoded.input_ids.shape[1] - shown - text_tokens(family, question),
        "audio": family.min_tokens(medium),
    }


def text_tokens(
    family: Family, messages: Sequence[Message], template: TemplateOptions = USUAL
) -> int:
    """Count the text tokens of a conversation rendered with the chat template.

    Raises:
        InputError: if the family does not support the modality of a media item.
    """
    text = family.render(messages, template=template)
    return family.tokenize(text).shape[1] - len(media_of(messages))


_NAMED = 3
"""Maximum number of media items per modality that an error names."""
_TEMPLATE = 32
"""Approximate number of tokens of the chat template, which remain if the prompt is shortened."""


@dataclass(frozen=True)
class RequestSize:
    """Token counts of a request by modality.

    Attributes:
        tokens: number of prompt tokens by modality: "text", "image", "video", "audio".
        answer: maximum number of tokens of the answer (``max_new_tokens``).
        media: labels and token counts of the media, by modality. A video includes its timestamps
            and its audio track.
        past: number of tokens of earlier turns.
        frees: function that returns ways to free some of the past, as texts for the error.
        at_least: whether the true size may be larger, because media were sized by their headers, or
            because a later turn was counted without the chat template's additions.
    """

    tokens: Mapping[str, int]
    answer: int
    media: Mapping[Modality, list[tuple[str, int]]] = field(default_factory=dict)
    past: int = 0
    frees: Callable[[], list[str]] = list
    at_least: bool = False

    @classmethod
    def of(cls, prompt: Prompt, answer: int) -> RequestSize:
        """Return the size of a single-row prompt and its answer."""
        # Bytes are counted, since each operation on a tensor would let other threads run first.
        row = prompt.modalities.numpy()[0].tobytes()
        media: dict[Modality, list[tuple[str, int]]] = {}
        for span in prompt.media:
            media.setdefault(span.modality, []).append((span.label, span.tokens))
        return cls(
            tokens={one.label: row.count(one) for one in Modality},
            answer=answer,
            media=media,
        )

    @property
    def total(self) -> int:
        """Total number of tokens of past, prompt and answer."""
        return self.past + sum(self.tokens.values()) + self.answer

    def refusal(self, fits: int, bound: str, otherwise: str = "") -> RequestTooLarge:
        """Return the error for a request that is too large.

        Args:
            fits: number of tokens that would fit, fewer than ``total``.
            bound: the exceeded limit, with its numbers.
            otherwise: a remedy other than using fewer tokens; may be empty.
        """
        parts = [f"{self.past:,} stored"] if self.past else []
        for modality in reversed(Modality):
            if count := self.tokens[modality.label]:
                parts.append(f"{modality.label} {count:,}{self._names(modality)}")
        if self.answer:
            parts.append(f"max_new_tokens {self.answer:,}")
        remedies = [*self._remedies(self.total - fits), *([otherwise] if otherwise else [])]
        least = "at least " if self.at_least else ""
        return RequestTooLarge(
            f"{least}{self.total:,} tokens are needed, over {bound}, but only {max(0, fits):,} "
            f"fit: {', '.join(parts)}; {', or '.join(remedies)}",
            self.total,
            max(0, fits),
        )

    def _names(self, modality: Modality) -> str:
        media = sorted(self.media.get(modality, ()), key=lambda medium: -medium[1])
        named = [f"{label}: {count:,}" for label, count in media[:_NAMED]]
        more = ["..."] if len(media) > _NAMED else []
        return f" ({', '.join([*named, *more])})" if named else ""

    def _remedies(self, excess: int) -> list[str]:
        """Return which parts to reduce so that the rest fits, largest part first."""
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
        """Return an instruction that reduces a part to ``left`` tokens."""
        if name == "past":
            return ", ".join([*self.frees(), "begin a new chat"])
        if name == "answer":
            return f"lower max_new_tokens to {max(1, left):,}"
        what, fits = self._medium_remedy(name, left)
        return f"{what} ({fits} fit)" if left > 0 else what

    def _medium_remedy(self, name: str, left: int) -> tuple[str, str]:
        """Return an instruction that reduces a part of the prompt, and how much of it fits."""
        share = f"{left / max(1, self.tokens[name]):.0%}"
        if name == "text":
            return "use a shorter prompt", f"{left:,} tokens"
        if name == "audio":
            return "use shorter recordings", f"{share} of the seconds"
        if name == "video":
            less = "use shorter or smaller videos, or keep fewer of their frames with video_fps"
            return less, f"{share} of their tokens"
        images = [tokens for _, tokens in self.media.get(Modality.IMAGE, ())]
        if len(images) < 2:
            return "use a smaller image", f"{left:,} tokens"
        fit = sum(total <= left for total in accumulate(images))
        return "use fewer or smaller images", f"at least {fit} of these {len(images)}"
