"""Conversation: what a chat keeps between two turns, and the prompt of the next turn.

Turn and Segment are its parts. ChatEngine: what a chat needs of a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from oscar_mm.admission.admission import Admission, Past
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.memory import span_bytes
from oscar_mm.cache.page_store import PageStore
from oscar_mm.engine.answer import ReasoningSpan
from oscar_mm.engine.engine import Engine
from oscar_mm.engine.family import Family
from oscar_mm.engine.message import Message
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.sampling import Sampling
from oscar_mm.errors import InputError
from oscar_mm.media.media import Media, MediaReader
from oscar_mm.modality import MediumSpan, Modality, token_modalities
from oscar_mm.policy import KVPolicy
from oscar_mm.threads import FairLock
from oscar_mm.tool_parsers.calls import ToolCall
from oscar_mm.tool_parsers.offer import ToolOffer

_LABEL = 40
"""Characters of a prompt that name its segment."""


@dataclass(frozen=True)
class Segment:
    """Part of a chat: a medium, or the text of one turn.

    Attributes:
        index: for ``Chat.forget``; stays when others are forgotten.
        modality: TEXT for question and answer of a turn.
        tokens: in the cache; a video's include the text of its timestamps, and its sound.
        bytes: their part of pages and 16-bit blocks. Tables and free slots are in
            ``Chat.memory`` only.
        label: the medium's name, or how the turn's prompt begins.
        turn: index in ``Chat.turns``.
        forgotten: whether ``Chat.forget`` took its tokens out.
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
        messages: messages since the last answer, with media as spans among the chat's tokens.
        answer: its answer, as far as the reader took it.
        finish_reason: "stop", "tool_calls", "length", or "interrupted" where the reader left.
        forgotten: for each of ``media``, whether it was forgotten.
        start: index of its first token.
        stop: index after its last token in the cache.
        position: RoPE position of its first token.
        pending: ids at its beginning that belong to the answer before: its end, or all of it.
        reasoning: what a thinking model wrote before the answer; None where it did not think.
        tool_calls: tool calls of the answer.
    """

    messages: tuple[Message, ...]
    answer: str
    finish_reason: str
    forgotten: tuple[bool, ...]
    start: int
    stop: int
    position: float
    pending: tuple[int, ...]
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def prompt(self) -> str:
        """Text of the question, each text part on its own line."""
        return self.messages[-1].text

    @cached_property
    def media(self) -> tuple[MediumSpan, ...]:
        """Images, videos and recordings of the question, in the order of their tokens."""
        spans = [span for message in self.messages for span in message.spans]
        return tuple(sorted(spans, key=lambda span: span.start))


@dataclass(frozen=True, eq=False)
class Conversation:
    """Everything that the next turn continues; it never changes, a turn makes a new one.

    Attributes:
        kv: keys and values of all turns, and after them perhaps those of the last reasoning, until
            ``SpillableConversation`` takes these out; None while they are on disk.
        token_ids: (1, tokens) int64 on the CPU, ids of all turns as the cache holds them.
        next_position: (1,) RoPE position of the next token.
        pending: ids at the end of the last answer that are not in the cache.
        turns: from the first.
    """

    kv: OscarCache | None
    token_ids: torch.Tensor
    next_position: torch.Tensor
    pending: tuple[int, ...] = ()
    turns: tuple[Turn, ...] = ()

    @property
    def cache(self) -> OscarCache:
        """``kv``; RuntimeError while that is on disk, see ``SpillableConversation.load``."""
        if self.kv is None:
            raise RuntimeError("the cache of this chat is on disk")
        return self.kv

    @classmethod
    def empty(cls, cache: OscarCache) -> Conversation:
        """A conversation without turns."""
        return cls(cache, torch.empty(1, 0, dtype=torch.long), torch.zeros(1, dtype=torch.long))

    @property
    def tokens(self) -> int:
        """How many tokens all turns have, forgotten ones included."""
        return self.token_ids.shape[1]

    @property
    def stored(self) -> int:
        """How many tokens are not forgotten."""
        forgotten_tokens = [
            span.tokens
            for turn in self.turns
            for span, forgotten in zip(turn.media, turn.forgotten, strict=True)
            if forgotten
        ]
        return self.tokens - sum(forgotten_tokens)

    def with_turn(
        self,
        cache: OscarCache | None,
        prompt: Prompt,
        messages: tuple[Message, ...],
        answer: Message,
        ids: list[int],
        finish_reason: str,
        stored: int,
        reasoning: ReasoningSpan | None = None,
    ) -> Conversation:
        """The conversation with one more turn.

        Chat templates leave the reasoning of earlier turns out. So where the model reasoned, the
        turn ends before that, and the next one begins by reading the answer's text.

        Args:
            cache: holds prompt and answer, perhaps without the answer's last tokens; None while it
                is on disk.
            prompt: of the turn.
            messages: messages of the turn, with the spans of ``prompt.media``.
            answer: the assistant's message.
            ids: tokens of the answer, reasoning included.
            finish_reason: why the answer ended.
            stored: tokens of the answer that the cache holds.
            reasoning: what the answer began with; the cache is to be cut off before it.
        """
        read = stored
        if reasoning is not None:
            stored, read = -reasoning.opened, reasoning.tokens
        stop = self.tokens + prompt.tokens + stored
        turn = Turn(
            messages=tuple(message.shifted(self.tokens) for message in messages),
            answer=answer.written,
            finish_reason=finish_reason,
            forgotten=(False,) * len(prompt.media),
            start=self.tokens,
            stop=stop,
            position=self.next_position.item(),
            pending=self.pending,
            reasoning=None if reasoning is None else reasoning.text,
            tool_calls=answer.tool_calls,
        )
        new = [prompt.inputs["input_ids"].cpu(), torch.tensor([ids[:read]], dtype=torch.long)]
        return Conversation(
            kv=cache,
            token_ids=torch.cat([self.token_ids, *new], dim=1)[:, :stop],
            next_position=prompt.next_position.cpu() + stored,
            pending=tuple(ids[read:]),
            turns=(*self.turns, turn),
        )

    def without_last_turn(self, cache: OscarCache) -> Conversation:
        """The conversation before its last turn; ``cache`` is without that turn."""
        last = self.turns[-1]
        return Conversation(
            kv=cache,
            token_ids=self.token_ids[:, : last.start],
            next_position=torch.full_like(self.next_position, last.position),
            pending=last.pending,
            turns=self.turns[:-1],
        )

    def without_medium(self, cache: OscarCache, turn: int, medium: int) -> Conversation:
        """The conversation with a medium of a turn forgotten; ``cache`` is without that medium."""
        old = self.turns[turn]
        flags = list(old.forgotten)
        flags[medium] = True
        turns = list(self.turns)
        turns[turn] = replace(old, forgotten=tuple(flags))
        return replace(self, kv=cache, turns=tuple(turns))

    def places(self) -> list[tuple[int, int | None]]:
        """For each segment the index of its turn, and of its medium in the turn; None for text."""
        return [
            (index, medium)
            for index, turn in enumerate(self.turns)
            for medium in [None, *range(len(turn.media))]
        ]

    def segments(self) -> list[Segment]:
        """The segments: turn by turn its text, then its media."""
        spans = [span for turn in self.turns for span in (turn, *turn.media)]
        sizes = iter([0] * len(spans))
        if self.kv is not None and spans:
            sizes = iter(
                span_bytes(self.kv.kv_manager, [(span.start, span.stop) for span in spans])
            )
        segments: list[Segment] = []
        for number, turn in enumerate(self.turns):
            turn_bytes = next(sizes)
            media = [
                Segment(
                    index=len(segments) + 1 + place,
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
                index=len(segments),
                modality=Modality.TEXT,
                tokens=turn.stop - turn.start - sum(span.tokens for span in turn.media),
                bytes=turn_bytes - sum(medium.bytes for medium in media),
                label=_shortened(turn.prompt),
                turn=number,
            )
            segments += [text, *media]
        return segments


def _shortened(prompt: str) -> str:
    # A saved prompt may be long.
    line = " ".join(prompt[: 10 * _LABEL].split())
    return line if len(line) <= _LABEL else line[: _LABEL - 1].rstrip() + "\u2026"


class ChatEngine(Protocol):
    """A loaded model whose chats share a store of pages, and a budget if there is one."""

    @property
    def family(self) -> Family:
        """The model, its processor and what is special about them."""
        ...

    @property
    def fingerprint(self) -> str:
        """Which checkpoint the model is; saved chats have it."""
        ...

    @property
    def engine(self) -> Engine:
        """Reads and answers."""
        ...

    @property
    def lock(self) -> FairLock:
        """Held for each step of the model and each change of the store."""
        ...

    @property
    def admission(self) -> Admission:
        """Checks sizes and keeps room."""
        ...

    @property
    def policy(self) -> KVPolicy:
        """How keys and values are stored."""
        ...

    @property
    def store(self) -> PageStore:
        """The pages of all chats."""
        ...

    @property
    def media_reader(self) -> MediaReader:
        """Reads what a turn shows."""
        ...

    def sampling(self, options: Mapping[str, Any], arguments: Sequence[str]) -> Sampling:
        """Options that a user gave as a ``Sampling``; ``arguments`` are other allowed names."""
        ...


def past_of(conversation: Conversation) -> Past:
    """What a next turn continues, and what would free some of it."""
    return Past(conversation.cache, conversation.stored, partial(_remedies, conversation))


def next_prompt(
    engine: ChatEngine,
    conversation: Conversation,
    messages: Sequence[Message],
    shown: Media,
    max_new_tokens: int,
    tools: ToolOffer | None = None,
) -> Prompt:
    """What the model reads next, on the CPU: the first turn, or what is new of a later one.

    Args:
        engine: of the chat; its lock is not taken.
        conversation: so far.
        messages: of the turn, checked; of a first one the system prompt too.
        shown: media of the turn.
        max_new_tokens: of the answer.
        tools: that the model may call; a later turn has those of the first.

    Raises:
        InputError: media that the model does not read, or positions beyond the model's.
    """
    family = engine.family
    # Media that were forgotten keep their numbers.
    earlier = [span.modality for turn in conversation.turns for span in turn.media]
    if not conversation.turns:
        prompt = family.prompt(messages, shown, tools)
    else:
        config = family.model.config
        prompt = family.continuation(
            messages,
            shown,
            conversation.tokens,
            conversation.next_position,
            _pending(conversation, config),
            earlier,
        )
        longest = config.get_text_config().max_position_embeddings
        _check_positions(int(prompt.next_position), max_new_tokens, longest)
    return prompt


def longest_answer(
    engine: ChatEngine, conversation: Conversation, prompt: Prompt, most: int
) -> int:
    """Most tokens of the answer to a turn that memory and the model's positions have, up to
    ``most``, and at least 1.

    Raises:
        MemoryBusy, RequestTooLarge: as of ``Admission.longest_answer``.
    """
    config = engine.family.model.config.get_text_config()
    positions = config.max_position_embeddings - int(prompt.next_position)
    most = max(1, min(most, positions))
    return engine.admission.longest_answer(prompt, most, past_of(conversation))


def _pending(conversation: Conversation, config: object) -> list[int]:
    """The end of the last answer that is not in the cache yet.

    Placeholders of media are left out: a model should not write them, but if it does, they must
    not be taken for media of the next turn.
    """
    ids = torch.tensor([conversation.pending], dtype=torch.long)
    return ids[token_modalities(ids, config=config) == Modality.TEXT].tolist()


def _remedies(conversation: Conversation) -> list[str]:
    """What would free tokens of a conversation, the largest media first."""
    media = [one for one in conversation.segments() if one.modality and one.tokens]
    largest = sorted(media, key=lambda one: -one.tokens)[:3]
    frees = [f"forget({one.index}) frees {one.tokens:,} ({one.label})" for one in largest]
    return [*frees, "undo()"]


def _check_positions(following: int, answer: int, longest: int) -> None:
    """Positions go on where media were forgotten, and end where the model's do."""
    if following + answer > longest:
        raise InputError(
            f"the turn would come to position {following} and max_new_tokens is {answer}, but the "
            f"model ends at {longest}: undo() takes back turns, forget() does not help; else "
            "begin a new chat"
        )
