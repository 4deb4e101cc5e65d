"""A chat in a file: the cache as ``oscar_mm.cache.persist`` writes it, and what was said."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oscar_mm.cache.persist import load_cache, save_cache
from oscar_mm.chat.conversation import Conversation, Turn
from oscar_mm.errors import InputError
from oscar_mm.modality import MediumSpan, Modality

if TYPE_CHECKING:
    from oscar_mm.cache.store import PageStore

FORMAT_VERSION = 1
"""Of what is said here; the cache has a version of its own."""


def save_chat(
    path: str | Path, conversation: Conversation, system: str | None, fingerprint: str
) -> None:
    """Write a conversation to one safetensors file, as a whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    save_cache(
        conversation.cache,
        path,
        fingerprint=fingerprint,
        metadata={
            "chat": FORMAT_VERSION,
            "system": system,
            "turns": [asdict(turn) for turn in conversation.turns],
            "pending": list(conversation.pending),
            "token_ids": conversation.token_ids,
            "next_position": conversation.next_position,
        },
    )


def load_chat(
    path: str | Path,
    store: PageStore,
    fingerprint: str,
    device: dict[int, torch.device],
    vocabulary: int,
) -> tuple[Conversation, str | None]:
    """A conversation over pages of the store, and its system prompt.

    Args:
        store: of the pipeline.
        fingerprint: of its model.
        device: of each layer.
        vocabulary: token ids are below it.

    Raises:
        InputError: the file cannot be read, is no chat, was altered, or is another model's.
    """
    cache, given = load_cache(path, fingerprint=fingerprint, store=store, device=device)
    try:
        if given.get("chat") != FORMAT_VERSION:
            raise InputError(f"{path}: holds no chat of version {FORMAT_VERSION}")
        conversation = Conversation(
            cache=cache,
            token_ids=given["token_ids"],
            next_position=given["next_position"],
            pending=tuple(given["pending"]),
            turns=tuple(_turn(turn) for turn in given["turns"]),
        )
        system = given["system"]
        _check(conversation, system, vocabulary)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        cache.close()
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: is no chat that can be read: {error}") from None
    return conversation, system


def _check(conversation: Conversation, system: Any, vocabulary: int) -> None:
    """Raise ValueError if a file of ours could not say this: nothing of it may reach a kernel."""
    ids, tokens = conversation.token_ids, conversation.cache.get_seq_length()
    if ids.shape != (1, tokens) or ids.dtype != torch.long:
        raise ValueError("tokens and cache differ in length")
    known = torch.cat([ids[0], torch.tensor(conversation.pending, dtype=torch.long)])
    if len(known) and not 0 <= int(known.min()) <= int(known.max()) < vocabulary:
        raise ValueError("token ids out of range")
    place = conversation.next_position
    if place.shape != (1,) or not 0 <= float(place) < 1 << 31:
        raise ValueError("its position is out of range")
    if not (system is None or isinstance(system, str)):
        raise ValueError("its system prompt is no text")
    start = 0
    for turn in conversation.turns:
        if turn.start != start or len(turn.media) != len(turn.forgotten):
            raise ValueError("its turns do not follow each other")
        for span in turn.media:
            if not start <= span.start < span.stop <= turn.stop:
                raise ValueError("a medium is out of range")
            start = span.stop
        texts = (turn.prompt, turn.answer, *(span.label for span in turn.media))
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("what was said is no text")
        start = turn.stop
    if start != tokens:
        raise ValueError("turns and tokens differ in length")


def _turn(saved: dict[str, Any]) -> Turn:
    spans = (MediumSpan(**span) for span in saved["media"])
    media = tuple(
        MediumSpan(Modality(span.modality), span.label, span.start, span.stop, span.digest)
        for span in spans
    )
    lists = {name: tuple(saved[name]) for name in ("forgotten", "pending")}
    return Turn(**{**saved, **lists, "media": media})
