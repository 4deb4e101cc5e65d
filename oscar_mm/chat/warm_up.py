"""Warm-up of chats: the beginning of an answer, aloud if the model speaks, before all questions."""

from __future__ import annotations

import logging

from oscar_mm.chat.chat import Chat
from oscar_mm.chat.conversation import ChatEngine
from oscar_mm.engine.speech import FIRST_FRAMES, Speech

_log = logging.getLogger("oscar_mm")


def answer_in_advance(pipe: ChatEngine) -> None:
    """Begin an answer and leave it, so that no later one waits until kernels are compiled.

    A model that speaks says half a second, since its talker runs kernels of its own; otherwise the
    first spoken answer would delay all others meanwhile. An error is logged, and the first answer
    then compiles what it needs.

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
