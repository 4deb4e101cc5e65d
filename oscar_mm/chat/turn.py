"""The prompt of a chat's next turn, if there is room for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from oscar_mm.chat.conversation import Conversation
from oscar_mm.errors import InputError
from oscar_mm.generation.family import Message
from oscar_mm.generation.prompt import Prompt
from oscar_mm.modality import Modality, token_modalities

if TYPE_CHECKING:
    from oscar_mm.media.media import Media
    from oscar_mm.pipelines.pipeline import Pipeline


def next_prompt(
    pipe: Pipeline,
    held: Conversation,
    asked: str,
    system: str | None,
    shown: Media,
    max_new_tokens: int,
    before: Sequence[Message] = (),
) -> Prompt:
    """What the model reads next: the first turn, or what is new of a later one.

    Args:
        asked: the question, checked.
        system: system prompt of a first turn.
        shown: media of the turn.
        before: what was said before the question in the same turn, checked.

    Raises:
        InputError: media that the model does not read, or no room in the context.
    """
    # Media that were forgotten keep their numbers.
    earlier = [span.modality for turn in held.turns for span in turn.media]
    messages = pipe.family.messages(asked, system, shown, earlier, before)
    pipe.check_media(shown)
    if not held.turns:
        prompt = pipe.family.prompt(messages, shown)
    else:
        prompt = pipe.family.continuation(
            messages, shown, held.tokens, held.next_position, _pending(held, pipe.model.config)
        )
        longest = pipe.model.config.get_text_config().max_position_embeddings
        _check_positions(int(prompt.next_position), max_new_tokens, longest)
    frees = partial(_frees, held)
    pipe.check_length(prompt, max_new_tokens, held.cache, held=held.stored, frees=frees)
    return prompt


def check_turn(
    pipe: Pipeline,
    asked: str,
    system: str | None,
    before: Sequence[Message],
    media: Sequence[Any],
) -> None:
    """Refuse texts of a turn that are no text or, without media, no question.

    Args:
        asked: the question.
        system: system prompt of a first turn.
        before: what was said before the question in the same turn.
        media: its images, videos and recordings, as ``Pipeline.read_media`` takes them; they may
            be all that is asked.
    """
    shows = any(len(one) if isinstance(one, list | tuple) else one is not None for one in media)
    pipe.check_text("prompt", asked, may_be_empty=shows)
    if system is not None:
        pipe.check_text("system", system)
    for message in before:
        pipe.check_text("before", message.text, may_be_empty=True)


def all_text(asked: str, before: Sequence[Message]) -> str:
    """The texts of a turn's messages, as far as they are to be counted."""
    return "\n".join([*(message.text for message in before), asked])


def check_ahead(
    pipe: Pipeline,
    held: Conversation,
    asked: str,
    system: str | None,
    shown: Media,
    max_new_tokens: int,
) -> None:
    """Refuse a turn that has no room by the headers of its media; under the pipeline's lock.

    Args:
        asked: the question, checked.
        system: system prompt of a first turn.
        shown: media of the turn, as ``Pipeline.outline`` gives them.

    Raises:
        NoRoom: the numbers, and what to lower.
    """
    arguments = {"past": held.cache, "held": held.stored, "frees": partial(_frees, held)}
    pipe.check_outline(asked, system, shown, max_new_tokens, **arguments)


def _pending(held: Conversation, config: object) -> list[int]:
    """The end of the last answer that is not in the cache yet.

    Without placeholders of media: a model should not write them, but if it does, they must not be
    taken for media of the next turn.
    """
    ids = torch.tensor([held.pending], dtype=torch.long)
    return ids[token_modalities(ids, config=config) == Modality.TEXT].tolist()


def _frees(held: Conversation) -> list[str]:
    """What would make room among the tokens that are held."""
    media = [one for one in held.segments() if one.modality and one.tokens]
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
