"""History: past turns that the client supplies (not the model), and the prompt for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch

from oscar_mm.chat.conversation import ChatEngine, Conversation, next_prompt
from oscar_mm.engine.family import Family
from oscar_mm.engine.message import Message, media_of, with_spans, with_system
from oscar_mm.engine.prompt import Prompt, beginning, text_after
from oscar_mm.engine.think_tokens import ThinkTokens
from oscar_mm.media.media import Media
from oscar_mm.tool_parsers.offer import ToolOffer

_TOGETHER, _TEMPLATE = 1 << 13, 32
"""Maximum number of characters of past turns in one prefill pass (about 2,000 to 4,000 tokens),
and number of characters added per turn for the tokens of the chat template."""


class PastTurn(NamedTuple):
    """Past turn that was not generated in this chat; see ``Chat.tell_all``.

    Attributes:
        messages: messages of the question; the last message is from the user.
        answer: the assistant's message; may be empty.
    """

    messages: Sequence[Message]
    answer: Message

    @property
    def characters(self) -> int:
        """Total number of characters in all texts."""
        return sum(len(text) for one in (*self.messages, self.answer) for text in one.texts)


def prefill_groups(turns: Iterable[PastTurn]) -> Iterator[list[PastTurn]]:
    """Yield groups of turns to prefill in one pass; each turn with media is a group of its own.

    Groups are small, so that other requests can run in between and the media of a turn are decoded
    just before its pass.
    """
    run: list[PastTurn] = []
    characters, alone = 0, False
    for turn in turns:
        shows = bool(media_of(turn.messages))
        characters += turn.characters + _TEMPLATE
        if run and (shows or alone or characters > _TOGETHER):
            yield run
            run, characters = [], turn.characters + _TEMPLATE
        run.append(turn)
        alone = shows
    if run:
        yield run


def history_prompt(
    engine: ChatEngine,
    conversation: Conversation,
    turns: Sequence[PastTurn],
    system: str | None,
    shown: Sequence[Media],
    answers: Sequence[list[int]],
    tools: ToolOffer | None = None,
) -> tuple[Prompt, Conversation]:
    """Build the prompt for past turns, and the conversation that includes them.

    The returned conversation still has the old cache, which the caller must replace.

    Args:
        engine: pipeline of the chat; this function does not wait for its engine thread.
        conversation: conversation so far.
        turns: checked turns.
        system: checked system prompt of the first turn.
        shown: media of each turn.
        answers: token ids of each answer.
        tools: tools that the model may call.

    Raises:
        InputError: see ``next_prompt``.
    """
    family, prompts = engine.family, list[Prompt]()
    for turn, media, ids in zip(turns, shown, answers, strict=True):
        messages = with_system(None if conversation.turns else system, turn.messages)
        opened = next_prompt(engine, conversation, messages, media, len(ids), tools)
        question = without_reasoning(opened, family.think_tokens)
        prompts.append(with_answer(question, ids))
        asked = with_spans(turn.messages, question.media)
        said = asked, turn.answer, ids, "stop", len(ids)
        conversation = conversation.with_turn(conversation.kv, question, *said)
    prompt, lengths = family.concatenate(prompts), [one.tokens for one in prompts]
    return family.marked(prompt, accumulate(lengths[:-1])), conversation


def marked_before_reasoning(prompt: Prompt, family: Family) -> Prompt:
    """Return a single-row prompt with a mark where reasoning is removed after its answer."""
    if (thinks := family.think_tokens) is None:
        return prompt
    return family.marked(prompt, [prompt.tokens - thinks.opened(prompt.inputs["input_ids"][0])])


def without_reasoning(prompt: Prompt, thinks: ThinkTokens | None) -> Prompt:
    """Return a single-row prompt without the tokens at its end that open the reasoning."""
    opened = thinks.opened(prompt.inputs["input_ids"][0]) if thinks else 0
    return beginning(prompt, prompt.tokens - opened) if opened else prompt


def with_answer(prompt: Prompt, ids: list[int]) -> Prompt:
    """Return a single-row prompt followed by the token ids of an answer."""
    answer = text_after(prompt, torch.tensor([ids], dtype=torch.long))
    both = torch.cat([prompt.inputs["input_ids"], answer.inputs["input_ids"]], dim=1)
    return replace(
        prompt,
        inputs=prompt.inputs | {"input_ids": both},
        positions=torch.cat([prompt.positions, answer.positions], dim=-1),
        next_position=answer.next_position,
        modalities=torch.cat([prompt.modalities, answer.modalities], dim=1),
    )
