"""Warm-up of chats: a short answer, aloud if the model speaks, before the first question."""

from __future__ import annotations

import logging

from oscar_mm.chat.chat import Chat
from oscar_mm.chat.conversation import ChatEngine
from oscar_mm.engine.speech import FIRST_FRAMES, Speech

_log = logging.getLogger("oscar_mm")


def answer_in_advance(pipe: ChatEngine) -> None:
    """Begin an answer and abandon it, so that no later answer waits until kernels are compiled.

    A model that speaks generates half a second of speech, because its talker has kernels of its
    own: if the first spoken answer compiled them, all other answers would wait. An error is only
    logged; the first answer then compiles what it needs.

    Args:
        pipe: pipeline that answers.
    """
    talker = pipe.family.talker
    speaks = talker is not None and bool(talker.speakers)
    chat = Chat(pipe)
    try:
        pieces = chat.stream("Hello", speak=speaks, max_new_tokens=2).with_speech()
        # The first piece is shorter than all others.
        for piece in pieces:
            if isinstance(piece, Speech) and piece.frames > FIRST_FRAMES:
                break
    except Exception as error:
        _log.warning("the warm-up failed, so the first answer may take longer: %s", error)
    finally:
        chat.close()
