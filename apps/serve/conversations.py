"""Conversations: stored chats, looked up by content when later requests continue them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from oscar_mm.apps.serve.completed import CompletedAnswer
from oscar_mm.apps.serve.kept_sessions import KeptSessions
from oscar_mm.apps.serve.protocol import ApiRequest
from oscar_mm.apps.serve.whole_prompts import WholePrompt
from oscar_mm.chat.chat import Chat
from oscar_mm.chat.history import PastTurn
from oscar_mm.engine.message import Message, Part
from oscar_mm.engine.request import Request
from oscar_mm.engine.speech import Speech
from oscar_mm.errors import InputError, MemoryBusy
from oscar_mm.media.part import MediaPart
from oscar_mm.modality import MediumSpan
from oscar_mm.tool_parsers.calls import ToolCall
from oscar_mm.tool_parsers.parser import Piece

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline


class Conversations:
    """LRU store of chats, keyed by the SHA-256 of their full content, their adapter and the
    client's salt.

    A client sends the full conversation with each request. If a stored chat contains all messages
    but the last, the model reads only the last message; otherwise it rereads earlier messages. The
    request continues a fork of the chat, so several requests can continue the same chat. Forks
    share pages.

    Args:
        pipe: pipeline that generates the answers.
        limit: maximum number of chats; beyond it, the least recently used chat is closed.

    Attributes:
        sessions: realtime sessions that clients may resume, up to as many more.
    """

    def __init__(self, pipe: Pipeline, limit: int) -> None:
        self.pipe, self.limit, self.sessions = pipe, limit, KeptSessions(limit)
        self._chats: OrderedDict[str, Chat] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of stored chats."""
        return len(self._chats)

    def answer_steps(
        self, request: ApiRequest
    ) -> Generator[Chat | WholePrompt | Piece | Speech | Request | CompletedAnswer, None, None]:
        """Answer a request in steps, as a generator; closing the generator ends the answer.

        Yields:
            in this order:

            - the ``Chat`` or ``WholePrompt`` that answers
            - "" after reading earlier turns (if necessary)
            - the running ``Request``, from which the caller can take pieces
            - all remaining pieces, as in ``AnswerStream.pieces``
            - the complete answer

        Raises:
            MemoryBusy: if other answers use the memory that the request needs.
            InputError: if the request is invalid or does not fit.
        """
        if request.is_whole:
            yield from WholePrompt(self.pipe, request).answer_steps()
            return
        self.pipe.sampling(request.sampling, ())  # Compiles the grammar, or refuses it.
        chat, turns = self._fork_longest_past(request)
        if chat is None:
            system = request.system.written if request.system else None
            about = {"cache_salt": request.cache_salt, "tools": request.tools}
            chat = Chat(self.pipe, system, adapter=request.adapter, **about)
        try:
            yield chat
            cached = chat.turns[-1].stop if chat.turns else 0
            if earlier := request.past[turns:]:
                chat.tell_all(earlier)
                yield ""
            stream = chat.stream(
                messages=request.question,
                cut_to_fit=True,
                tools=request.tools,
                **request.sampling,
            )
            stream.begin()
            if (writing := chat.answering) is not None:
                yield writing
            yield from stream.pieces()
            answer, turn = stream.result, chat.turns[-1]
            cached += answer.cached_tokens
            written = CompletedAnswer(answer, cached, turn.start + answer.prompt_tokens)
        except BaseException:
            chat.close()
            raise
        said = Message("assistant", (turn.answer,), tool_calls=answer.tool_calls)
        past = (*request.past, PastTurn(request.question, said))
        self._store(_keys(request, past)[-1], chat)
        yield written

    def give_way(self) -> bool:
        """Close the least recently used chat, or else the oldest kept session; return whether this
        may have freed memory.

        If the budget spills chats to disk when memory runs short, only a session is closed whose
        memory is not on disk: one with a question that was heard and not answered.
        """
        budget = self.pipe.budget
        if budget is not None and budget.folder is not None:
            return self.sessions.give_way(spills=True)
        with self._lock:
            dropped = self._chats.popitem(last=False)[1] if self._chats else None
        if dropped is None:
            return self.sessions.give_way(spills=False)
        dropped.close()
        return True

    def close(self) -> None:
        """Close all chats and sessions."""
        self.sessions.close()
        with self._lock:
            chats, self._chats = self._chats, OrderedDict()
        for chat in chats.values():
            chat.close()

    def _store(self, key: str, chat: Chat) -> None:
        """Store a chat under its key, and close the chats that exceed the limit."""
        with self._lock:
            # Another thread may be forking the previous chat with this key.
            dropped = [chat] if key in self._chats else []
            self._chats.setdefault(key, chat)
            self._chats.move_to_end(key)
            while len(self._chats) > self.limit:
                dropped.append(self._chats.popitem(last=False)[1])
        for old in dropped:
            old.close()

    def _fork_longest_past(self, request: ApiRequest) -> tuple[Chat | None, int]:
        """Fork the chat that matches the longest prefix of the request's past turns.

        Returns:
            the fork and its number of turns; None and 0 if no chat matches.

        Raises:
            MemoryBusy: if the chat is on disk, and other answers use the memory that it needs.
        """
        keys = _keys(request, request.past)
        for turns, key in reversed([*enumerate(keys, 1)]):
            with self._lock:
                chat = self._chats.get(key)
                if chat is None:
                    continue
                self._chats.move_to_end(key)
            try:
                return chat.fork(), turns
            except MemoryBusy:
                raise
            except (InputError, RuntimeError):
                # The file is missing, or another thread has closed the chat: read the turns again.
                self._drop(key, chat)
        return None, 0

    def _drop(self, key: str, chat: Chat) -> None:
        with self._lock:
            if self._chats.get(key) is chat:
                del self._chats[key]
        chat.close()


def _keys(request: ApiRequest, past: tuple[PastTurn, ...]) -> list[str]:
    """Return a key for each prefix of the past turns, computed from their content, the adapter and
    the salt."""
    system = request.system and request.system.written
    tools = request.tools and request.tools.for_template()
    keys, before = [], json.dumps([request.cache_salt, request.adapter, system, tools])
    for turn in past:
        said = [_said(message) for message in (*turn.messages, turn.answer)]
        text = json.dumps([before, said])
        before = hashlib.sha256(text.encode()).hexdigest()
        keys.append(before)
    return keys


def _said(message: Message) -> list[Any]:
    """Return what the model reads of a message, as JSON values."""
    if message.role == "assistant":  # Do not depend on how a client splits an answer's text.
        return [message.role, message.written, *map(_call, message.tool_calls)]
    return [message.role, message.tool_call_id, message.name, *map(_digest, message.parts)]


def _call(call: ToolCall) -> list[Any]:
    """Return a tool call as JSON values that do not depend on white space in its arguments."""
    return [call.id, call.for_template()["function"]]


def _digest(part: Part | MediumSpan) -> str | list[Any]:
    """Return text unchanged; for a media item, its modality, digest, audio flag and options."""
    if isinstance(part, str):
        return part
    assert isinstance(part, MediaPart), "requests contain the bytes of their media"
    how = [part.sound, part.options.given]
    return [part.modality.label, hashlib.sha256(part.source).hexdigest(), *how]
