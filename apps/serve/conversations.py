"""Conversations: chats that are kept, found again by what was said in them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oscar_mm.apps.serve.protocol import Request, Said
from oscar_mm.chat.chat import Chat
from oscar_mm.errors import Busy, InputError
from oscar_mm.generation.answer import Answer
from oscar_mm.generation.family import Message

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline


@dataclass(frozen=True)
class Written:
    """An answer that is complete, with what its client is told of it; the chat may be closed.

    Attributes:
        answer: the answer.
        cached_tokens: of the conversation, that were held already.
        prompt_tokens: of all that was said before the answer.
    """

    answer: Answer
    cached_tokens: int
    prompt_tokens: int

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of the whole conversation, and what it holds."""
        written, memory = len(self.answer.token_ids), self.answer.memory
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "audio_tokens": memory.tokens["audio"],
            },
            "kv_bytes": memory.kv_bytes,
            "kv_ratio": round(memory.ratio, 4),
            "kv_bytes_by_modality": dict(memory.by_modality),
        }


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

    def answering(self, request: Request) -> Generator[str | Written, None, None]:
        """Answer, step by step; who closes the generator ends the answer there.

        Yields:
            "" after each turn of the past that had to be read, then the pieces of the answer, those
            of its reasoning as ``Reasoning``, then the whole of it, when its chat is kept already.

        Raises:
            Busy: others hold the memory that the request needs.
            InputError: what cannot be read or has no room.
        """
        chat, turns = self._known(request)
        if chat is None:
            chat = self.pipe.chat(request.system.text if request.system else None)
        try:
            held = chat.turns[-1].stop if chat.turns else 0
            for asked, answer in request.past[turns:]:
                chat.tell(answer=answer.text, **_question(asked))
                yield ""
            stream = chat.stream(**_question(request.asked), **request.sampling)
            yield from stream.with_reasoning()
            answer, turn = stream.result, chat.turns[-1]
            written = Written(answer, held, turn.start + answer.prompt_tokens)
        except BaseException:
            chat.close()
            raise
        past = (*request.past, (request.asked, Said("assistant", 0, turn.answer)))
        self._keep(_keys(request.system, past)[-1], chat)
        yield written

    def give_way(self) -> bool:
        """Give up the chat that was used least recently; whether that may have freed memory.

        Chats that go to disk when others need their memory are kept.
        """
        budget = self.pipe.budget
        if budget is not None and budget.folder is not None:
            return False
        with self._lock:
            dropped = self._kept.popitem(last=False)[1] if self._kept else None
        if dropped is not None:
            dropped.close()
        return dropped is not None

    def close(self) -> None:
        """Give up all chats."""
        with self._lock:
            kept, self._kept = self._kept, OrderedDict()
        for chat in kept.values():
            chat.close()

    def _keep(self, key: str, chat: Chat) -> None:
        """Remember a chat that has just answered."""
        with self._lock:
            # One that is kept may be in use for a fork.
            dropped = [chat] if key in self._kept else []
            self._kept.setdefault(key, chat)
            self._kept.move_to_end(key)
            while len(self._kept) > self.limit:
                dropped.append(self._kept.popitem(last=False)[1])
        for one in dropped:
            one.close()

    def _known(self, request: Request) -> tuple[Chat | None, int]:
        """A fork of the kept chat with the longest beginning of a past, and its turns.

        Raises:
            Busy: the chat is on disk, and others hold the memory that it needs.
        """
        keys = _keys(request.system, request.past)
        for turns, key in reversed([*enumerate(keys, 1)]):
            with self._lock:
                chat = self._kept.get(key)
                if chat is None:
                    continue
                self._kept.move_to_end(key)
            try:
                return chat.fork(), turns
            except Busy:
                raise
            except (InputError, RuntimeError):
                # Its file is gone, or somebody else closed it meanwhile: it is read again.
                self._forget(key, chat)
        return None, 0

    def _forget(self, key: str, chat: Chat) -> None:
        with self._lock:
            if self._kept.get(key) is chat:
                del self._kept[key]
        chat.close()


def _question(messages: tuple[Said, ...]) -> dict[str, Any]:
    """Arguments of ``Chat.stream`` for messages that end with the question."""
    *before, question = messages
    images = [image for said in messages for image in said.images]
    audio = [recording for said in messages for recording in said.audio]
    return {
        "prompt": question.text,
        "images": images or None,
        "audio": audio or None,
        "before": [Message(x.role, x.text, len(x.images), len(x.audio)) for x in before],
    }


def _keys(system: Said | None, past: tuple[tuple[tuple[Said, ...], Said], ...]) -> list[str]:
    """A key for each beginning of a past: each covers all that was said up to there."""
    keys, before = [], json.dumps(system and system.text)
    for asked, answer in past:
        said = [[one.role, one.text, _digests(one.images), _digests(one.audio)] for one in asked]
        text = json.dumps([before, said, answer.text])
        before = hashlib.sha256(text.encode()).hexdigest()
        keys.append(before)
    return keys


def _digests(media: tuple[bytes, ...]) -> list[str]:
    return [hashlib.sha256(one).hexdigest() for one in media]
