"""The prompt of a chat's next turn, if there is room for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from oscar_mm.admission.admission import Past
from oscar_mm.chat.conversation import ChatEngine, Conversation
from oscar_mm.errors import InputError
from oscar_mm.generation.answer import ThinkTokens
from oscar_mm.generation.family import Message
from oscar_mm.generation.prompt import Prompt, beginning, text_after
from oscar_mm.media.media import Media
from oscar_mm.modality import Modality, token_modalities


def check_turn(
    engine: ChatEngine,
    question: str,
    system: str | None,
    before: Sequence[Message],
    media: Sequence[Any],
) -> None:
    """Refuse texts of a turn that are no text or too long or, without media, no question.

    Args:
        engine: of the chat; its lock is not taken.
        question: of the turn.
        system: system prompt of a first turn.
        before: messages before the question in the same turn.
        media: images, videos and recordings of the turn, as the pipeline takes them; they may be
            all that is asked.

    Raises:
        InputError: names the text; as ``NoRoom`` texts that are too long.
    """
    shows = any(len(one) if isinstance(one, list | tuple) else one is not None for one in media)
    admission = engine.admission
    admission.check_text("prompt", question, may_be_empty=shows)
    if system is not None:
        admission.check_text("system", system)
    for message in before:
        admission.check_text("before", message.text, may_be_empty=True)
    if before:
        admission.check_text_length("prompt", joined_text(question, before))


def joined_text(question: str, before: Sequence[Message]) -> str:
    """The texts of a turn's messages, to be counted."""
    return "\n".join([*(message.text for message in before), question])


def past_of(conversation: Conversation) -> Past:
    """What a next turn goes on from, and what would free some of it."""
    return Past(conversation.cache, conversation.stored, partial(_remedies, conversation))


def next_prompt(
    engine: ChatEngine,
    conversation: Conversation,
    question: str,
    system: str | None,
    shown: Media,
    max_new_tokens: int,
    before: Sequence[Message] = (),
) -> Prompt:
    """What the model reads next, on the CPU: the first turn, or what is new of a later one.

    Args:
        engine: of the chat; its lock is not taken.
        conversation: so far.
        question: of the turn, checked.
        system: system prompt of a first turn, checked.
        shown: media of the turn.
        max_new_tokens: of the answer.
        before: messages before the question in the same turn, checked.

    Raises:
        InputError: media that the model does not read, or positions beyond the model's.
    """
    family = engine.family
    # Media that were forgotten keep their numbers.
    earlier = [span.modality for turn in conversation.turns for span in turn.media]
    messages = family.messages(question, system, shown, earlier, before)
    if not conversation.turns:
        prompt = family.prompt(messages, shown)
    else:
        config = family.model.config
        prompt = family.continuation(
            messages,
            shown,
            conversation.tokens,
            conversation.next_position,
            _pending(conversation, config),
        )
        longest = config.get_text_config().max_position_embeddings
        _check_positions(int(prompt.next_position), max_new_tokens, longest)
    return prompt


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
