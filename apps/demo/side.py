"""Side: a chat with its memory curve and the speed of its latest answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_mm.apps.demo.curve import Curve
from oscar_mm.generation.answer import Timings
from oscar_mm.generation.reasoning import Reasoning

if TYPE_CHECKING:
    from oscar_mm.chat.chat import Chat

UPDATES_PER_S = 10
"""How often a page is told about an answer that is being written."""


class Side:
    """One of the two sides of a comparison, or the only one.

    Args:
        chat: a new one, or one that goes on.

    Attributes:
        curve: of its memory.
        memory: of the conversation when it was measured last, as ``segments`` are: a budget may
            since have had it written to disk.
        timings: of the latest answer, as far as it goes.
        finish_reason: of the latest answer.
        reasoning: of the latest answer, as far as it goes.
    """

    def __init__(self, chat: Chat) -> None:
        self.chat, self.curve = chat, Curve()
        self.timings: Timings | None = None
        self.finish_reason = self.reasoning = ""
        self.memory, self.segments = chat.memory, chat.segments
        if chat.turns:
            self.measure()

    @property
    def tokens(self) -> int:
        """Of the conversation, forgotten ones included."""
        return self.chat.turns[-1].stop if self.chat.turns else 0

    @property
    def tokens_by_modality(self) -> dict[str, int]:
        """Tokens that are stored, when the conversation was measured last."""
        return self.curve.last.by_modality

    def measure(self) -> None:
        """Note what is held now; reasoning that was held meanwhile, or a turn, may be gone."""
        self.curve.cut(self.tokens)
        self.memory, self.segments = self.chat.memory, self.chat.segments
        self.curve.add(self.memory, self.tokens)

    def answer(
        self,
        question: str,
        media: Mapping[str, list[Path]],
        options: Mapping[str, Any],
        stop: threading.Event,
    ) -> Generator[str]:
        """The answer so far, again and again while it is written, and once more at its end.

        Args:
            media: as ``uploads.by_kind`` gives it.
            options: max_new_tokens, temperature, ...
            stop: ends the answer when it is set; what was written by then counts.

        Raises:
            InputError: as of ``Chat.stream``; the chat is as it was.
        """
        before, turns = self.tokens, len(self.chat.turns)
        shown = {kind: paths or None for kind, paths in media.items()}
        stream = self.chat.stream(question, **shown, **options)
        text, told, self.reasoning = "", 0.0, ""
        try:
            for piece in stream.with_reasoning():
                if isinstance(piece, Reasoning):
                    self.reasoning += piece
                else:
                    text += piece
                if stop.is_set():
                    break
                if time.monotonic() - told >= 1 / UPDATES_PER_S:
                    self._look(before)
                    told = time.monotonic()
                    yield text
            else:
                self.timings = stream.result.timings
        finally:
            stream.close()
        if len(self.chat.turns) > turns:
            self.finish_reason = self.chat.turns[-1].finish_reason
            self.measure()
        yield text

    def undo(self) -> None:
        """Take back the last turn."""
        self.chat.undo()
        self.timings = None
        self.measure()

    def forget(self, index: int) -> None:
        """Drop the medium of a segment."""
        self.chat.forget(index)
        self.measure()

    def _look(self, before: int) -> None:
        running = self.chat.so_far
        if running is not None:
            self.timings = running.timings
            # The token that was chosen last is not in the cache yet.
            tokens = before + running.prompt_tokens + len(running.token_ids) - 1
            self.curve.add(running.memory, tokens)
