"""Conversation: state of a chat between two turns, and the prompt of the next turn.

A conversation consists of turns; segments describe its text and media. ``ChatEngine`` is the
interface of a pipeline that chats use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from oscar_mm.engine.speech import Heard, Voice
from oscar_mm.errors import InputError, shown
from oscar_mm.media.media import Media, MediaReader
from oscar_mm.modality import MediumSpan, Modality
from oscar_mm.policy import KVPolicy
from oscar_mm.tool_parsers.calls import ToolCall
from oscar_mm.tool_parsers.offer import ToolOffer

_LABEL = 40
"""Maximum number of characters of a prompt in its segment's label."""


@dataclass(frozen=True)
class Segment:
    """Part of a chat: a media item, or the text of one turn.

    Attributes:
        index: index for ``Chat.forget``; unaffected when other segments are forgotten.
        modality: modality of the media item; TEXT for the question and answer of a turn.
        tokens: number of tokens in the cache; for a video, including timestamps and audio.
        bytes: bytes of the segment's tokens in pages and 16-bit slots. Tables and free slots are
            counted only in ``Chat.memory``.
        label: name of the media item, or the beginning of the turn's prompt.
        turn: index of the turn in ``Chat.turns``.
        forgotten: whether ``Chat.forget`` has removed its tokens.
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
    """A question and its answer.

    Attributes:
        messages: messages since the last answer, with media as spans of the chat's tokens.
        answer: text of the answer, up to the point at which the caller ended it.
        finish_reason: "stop", "tool_calls", "length", or "interrupted" if the caller ended the
            answer.
        forgotten: whether each item of ``media`` was forgotten.
        start: index of the first token.
        stop: index after the last token of the turn in the cache.
        position: RoPE position of the first token.
        pending: token ids at the beginning of the turn that belong to the previous answer.
        reasoning: reasoning of a thinking model before the answer; None if it did not think.
        tool_calls: tool calls in the answer.
        answer_tokens: number of tokens of the answer, including those in the chat's ``pending``;
            None if it is not known, as in saved chats.
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
    answer_tokens: int | None = field(default=None, compare=False)

    @property
    def prompt(self) -> str:
        """Text of the question, one line per text part."""
        return self.messages[-1].text

    @cached_property
    def media(self) -> tuple[MediumSpan, ...]:
        """Images, videos and recordings of the question, in token order."""
        spans = [span for message in self.messages for span in message.spans]
        return tuple(sorted(spans, key=lambda span: span.start))


@dataclass(frozen=True, eq=False)
class Conversation:
    """Immutable state that the next turn continues; each turn creates a new one.

    Attributes:
        kv: cache of all turns, followed by the last reasoning until ``SpillableConversation``
            removes it; None while the cache is on disk.
        token_ids: (1, tokens) int64 on the CPU: token ids of all turns, as in the cache.
        next_position: (1,) RoPE position of the next token.
        pending: token ids at the end of the last answer that are not in the cache.
        turns: all turns, oldest first.
        heard: what the talker has heard of the turns, for answers that are spoken.
    """

    kv: OscarCache | None
    token_ids: torch.Tensor
    next_position: torch.Tensor
    pending: tuple[int, ...] = ()
    turns: tuple[Turn, ...] = ()
    heard: Heard = field(default_factory=Heard)

    @property
    def cache(self) -> OscarCache:
        """The cache; raises RuntimeError while the cache is on disk."""
        if self.kv is None:
            raise RuntimeError(
                "the cache of this chat is on disk: call SpillableConversation.load first"
            )
        return self.kv

    @classmethod
    def empty(cls, cache: OscarCache) -> Conversation:
        """Create a conversation without turns."""
        return cls(cache, torch.empty(1, 0, dtype=torch.long), torch.zeros(1, dtype=torch.long))

    @property
    def tokens(self) -> int:
        """Number of tokens in all turns, including forgotten ones."""
        return self.token_ids.shape[1]

    @property
    def stored(self) -> int:
        """Number of tokens that are not forgotten."""
        forgotten_tokens = [
            span.tokens
            for turn in self.turns
            for span, forgotten in zip(turn.media, turn.forgotten, strict=True)
            if forgotten
        ]
        return self.tokens - sum(forgotten_tokens)

    def forked_cache(self) -> OscarCache:
        """Return a fork of the cache for the next turn, from which ``Chat.undo`` can return."""
        cache = self.cache.fork()
        cache.mark()
        return cache

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
        voice: Voice | None = None,
    ) -> Conversation:
        """Return the conversation with one more turn.

        Chat templates leave out the reasoning of earlier turns. So if the model reasoned, the turn
        ends before the reasoning, and the next turn begins by prefilling the answer's text.

        Args:
            cache: cache that contains the prompt and the answer, perhaps without the answer's last
                tokens; None while it is on disk.
            prompt: prompt of the turn.
            messages: messages of the turn, with the spans of ``prompt.media``.
            answer: the assistant's message.
            ids: token ids of the answer, including reasoning.
            finish_reason: reason why the answer ended.
            stored: number of the answer's tokens in the cache.
            reasoning: reasoning at the beginning of the answer, which the caller crops from the
                cache; None if there is none.
            voice: voice whose talker hears the question; None if none does.
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
            answer_tokens=len(ids) if reasoning is None else None,
        )
        new = [prompt.inputs["input_ids"].cpu(), torch.tensor([ids[:read]], dtype=torch.long)]
        return Conversation(
            kv=cache,
            token_ids=torch.cat([self.token_ids, *new], dim=1)[:, :stop],
            next_position=prompt.next_position.cpu() + stored,
            pending=tuple(ids[read:]),
            turns=(*self.turns, turn),
            heard=self.heard if voice is None else voice.heard(self.tokens + prompt.tokens),
        )

    def with_late_tokens(self, count: int) -> Conversation:
        """Return the conversation with its first ``count`` pending tokens in the cache: a step that
        was running when the answer was left has added them."""
        late = torch.tensor([self.pending[:count]], dtype=torch.long)
        last = replace(self.turns[-1], stop=self.turns[-1].stop + count)
        return replace(
            self,
            token_ids=torch.cat([self.token_ids, late], dim=1),
            next_position=self.next_position + count,
            pending=self.pending[count:],
            turns=(*self.turns[:-1], last),
        )

    def without_last_turns(self, cache: OscarCache, count: int) -> Conversation:
        """Return the conversation without its last turns, which ``cache`` must not contain."""
        first = self.turns[-count]
        return Conversation(
            kv=cache,
            token_ids=self.token_ids[:, : first.start],
            next_position=torch.full_like(self.next_position, first.position),
            pending=first.pending,
            turns=self.turns[:-count],
            heard=self.heard.until(first.start),
        )

    def with_answer_cut(self, cache: OscarCache, count: int, text: str) -> Conversation:
        """Return the conversation without the last tokens of its last answer.

        Args:
            cache: cache that does not contain those tokens.
            count: number of these tokens, of which the last ones may be in ``pending``.
            text: what is left of the answer.
        """
        kept, last = max(0, len(self.pending) - count), self.turns[-1]
        stored = max(0, count - len(self.pending))
        assert last.answer_tokens is not None
        cut = replace(
            last,
            answer=text,
            finish_reason="interrupted",
            stop=last.stop - stored,
            tool_calls=(),
            answer_tokens=last.answer_tokens - count,
        )
        return replace(
            self,
            kv=cache,
            token_ids=self.token_ids[:, : cut.stop],
            next_position=self.next_position - stored,
            pending=self.pending[:kept],
            turns=(*self.turns[:-1], cut),
        )

    def without_medium(
        self, cache: OscarCache, turn: int, medium: int, heard: Heard
    ) -> Conversation:
        """Return the conversation with a media item forgotten; ``cache`` and ``heard`` must not
        contain it."""
        old = self.turns[turn]
        flags = list(old.forgotten)
        flags[medium] = True
        turns = list(self.turns)
        turns[turn] = replace(old, forgotten=tuple(flags))
        return replace(self, kv=cache, turns=tuple(turns), heard=heard)

    def missed(self) -> torch.Tensor:
        """Return (tokens,) ids of what the talker has not heard.

        Raises:
            InputError: if there are media among them, whose hidden states are not known any more.
        """
        start = self.heard.end.tokens
        if any(span.start >= start for turn in self.turns for span in turn.media):
            raise InputError(
                "speak=True: the talker has not heard the media of an earlier turn, which was not "
                "spoken or comes from a file: pass speak=True in every turn with media, or start a "
                "new chat"
            )
        return self.token_ids[0, start:]

    def places(self) -> list[tuple[int, int | None]]:
        """Return, for each segment, the index of its turn and the index of its media item within
        the turn (None for text)."""
        return [
            (index, medium)
            for index, turn in enumerate(self.turns)
            for medium in [None, *range(len(turn.media))]
        ]

    def place_of(self, segment: int | Segment) -> tuple[int, int]:
        """Return the indices of the turn and of the media item within it.

        Args:
            segment: a media item that is not forgotten, as its segment or the segment's index.

        Raises:
            InputError: if it is something else.
        """
        index = segment.index if isinstance(segment, Segment) else segment
        places = self.places()
        if type(index) is not int or not 0 <= index < len(places):
            known = f"0 to {len(places) - 1}" if places else "none yet"
            raise InputError(f"forget({shown(index)}): no such segment; there are {known}")
        turn, medium = places[index]
        if medium is None:
            raise InputError(
                f"forget({index}): the segment is text, but only images, videos and recordings "
                "can be forgotten; to remove the last turn, call undo()"
            )
        span = self.turns[turn].media[medium]
        here = span.modality, span.label
        if isinstance(segment, Segment) and (segment.modality, segment.label) != here:
            raise InputError(
                f"forget: segment {index} is now {span.label}, not {segment.label}, which belongs "
                "to another chat or to a turn that was undone"
            )
        if self.turns[turn].forgotten[medium]:
            raise InputError(f"forget({index}): {span.label} is already forgotten")
        return turn, medium

    def segments(self) -> list[Segment]:
        """Return the segments: for each turn its text, then its media."""
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
    # Cut first, since the prompt of a saved chat may be long.
    line = " ".join(prompt[: 10 * _LABEL].split())
    return line if len(line) <= _LABEL else line[: _LABEL - 1].rstrip() + "\u2026"


class ChatEngine(Protocol):
    """Interface of a pipeline that chats use: a model, a shared page store, perhaps a budget."""

    @property
    def family(self) -> Family:
        """Model family: the model, its processor and their special cases."""
        ...

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the checkpoint."""
        ...

    def fingerprint_with(self, adapter: str | None) -> str:
        """Return the fingerprint stored in saved chats of an adapter, or of none."""
        ...

    @property
    def engine(self) -> Engine:
        """Engine that runs prefill and decoding."""
        ...

    @property
    def admission(self) -> Admission:
        """Admission, which checks sizes and reserves memory."""
        ...

    @property
    def policy(self) -> KVPolicy:
        """How keys and values are stored."""
        ...

    @property
    def store(self) -> PageStore:
        """Page store of all chats."""
        ...

    @property
    def media_reader(self) -> MediaReader:
        """Reader that decodes the media of turns."""
        ...

    def check_speech(
        self, speaker: Any, sampling: Sampling | None = None, tools: ToolOffer | None = None
    ) -> str:
        """Check that answers can be spoken, and return the name of the voice."""
        ...

    def offer(
        self,
        tools: Sequence[Any] | None,
        tool_choice: Any = None,
        *,
        parallel: bool = True,
    ) -> ToolOffer | None:
        """Check tools and return them as an offer; None if no tool may be called."""
        ...

    def sampling(self, options: Mapping[str, Any], arguments: Sequence[str]) -> Sampling:
        """Check a user's options and return the sampling; ``arguments`` are other allowed names."""
        ...


def past_of(conversation: Conversation) -> Past:
    """Return the past that the next turn continues, and ways to free some of its tokens."""
    return Past(conversation.cache, conversation.stored, partial(_remedies, conversation))


def next_prompt(
    engine: ChatEngine,
    conversation: Conversation,
    messages: Sequence[Message],
    shown: Media,
    max_new_tokens: int,
    tools: ToolOffer | None = None,
) -> Prompt:
    """Build the prompt of a turn on the CPU; for a later turn, only its new part.

    Args:
        engine: pipeline of the chat; this function does not wait for its engine thread.
        conversation: conversation so far.
        messages: checked messages of the turn; in the first turn, including the system prompt.
        shown: media of the turn.
        max_new_tokens: maximum number of tokens of the answer.
        tools: tools that the model may call; later turns use the tools of the first turn.

    Raises:
        InputError: if the model does not support the media, or positions exceed the model's
            context.
    """
    family = engine.family
    # Forgotten media keep their numbers.
    earlier = [span.modality for turn in conversation.turns for span in turn.media]
    if not conversation.turns:
        prompt = family.prompt(messages, shown, tools)
    else:
        prompt = family.continuation(
            messages,
            shown,
            conversation.tokens,
            conversation.next_position,
            _pending(conversation, family),
            earlier,
        )
        longest = family.model.config.get_text_config().max_position_embeddings
        _check_positions(int(prompt.next_position), max_new_tokens, longest)
    return prompt


def longest_answer(engine: ChatEngine, past: Past | None, prompt: Prompt, most: int) -> int:
    """Return the maximum answer length in tokens that memory and positions allow.

    Returns:
        From 1 to ``most`` tokens.

    Raises:
        MemoryBusy, RequestTooLarge: see ``Admission.longest_answer``.
    """
    config = engine.family.model.config.get_text_config()
    positions = config.max_position_embeddings - int(prompt.next_position)
    most = max(1, min(most, positions))
    return engine.admission.longest_answer(prompt, most, past)


def _pending(conversation: Conversation, family: Family) -> list[int]:
    """Return the tokens at the end of the last answer that are not in the cache yet.

    Media placeholders are left out: a model should not write them, but if it does, the next turn
    must not mistake them for its media.
    """
    ids = torch.tensor([conversation.pending], dtype=torch.long)
    return ids[family.modalities_of(ids) == Modality.TEXT].tolist()


def _remedies(conversation: Conversation) -> list[str]:
    """Return ways to free tokens of a conversation, as texts, with the largest media first."""
    if conversation.cache.linear_layers:
        return ["undo()"]
    media = [one for one in conversation.segments() if one.modality and one.tokens]
    largest = sorted(media, key=lambda one: -one.tokens)[:3]
    frees = [f"forget({one.index}) frees {one.tokens:,} ({one.label})" for one in largest]
    return [*frees, "undo()"]


def _check_positions(following: int, answer: int, longest: int) -> None:
    """Refuse a turn whose positions exceed the model's context.

    Forgetting media does not lower positions.
    """
    if following + answer > longest:
        raise InputError(
            f"the turn would reach position {following} and max_new_tokens is {answer}, but the "
            f"model supports only {longest} positions: undo() some turns or start a new chat "
            "(forget() does not free positions)"
        )
