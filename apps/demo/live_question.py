"""LiveQuestion: what a visitor says, read into the cache while it is said."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from oscar_mm.apps.demo.measured_chat import MeasuredChat
from oscar_mm.chat.listening import Listening
from oscar_mm.engine.answer import AnswerStream
from oscar_mm.errors import Cancelled, InputError


class LiveQuestion:
    """A spoken question that a chat reads in blocks until it is asked; thread-safe.

    This serves only to begin the answer sooner. If the question cannot be read in blocks, or the
    conversation changes before it is asked, ``stream`` returns None, and the caller asks its
    recording.

    Args:
        chat: chat that reads the question.
        name: name of its recording.
    """

    def __init__(self, chat: MeasuredChat, name: str) -> None:
        self._chat, self._is_shown = chat, False
        self._listening: Listening | None = None
        with suppress(InputError):
            self._listening = chat.chat.listen(label=name, speak=chat.chat.can_speak)

    @property
    def read_tokens(self) -> int:
        """Number of tokens of the question that are in the cache."""
        listening = self._listening
        return 0 if listening is None else listening.read_tokens

    def hear(self, samples: np.ndarray) -> None:
        """Add (n,) float32 samples at 16 kHz, which ``read`` reads."""
        if (listening := self._listening) is not None:
            try:
                listening.hear(samples, read=False)
            except InputError:
                self.close()

    def read(self) -> bool:
        """Read the complete blocks, and add them to the chat's curve of memory; return whether
        there were any. The chat must not be answering."""
        if (listening := self._listening) is None:
            return False
        before = listening.read_tokens
        try:
            listening.catch_up()
        except InputError:
            self.close()
            return False
        except Cancelled:  # The visitor has pressed Stop; the next call reads on.
            return False
        if (tokens := listening.read_tokens) == before:
            return False
        self._chat.note_heard(listening.memory, tokens)
        self._is_shown = True
        return True

    def stream(self, chat: MeasuredChat, *, speak: bool, **options: Any) -> AnswerStream | None:
        """Ask the question in a chat; return None if its recording must be asked instead.

        Args:
            chat: chat that answers.
            speak: whether the answer is to be spoken.
            options: see ``Chat.stream``.
        """
        listening = self._listening
        if listening is not None and chat is self._chat:
            # Other turns may have come between, or the question may not fit.
            with suppress(InputError):
                if speak == (listening.speaker is not None):
                    return listening.stream(speak=speak, **options)
        self.close()
        return None

    def close(self) -> None:
        """Free what was read unless it has been asked."""
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.close()
        if self._is_shown:
            self._chat.note_forgotten()
