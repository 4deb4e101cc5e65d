"""A turn whose answer is given: read, not generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from oscar_mm.chat.turn import check_turn, next_prompt
from oscar_mm.generation.decode_loop import read_prompt
from oscar_mm.generation.family import Message
from oscar_mm.generation.prompt import Prompt, beginning
from oscar_mm.modality import Modality

if TYPE_CHECKING:
    from oscar_mm.chat.chat import Chat
    from oscar_mm.pipelines.pipeline import Pipeline


def tell(
    chat: Chat,
    prompt: str,
    answer: str,
    images: Any = None,
    videos: Any = None,
    audio: Any = None,
    *,
    before: Sequence[Message] = (),
) -> None:
    """Add a turn that took place elsewhere to a chat: question and answer are read in one go.

    Args:
        chat: as after ``chat.ask(prompt, images, videos, audio)`` that was answered so.
        prompt: the question.
        answer: what was answered; may be empty.
        images, videos, audio: as of ``Chat.ask``.
        before: as of ``Chat.stream``.

    Raises:
        InputError: media or text that cannot be used, or no room in the context.
    """
    pipe = chat.pipe
    check_turn(pipe, prompt, chat.system, before, (images, videos, audio))
    pipe.check_text("answer", answer, may_be_empty=True)
    shown = pipe.read_media(images, videos, audio)
    with chat._alone() as held:
        system = None if held.turns else chat.system
        ids = pipe.processor.tokenizer(answer, add_special_tokens=False)["input_ids"]
        asked = _closed(pipe, next_prompt(pipe, held, prompt, system, shown, len(ids), before))
        chat._held.make_room(asked, len(ids) + 1)  # all of them are stored
        cache = held.cache.fork()
        try:
            read_prompt(pipe.model, _with_answer(asked, ids), cache, pipe.prefill_chunk)
        except BaseException:
            cache.close()
            raise
        chat._held.now = held.answered(cache, asked, prompt, answer, ids, "stop")
        held.cache.close()


def _closed(pipe: Pipeline, prompt: Prompt) -> Prompt:
    """Without the tokens by which a template has a thinking model begin to reason."""
    thinks = pipe.family.think_tokens
    opened = thinks.opened(prompt.inputs["input_ids"][0]) if thinks else 0
    return beginning(prompt, prompt.tokens - opened) if opened else prompt


def _with_answer(prompt: Prompt, ids: list[int]) -> Prompt:
    tokens = prompt.inputs["input_ids"]
    answer = torch.tensor([ids], dtype=tokens.dtype, device=tokens.device)
    text = torch.full((1, len(ids)), int(Modality.TEXT), dtype=prompt.modalities.dtype)
    return replace(
        prompt,
        inputs=prompt.inputs | {"input_ids": torch.cat([tokens, answer], dim=1)},
        positions=torch.cat([prompt.positions, prompt.positions_after(len(ids))], dim=-1),
        next_position=prompt.next_position + len(ids),
        modalities=torch.cat([prompt.modalities, text], dim=1),
    )
