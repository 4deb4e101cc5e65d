"""Conversations: chats that are kept, found again by what was said in them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from oscar_mm.apps.serve.protocol import Request, Said
from oscar_mm.chat.given_turn import tell
from oscar_mm.chat.session import Chat
from oscar_mm.decoding.answer import AnswerStream

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline


class Conversations:
    """Kept chats by the SHA-256 of all that was said in them, media by their encoded bytes.

    A client sends the whole conversation with each request. Where all but its last message is a
    chat that is kept, only the last message is read; else the earlier ones are read again. A chat
    is forked before it goes on, so that it can be continued more than once; forks share pages.

    Args:
        pipe: answers.
        limit: most chats that are kept; the least recently used goes first.
    """

    def __init__(self, pipe: Pipeline, limit: int) -> None:
        self.pipe, self.limit = pipe, limit
        self._kept: OrderedDict[str, Chat] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def begin(self, request: Request) -> tuple[AnswerStream, Chat, int]:
        """Start to answer.

        Returns:
            the answer as it comes, its chat, and how many tokens of the past were held already.

        Raises:
            InputError: what cannot be read or has no room.
        """
        chat, held = self._chat(request)
        try:
            media = _media(request.asked)
            stream = chat.stream(request.asked.text, **media, **request.sampling)
        except BaseException:
            chat.close()
            raise
        return stream, chat, held

    def keep(self, request: Request, chat: Chat) -> None:
        """Remember a chat that has just answered a request."""
        if not chat.turns or chat.turns[-1].finish_reason == "interrupted":
            chat.close()
            return
        past = (*request.past, (request.asked, chat.turns[-1].answer))
        self._put(_keys(request.system, past)[-1], chat)

    def close(self) -> None:
        """Give up all chats."""
        with self._lock:
            while self._kept:
                self._kept.popitem()[1].close()

    def _put(self, key: str, chat: Chat) -> None:
        with self._lock:
            dropped = [self._kept.pop(key)] if key in self._kept else []
            self._kept[key] = chat
            while len(self._kept) > self.limit:
                dropped.append(self._kept.popitem(last=False)[1])
        for one in dropped:
            one.close()

    def _known(self, request: Request) -> tuple[Chat | None, int]:
        """A fork of the kept chat with the longest beginning of a past, and its turns."""
        keys = _keys(request.system, request.past)
        for turns, key in reversed([*enumerate(keys, 1)]):
            with self._lock:
                chat = self._kept.get(key)
                if chat is None:
                    continue
                self._kept.move_to_end(key)
                return chat.fork(), turns
        return None, 0

    def _chat(self, request: Request) -> tuple[Chat, int]:
        """A chat with the request's past, and how many of its tokens were held already."""
        chat, turns = self._known(request)
        if chat is None:
            chat = self.pipe.chat(request.system)
        held = chat.turns[-1].stop if chat.turns else 0
        try:
            for asked, answer in request.past[turns:]:
                tell(chat, asked.text, answer, **_media(asked))
        except BaseException:
            chat.close()
            raise
        return chat, held


def _media(said: Said) -> dict[str, Any]:
    media = {"images": list(said.images) or None, "audio": list(said.audio) or None}
    return {name: sources for name, sources in media.items() if sources}


def _keys(system: str | None, past: tuple[tuple[Said, str], ...]) -> list[str]:
    """A key for each beginning of a past: each covers all that was said up to there."""
    keys, before = [], json.dumps(system)
    for asked, answer in past:
        digests = [
            [hashlib.sha256(one).hexdigest() for one in media]
            for media in (asked.images, asked.audio)
        ]
        said = json.dumps([before, asked.text, *digests, answer])
        before = hashlib.sha256(said.encode()).hexdigest()
        keys.append(before)
    return keys
