"""Exchange: a question of a visitor and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oscar_mm.apps.demo.thumbnails import Shown
from oscar_mm.chat.conversation import Turn

NOTES = {
    "interrupted": "stopped: what was written counts as the answer",
    "length": "ended at the longest answer that the settings allow",
}
"""How an answer ended, by finish reason, if it is not by itself."""


@dataclass(eq=False)
class Exchange:
    """A question and what came of it.

    Attributes:
        question: its text.
        media: its files by kind.
        shown: its media, in the order of the turn's segments.
        options: how it was answered.
        reasoning: what a thinking model writes before it, as far as it was written.
        answer: as far as it was written.
        other: the answer over a 16-bit cache, or None.
        note: how the answer ended, if it is not by itself.
        error: why there is no answer.
        counts: whether it is a turn of the chat.
    """

    question: str
    media: dict[str, list[Path]] = field(default_factory=dict)
    shown: list[Shown] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    reasoning: str = ""
    answer: str = ""
    other: str | None = None
    note: str = ""
    error: str = ""
    counts: bool = False

    @classmethod
    def loaded(cls, turn: Turn) -> Exchange:
        """A turn of a saved conversation, of whose media only the names are known."""
        return cls(
            question=turn.prompt,
            shown=[Shown.named(span.modality, span.label) for span in turn.media],
            reasoning=turn.reasoning or "",
            answer=turn.answer,
            note=NOTES.get(turn.finish_reason, ""),
            counts=True,
        )
