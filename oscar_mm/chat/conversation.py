"""Conversation: what a chat keeps between two turns; Turn and Segment: its parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.memory import span_bytes
from oscar_mm.generation.prompt import Prompt
from oscar_mm.generation.reasoning import Reasoned
from oscar_mm.modality import MediumSpan, Modality

_LABEL = 40
"""Characters of a prompt that name its segment."""


@dataclass(frozen=True)
class Segment:
    """Part of a chat: a medium, or the text of one turn.

    Attributes:
        index: for ``Chat.forget``; stays when others are forgotten.
        modality: TEXT for what was asked and answered in a turn.
        tokens: in the cache; a video's include the text of its timestamps, and its sound.
        bytes: their part of pages and 16-bit blocks. Tables and free slots are in
            ``Chat.memory`` only.
        label: the medium's name, or how the turn's prompt begins.
        turn: index in ``Chat.turns``.
        forgotten: whether its tokens were taken out.
    """

    index: int
    modality: Modality
    tokens: int
    bytes: int
    label: str
    turn: int
    forgotten: bool = False


@dataclass(frozen=True)
class Turn:
    """One question and its answer.

    Attributes:
        prompt: what was asked.
        answer: what was answered, as far as it was read.
        finish_reason: "stop", "length", or "interrupted" where the reader left.
        media: where its images, videos and recordings are among the chat's tokens.
        forgotten: for each of them, whether it was forgotten.
        start: index of its first token.
        stop: index after its last token in the cache.
        position: RoPE position that it began at.
        pending: ids at its beginning that end the answer before, or are all of it.
        reasoning: what a thinking model wrote before the answer; None where it did not think.
    """

    prompt: str
    answer: str
    finish_reason: str
    media: tuple[MediumSpan, ...]
    forgotten: tuple[bool, ...]
    start: int
    stop: int
    position: float
    pending: tuple[int, ...]
    reasoning: str | None = None


@dataclass(frozen=True, eq=False)
class Conversation:
    """Everything that the next turn goes on from; never changed, a turn makes a new one.

    Attributes:
        kept: keys and values of all turns, and after them perhaps of reasoning, until ``Holding``
            takes it out; None while they are on disk.
        token_ids: (1, tokens) int64 on the CPU, of what the cache holds of the turns.
        next_position: (1,) RoPE position of the next token.
        pending: ids at the end of the last answer that are not in the cache.
        turns: from the first.
    """

    kept: OscarCache | None
    token_ids: torch.Tensor
    next_position: torch.Tensor
    pending: tuple[int, ...] = ()
    turns: tuple[Turn, ...] = ()

    @property
    def cache(self) -> OscarCache:
        """``kept``; RuntimeError while that is on disk, see ``Holding.at_hand``."""
        if self.kept is None:
            raise RuntimeError("the cache of this chat is on disk")
        return self.kept

    @classmethod
    def empty(cls, cache: OscarCache) -> Conversation:
        """Nothing was said yet."""
        return cls(cache, torch.empty(1, 0, dtype=torch.long), torch.zeros(1, dtype=torch.long))

    @property
    def tokens(self) -> int:
        """Indices that are taken, forgotten tokens included."""
        return self.token_ids.shape[1]

    @property
    def stored(self) -> int:
        """Tokens that are not forgotten."""
        gone = [
            span.tokens
            for turn in self.turns
            for span, forgotten in zip(turn.media, turn.forgotten, strict=True)
            if forgotten
        ]
        return self.tokens - sum(gone)

    def answered(
        self,
        cache: OscarCache,
        prompt: Prompt,
        asked: str,
        answer: str,
        ids: list[int],
        ended: str,
        reasoned: Reasoned | None = None,
    ) -> Conversation:
        """With one more turn.

        Chat templates leave the reasoning of earlier turns out. So where there was some, the turn
        ends before it, and the next one begins by reading the answer's text.

        Args:
            cache: with prompt and answer, perhaps without the answer's last tokens.
            prompt: of the turn.
            asked: the question's text.
            answer: its text.
            ids: its tokens.
            ended: finish reason.
            reasoned: what the answer began with.
        """
        if reasoned is None:
            stop = cache.get_seq_length()
            held = read = stop - self.tokens - prompt.tokens
        else:
            held, read = -reasoned.opened, reasoned.tokens
            stop = self.tokens + prompt.tokens + held
        turn = Turn(
            prompt=asked,
            answer=answer,
            finish_reason=ended,
            media=tuple(span.shifted(self.tokens) for span in prompt.media),
            forgotten=(False,) * len(prompt.media),
            start=self.tokens,
            stop=stop,
            position=self.next_position.item(),
            pending=self.pending,
            reasoning=None if reasoned is None else reasoned.text,
        )
        new = [prompt.inputs["input_ids"].cpu(), torch.tensor([ids[:read]], dtype=torch.long)]
        return Conversation(
            kept=cache,
            token_ids=torch.cat([self.token_ids, *new], dim=1)[:, :stop],
            next_position=prompt.next_position.cpu() + held,
            pending=tuple(ids[read:]),
            turns=(*self.turns, turn),
        )

    def without_last_turn(self, cache: OscarCache) -> Conversation:
        """As it was before the last turn; ``cache`` without it."""
        last = self.turns[-1]
        return Conversation(
            kept=cache,
            token_ids=self.token_ids[:, : last.start],
            next_position=torch.full_like(self.next_position, last.position),
            pending=last.pending,
            turns=self.turns[:-1],
        )

    def without_medium(self, cache: OscarCache, turn: int, medium: int) -> Conversation:
        """One medium of a turn forgotten; ``cache`` without it."""
        old = self.turns[turn]
        flags = list(old.forgotten)
        flags[medium] = True
        turns = list(self.turns)
        turns[turn] = replace(old, forgotten=tuple(flags))
        return replace(self, kept=cache, turns=tuple(turns))

    def places(self) -> list[tuple[int, int | None]]:
        """For each segment its turn, and which medium of the turn it is, None for the text."""
        return [
            (index, medium)
            for index, turn in enumerate(self.turns)
            for medium in [None, *range(len(turn.media))]
        ]

    def segments(self) -> list[Segment]:
        """Turn by turn: its text, then its media."""
        spans = [span for turn in self.turns for span in (turn, *turn.media)]
        sizes = iter([0] * len(spans))
        if self.kept is not None and spans:
            sizes = iter(span_bytes(self.kept, [(span.start, span.stop) for span in spans]))
        found: list[Segment] = []
        for number, turn in enumerate(self.turns):
            whole = next(sizes)
            media = [
                Segment(
                    index=len(found) + 1 + place,
                    modality=span.modality,
                    tokens=0 if forgotten else span.tokens,
                    bytes=next(sizes),
                    label=span.label,
                    turn=number,
                    forgotten=forgotten,
                )
                for place, (span, forgotten) in enumerate(
                    zip(turn.media, turn.forgotten, strict=True)
                )
            ]
            text = Segment(
                index=len(found),
                modality=Modality.TEXT,
                tokens=turn.stop - turn.start - sum(span.tokens for span in turn.media),
                bytes=whole - sum(one.bytes for one in media),
                label=_shortened(turn.prompt),
                turn=number,
            )
            found += [text, *media]
        return found


def _shortened(prompt: str) -> str:
    # A saved prompt may be long.
    line = " ".join(prompt[: 10 * _LABEL].split())
    return line if len(line) <= _LABEL else line[: _LABEL - 1].rstrip() + "\u2026"
