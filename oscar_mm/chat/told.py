"""Told turns: turns of a chat that took place elsewhere, and what the model reads of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from oscar_mm.chat.conversation import ChatEngine, Conversation, next_prompt
from oscar_mm.generation.answer import ThinkTokens
from oscar_mm.generation.family import Message
from oscar_mm.generation.prompt import Prompt, beginning, text_after
from oscar_mm.media.media import Media

_TOLD_CHARACTERS, _TEMPLATE = 1 << 13, 32
"""Most characters of told turns that are read in one pass, which is some 2,000 to 4,000 tokens, and
what counts for the tokens that a template puts around a turn."""


class ToldTurn(NamedTuple):
    """A turn that took place elsewhere, see ``Chat.tell``.

    Attributes:
        prompt: the question.
        answer: what was answered; may be empty.
        images, videos, audio: as of ``Chat.ask``.
        before: as of ``Chat.stream``.
    """

    prompt: str
    answer: str
    images: Any = None
    videos: Any = None
    audio: Any = None
    before: Sequence[Message] = ()

    @property
    def media(self) -> tuple[Any, Any, Any]:
        """Images, videos and recordings."""
        return self.images, self.videos, self.audio

    @property
    def characters(self) -> int:
        """Characters of all texts; what is no text counts for none."""
        earlier = [one.text for one in self.before if isinstance(one, Message)]
        texts = (*earlier, self.prompt, self.answer)
        return sum(len(text) for text in texts if isinstance(text, str))

    @property
    def shows(self) -> bool:
        """Whether it has media."""
        return any(medium is not None for medium in self.media)


def told_together(told: Iterable[ToldTurn]) -> Iterator[list[ToldTurn]]:
    """Runs of turns that are read in one pass: short ones without media.

    Others need the model meanwhile, and media of a turn are decoded when it is read.
    """
    run: list[ToldTurn] = []
    characters = 0
    for turn in told:
        characters += turn.characters + _TEMPLATE
        if run and (turn.shows or run[-1].shows or characters > _TOLD_CHARACTERS):
            yield run
            run, characters = [], turn.characters + _TEMPLATE
        run.append(turn)
    if run:
        yield run


def told_prompt(
    engine: ChatEngine,
    conversation: Conversation,
    told: Sequence[ToldTurn],
    system: str | None,
    shown: Sequence[Media],
    answers: Sequence[list[int]],
) -> tuple[Prompt, Conversation]:
    """What the model reads of turns that took place elsewhere, and the conversation with them.

    The cache of that conversation is the one of before, which the caller replaces.

    Args:
        engine: of the chat; its lock is not taken.
        conversation: so far.
        told: the turns, checked.
        system: system prompt of a first turn, checked.
        shown: media of each turn.
        answers: token ids of each answer.

    Raises:
        InputError: as of ``next_prompt``.
    """
    family, prompts = engine.family, list[Prompt]()
    for turn, media, ids in zip(told, shown, answers, strict=True):
        first = None if conversation.turns else system
        opened = next_prompt(engine, conversation, turn.prompt, first, media, len(ids), turn.before)
        question = without_reasoning(opened, family.think_tokens)
        prompts.append(with_answer(question, ids))
        answer = turn.prompt, turn.answer, ids, "stop", len(ids)
        conversation = conversation.with_turn(conversation.kv, question, *answer)
    return family.in_line(prompts), conversation


def without_reasoning(prompt: Prompt, thinks: ThinkTokens | None) -> Prompt:
    """A prompt of one row without the tokens by which a template has the model begin to reason."""
    opened = thinks.opened(prompt.inputs["input_ids"][0]) if thinks else 0
    return beginning(prompt, prompt.tokens - opened) if opened else prompt


def with_answer(prompt: Prompt, ids: list[int]) -> Prompt:
    """A prompt of one row, and an answer of these token ids after it."""
    answer = text_after(prompt, torch.tensor([ids], dtype=torch.long))
    both = torch.cat([prompt.inputs["input_ids"], answer.inputs["input_ids"]], dim=1)
    return replace(
        prompt,
        inputs=prompt.inputs | {"input_ids": both},
        positions=torch.cat([prompt.positions, answer.positions], dim=-1),
        next_position=answer.next_position,
        modalities=torch.cat([prompt.modalities, answer.modalities], dim=1),
    )
