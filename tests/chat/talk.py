"""A chat beside what was said in it."""

from __future__ import annotations

from dataclasses import dataclass

from oscar_mm.chat.chat import Chat
from oscar_mm.engine.answer import AnswerStream
from oscar_mm.engine.request import Request
from tests.chat.plain import Layout, Said, Script


@dataclass
class Reader:
    """A stream that is being read, and the logits by which its tokens were chosen."""

    stream: AnswerStream
    said: Said
    running_request: Request | None = None


@dataclass
class Talk:
    """A chat, what was said in it, where that is, and who reads its next answer just now."""

    name: str
    chat: Chat
    script: Script
    layout: Layout | None = None
    reader: Reader | None = None

    @property
    def length(self) -> int:
        """Tokens that the chat holds, forgotten ones included."""
        return 0 if self.layout is None else len(self.layout.ids) - self.script.turns[-1].unread
