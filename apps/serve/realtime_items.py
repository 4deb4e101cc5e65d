"""RealtimeItems: the items of a realtime session, and the chat that reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

import numpy as np
import soxr

from oscar_mm.apps.serve.field_error import FieldError
from oscar_mm.apps.serve.media_parts import (
    GivenPart,
    MediaDecoder,
    MediaSource,
    MediaURL,
    UsualOptions,
)
from oscar_mm.apps.serve.realtime_events import (
    RATE,
    CallItem,
    CallOutputItem,
    ContentPart,
    Item,
    ItemCreate,
    MessageItem,
    samples_of,
)
from oscar_mm.apps.serve.realtime_tasks import RealtimeTasks
from oscar_mm.chat.chat import Chat
from oscar_mm.chat.history import PastTurn
from oscar_mm.engine.answer import AnswerStream
from oscar_mm.engine.message import Message, Part
from oscar_mm.engine.speech import heard_tokens
from oscar_mm.errors import InputError
from oscar_mm.media.resample import MIN_SECONDS
from oscar_mm.media.resample import RATE as HEARD_RATE
from oscar_mm.modality import Modality
from oscar_mm.tool_parsers.calls import ToolCall
from oscar_mm.tool_parsers.offer import ToolOffer

_MAX_ITEMS = 4096


@dataclass(eq=False)
class Entry:
    """An item of the conversation.

    Attributes:
        item: the item in the API's fields.
        message: the message that the next answer is to, or an answer that the client gave; None for
            a recording, and once it is part of a turn.
        characters: number of characters of its texts, as the client sent them.
        turn: number of the chat's turn that contains it; None while it is not answered.
        medium: number of its recording in that turn; None if it has none.
        tokens: number of tokens of an answer.
        speech_ms: milliseconds of speech of an answer that were sent.
        frames: number of their frames.
        is_complete: whether all speech of the answer was sent.
    """

    item: dict[str, Any]
    message: Message | None = None
    characters: int = 0
    turn: int | None = None
    medium: int | None = None
    tokens: int = 0
    speech_ms: int = 0
    frames: float = 0.0
    is_complete: bool = True

    @property
    def id(self) -> str:
        """The item's id."""
        return self.item["id"]

    @property
    def size(self) -> int:
        """Number of characters, plus bytes of images, that the server keeps for it."""
        media = () if self.message is None else self.message.media
        return self.characters + sum(len(part.source) for part in media)

    def tokens_within(self, ms: int) -> int:
        """Return how many tokens of an answer the first milliseconds of its speech say."""
        speech = self.speech_ms, self.frames
        return heard_tokens(self.tokens, ms, *speech, is_complete=self.is_complete)


class RealtimeItems:
    """Items of one session in order, and the chat that reads them while they come.

    Args:
        chat: new chat, which ``close`` closes.
        tasks: tasks of the session, which do all that uses the chat, in order.
        source: limits on images, and where they may be fetched from.
        max_size: maximum number of characters of all items, plus bytes of images that are not
            answered.

    Attributes:
        chat: the chat.
        tasks: see above; those of another connection may replace them once they have ended.
        hears: whether the model reads sound.
        speaks: whether the model answers aloud.
        answering: future that is done after the last event of the running answer; None if none
            runs.
        unanswered: items that the next answer will answer.
    """

    def __init__(
        self, chat: Chat, tasks: RealtimeTasks, source: MediaSource, max_size: int
    ) -> None:
        self.chat, self.tasks, self._source, self._max_size = chat, tasks, source, max_size
        family = chat.pipe.family
        self.hears = Modality.AUDIO in family.reads
        self.speaks = family.talker is not None and bool(family.talker.speakers)
        self._listening = chat.listen(HEARD_RATE, speak=self.speaks) if self.hears else None
        self._entries: dict[str, Entry] = {}
        self._size = 0
        """Sum of the sizes of all entries."""
        self.unanswered: list[Entry] = []
        self._later: list[Entry] = []
        """Messages that came during a recording; the chat gets them after it."""
        self._instructions = 0
        """Number of characters of system prompts since the last answer."""
        self.answering: asyncio.Future[None] | None = None

    @property
    def speaker(self) -> str | None:
        """The voice of the answers; None if the model does not speak."""
        return None if self._listening is None else self._listening.speaker

    # What the client sees.

    async def add(self, entry: Entry, *, done: bool = True) -> None:
        """Add an item at the end, and tell the client."""
        if len(self._entries) >= _MAX_ITEMS:
            raise FieldError(f"a session has at most {_MAX_ITEMS:,} items", "item")
        about = {"item": entry.item, "previous_item_id": self.last_id}
        self._entries[entry.id] = entry
        self._size += entry.size
        await self.tasks.send_event("conversation.item.added", **about)
        if done:
            await self.tasks.send_event("conversation.item.done", **about)

    async def send_all(self) -> None:
        """Tell the client all items, as if they were added now."""
        previous = None
        for entry in [*self._entries.values()]:
            about = {"item": entry.item, "previous_item_id": previous}
            await self.tasks.send_event("conversation.item.added", **about)
            await self.tasks.send_event("conversation.item.done", **about)
            previous = entry.id
            # Sending does not yield to other clients while buffers are free.
            await asyncio.sleep(0)

    def drop(self, entry: Entry) -> None:
        """Remove an item that has not become part of the conversation."""
        if self._entries.pop(entry.id, None) is not None:
            self._size -= entry.size

    @property
    def last_id(self) -> str | None:
        """Id of the last item; None if there is none."""
        return next(reversed(self._entries), None)

    @property
    def size(self) -> int:
        """Number of bytes of all items, as JSON, and of images and sound that are not answered."""
        entries = [*self._entries.values()]
        written = sum(len(json.dumps(entry.item)) for entry in entries)
        heard = 0 if self._listening is None else self._listening.unread_bytes
        return written + heard + sum(entry.size - entry.characters for entry in entries)

    @property
    def is_pinned(self) -> bool:
        """Whether a part of the next question is in the cache: it is not moved to disk."""
        return self._listening is not None and self._listening.read_tokens > 0

    def find(self, item_id: str) -> Entry:
        """Return the item with an id.

        Raises:
            FieldError: if there is none.
        """
        if (entry := self._entries.get(item_id)) is None:
            raise FieldError("is not the id of an item of this conversation", "item_id")
        return entry

    def check_hears(self) -> None:
        """Refuse sound if the model does not read it.

        Raises:
            FieldError: if it does not.
        """
        if not self.hears:
            name = self.chat.pipe.family.name
            raise FieldError(f"{name} does not support audio: send texts", "audio")

    async def create(self, event: ItemCreate) -> tuple[Entry, np.ndarray | None]:
        """Add an item that the client has made.

        Returns:
            The item; and if it is a recording, its (n,) float32 samples at 16 kHz, which the caller
            must queue for the model.

        Raises:
            InputError: if it is invalid; FieldError names the field.
        """
        given = event.item
        if event.previous_item_id not in (None, self.last_id):
            raise FieldError("items can only be added at the end: leave it out", "previous_item_id")
        if given.id is not None and given.id in self._entries:
            raise FieldError("is the id of another item: leave it out", "item.id")
        if isinstance(given, CallOutputItem) and not self._has_call(given.call_id):
            raise FieldError("is the id of no function call of this session", "item.call_id")
        samples = message = None
        if isinstance(given, MessageItem) and (sound := _only_sound(given)) is not None:
            self.check_hears()
            samples = await self.tasks.in_thread(partial(_heard, sound))
        else:
            message = await self.tasks.in_thread(partial(self._message, given))
        entry = Entry(_shown(given), message, 0 if message is None else _characters(message))
        self._check_room(entry.size, "item")
        await self.add(entry)
        if message is not None:
            add = self._add_answer if message.role == "assistant" else self.add_text
            self.tasks.enqueue(partial(add, entry), event)
        return entry, samples

    def _has_call(self, call_id: str) -> bool:
        return any(entry.item.get("call_id") == call_id for entry in self._entries.values())

    def _check_room(self, size: int, field: str) -> None:
        if size + self._size + self._instructions > self._max_size:
            raise FieldError(
                "the characters of all items and new instructions, plus bytes of images that are "
                f"not answered, exceed {self._max_size:,}: ask for a response, or begin a new "
                "session",
                field,
            )

    def hold_instructions(self, text: str) -> None:
        """Count a new system prompt, which ``instruct`` is to use, until the next answer.

        Raises:
            FieldError: if the session holds too much.
        """
        self._check_room(len(text), "session.instructions")
        self._instructions += len(text)

    def _message(self, item: Item) -> Message:
        """Check an item without sound, and return its message.

        Raises:
            InputError: if it is empty or too large, or an image cannot be decoded.
        """
        message = self._message_of(item)
        pipe = self.chat.pipe
        pipe.admission.check_message(message)
        if message.is_empty and not message.tool_calls:
            raise FieldError("must not be empty", "item.content")
        # An image that cannot be decoded would spoil all later answers.
        with pipe.media_reader.reading(message.media):
            return message

    def _message_of(self, item: Item) -> Message:
        if isinstance(item, CallItem):
            call = ToolCall(item.call_id, item.name, item.arguments)
            return Message("assistant", (), "item", (call,))
        if isinstance(item, CallOutputItem):
            return Message("tool", (item.output,), "item.output", (), item.call_id)
        decoder = MediaDecoder(self._source, "", UsualOptions())
        parts = [_part(part, place, item.role, decoder) for place, part in enumerate(item.content)]
        return Message(item.role, tuple(parts), "item.content")

    # What is done in order.

    async def instruct(self, text: str, voice: str | None) -> None:
        """Change the voice and the system prompt; if the model has read the old prompt already, the
        new one is a system message after the items so far."""
        chat, listening = self.chat, self._listening
        if listening is not None:
            listening.speaker = voice
        if not self._system_is_read:
            chat.system = text or None
        elif text and text != chat.system:
            chat.system = text
            await self.add_text(Entry({}, Message("system", (text,), "instructions")))

    @property
    def _system_is_read(self) -> bool:
        """Whether the model has read the system prompt."""
        listening = self._listening
        return bool(self.chat.turns or (listening is not None and listening.read_tokens))

    async def hear(self, samples: np.ndarray) -> None:
        """Add (n,) float32 samples at 16 kHz to the current recording.

        Raises:
            InputError: if the chat refuses them, or too much is not read; the recording is
                discarded.
        """
        listening, reads = self._listening, self.answering is None
        assert listening is not None

        def hear() -> None:
            listening.hear(samples, read=reads)
            if listening.unread_bytes > self._max_size:
                raise FieldError(
                    f"the sound that is not read yet takes more than {self._max_size:,} bytes: "
                    "ask for a response, or wait until it is done",
                    "audio",
                )

        try:
            await self.tasks.in_thread(hear)
        except InputError:
            await self.discard()
            raise

    async def discard(self) -> None:
        """Forget the current recording."""
        if self._listening is not None:
            await self.tasks.in_thread(self._listening.discard)
            await self._add_later()

    async def _add_later(self) -> None:
        """Add the messages that came during a recording, which has ended."""
        later, self._later = self._later, []
        for text in later:
            await self.add_text(text)

    async def catch_up(self) -> None:
        """Read what was heard during an answer."""
        if self._listening is not None and self.answering is None:
            await self.tasks.in_thread(self._listening.catch_up)

    async def end_recording(self, entry: Entry) -> None:
        """Make the current recording an item that is not answered.

        Raises:
            FieldError: if the recording was discarded, since it could not be read.
        """
        assert self._listening is not None
        if not self._listening.is_recording:
            raise FieldError("the sound could not be read, and was discarded", "audio")
        await self.tasks.in_thread(self._listening.commit)
        self.unanswered.append(entry)
        await self._add_later()

    async def add_text(self, entry: Entry) -> None:
        """Add a message to those that are not answered, after the current recording."""
        if self._listening is not None and self._listening.is_recording:
            self._later.append(entry)
            return
        self.unanswered.append(entry)
        if self._listening is not None and entry.message is not None:
            await self.tasks.in_thread(partial(self._listening.add, entry.message))

    async def _add_answer(self, entry: Entry) -> None:
        """Make the messages that are not answered, and an answer of the client, a turn of the chat.

        Raises:
            FieldError: if the answer does not follow messages, or follows a recording.
        """
        messages = [one.message for one in self.unanswered if one.message is not None]
        answer, listening = entry.message, self._listening
        if answer is None or not messages or len(messages) < len(self.unanswered):
            self.drop(entry)
            raise FieldError(
                "an assistant's item must follow texts or images of the user", "item.role"
            )
        tell = self._tell_past if listening is None else listening.tell
        try:
            await self.tasks.in_thread(partial(tell, answer))
        except InputError:
            self.drop(entry)
            raise
        self.answered(self.unanswered, [entry])

    def _tell_past(self, answer: Message) -> None:
        messages = [one.message for one in self.unanswered if one.message is not None]
        self.chat.tell_all([PastTurn(messages, answer)])

    def stream(
        self, options: dict[str, Any], tools: ToolOffer | None, *, speak: bool
    ) -> AnswerStream:
        """Ask for an answer to the items that are not answered, and stream it; runs in a thread.

        Args:
            options: sampling options.
            tools: the session's tools with the choice of this answer.
            speak: whether the answer is spoken.

        Raises:
            InputError: if all items are answered; see also ``Chat.stream``.
        """
        if not self.unanswered:
            raise InputError("there is nothing to answer: create an item first")
        if (listening := self._listening) is not None:
            return listening.stream(speak=speak, tools=tools, **options)
        messages = [one.message for one in self.unanswered if one.message is not None]
        return self.chat.stream(messages=messages, cut_to_fit=True, tools=tools, **options)

    def answered(self, asked: Sequence[Entry], answers: Sequence[Entry]) -> None:
        """Note that the last turn of the chat consists of some items and their answer."""
        media = 0
        for entry in asked:
            if entry.message is None:
                entry.medium, media = media, media + 1
            else:
                media += len(entry.message.media)
        for entry in (*asked, *answers):
            before = entry.size
            entry.turn, entry.message = len(self.chat.turns) - 1, None
            self._size += entry.size - before
        self.unanswered = [entry for entry in self.unanswered if entry not in asked]
        self._instructions = 0

    async def delete(self, item_id: str) -> None:
        """Remove a recording that was answered, also from the cache.

        Raises:
            FieldError: if it was not answered, or something is heard or answered now.
        """
        entry, listening = self.find(item_id), self._listening
        if entry.turn is None or entry.medium is None:
            raise FieldError("only recordings that were answered can be deleted", "item_id")
        if self.answering is not None or (listening and listening.read_tokens):
            raise FieldError("cannot be deleted while something is heard or said", "item_id")
        await self.tasks.in_thread(partial(self._forget, entry.turn, entry.medium))
        self.drop(entry)
        await self.tasks.send_event("conversation.item.deleted", item_id=item_id)

    def _forget(self, turn: int, medium: int) -> None:
        of_turn = [one for one in self.chat.segments if one.turn == turn and one.modality]
        self.chat.forget(of_turn[medium])

    async def truncate(self, entry: Entry, end_ms: int) -> None:
        """Remove from the last answer what follows the first milliseconds of its speech.

        Raises:
            FieldError: if it is not the last answer, was not spoken, calls functions or is shorter,
                or if the model has read what follows it.
        """
        if self.answering is not None:
            await self.answering
        if entry.turn != len(self.chat.turns) - 1 or not entry.speech_ms:
            raise FieldError("only the last spoken answer can be truncated", "item_id")
        if self.chat.turns[-1].tool_calls:
            raise FieldError("an answer that calls functions cannot be truncated", "item_id")
        if self._listening is not None and self._listening.read_tokens:
            raise FieldError("what follows the answer was read already", "item_id")
        if end_ms > entry.speech_ms:
            raise FieldError(f"the answer lasts {entry.speech_ms} ms", "audio_end_ms")
        await self.shorten(entry, entry.tokens_within(end_ms))
        entry.frames *= end_ms / entry.speech_ms
        entry.speech_ms = end_ms
        told = {"item_id": entry.id, "content_index": 0, "audio_end_ms": end_ms}
        await self.tasks.send_event("conversation.item.truncated", **told)

    async def shorten(self, entry: Entry, tokens: int) -> None:
        """Remove all but the first tokens of the last answer."""
        if (count := entry.tokens - tokens) > 0:
            await self.tasks.in_thread(partial(self.chat.shorten_answer, count))
            entry.tokens = tokens
            for part in entry.item["content"]:
                part["transcript"] = self.chat.turns[-1].answer

    def close(self) -> None:
        """Free the chat."""
        if self._listening is not None:
            self._listening.close()
        self.chat.close()


def _only_sound(item: MessageItem) -> ContentPart | None:
    """Return the recording of an item; None if it has none."""
    sounds = [part for part in item.content if part.type == "input_audio"]
    if sounds and (len(item.content) > 1 or item.role != "user"):
        raise FieldError(
            "audio must be the only part of a user's item: send texts as other items",
            "item.content",
        )
    return sounds[0] if sounds else None


def _heard(sound: ContentPart) -> np.ndarray:
    """Return the samples of a recording at 16 kHz."""
    samples = samples_of(sound.audio or "", "item.content[0].audio")
    if len(samples) < MIN_SECONDS * RATE:
        raise FieldError(f"must have at least {MIN_SECONDS:g} s", "item.content[0].audio")
    return soxr.resample(samples, RATE, HEARD_RATE)


def _part(part: ContentPart, place: int, role: str, decoder: MediaDecoder) -> Part:
    """Return a text or an image of a message."""
    if part.type != "input_image":
        return part.text or ""
    name = f"item.content[{place}]"
    if role != "user" or part.image_url is None:
        raise FieldError("must be an image_url of a user's item", name)
    url = MediaURL(url=part.image_url, detail=part.detail)
    medium = decoder.decode(GivenPart(type="image_url", image_url=url), name)
    assert medium is not None
    return medium


def _characters(message: Message) -> int:
    return sum(map(len, (*message.texts, *message.labels)))


def _shown(item: Item) -> dict[str, Any]:
    """Return an item of the client in the API's fields."""
    item_id = item.id or new_id()
    if isinstance(item, MessageItem):
        return message_item(item_id, item.role, [part.shown for part in item.content])
    fields = item.model_dump(include={*type(item).model_fields} - {"id"})
    return call_item(item_id, "completed") | fields


def new_id() -> str:
    """Return an id of an item."""
    return f"item_{uuid4().hex}"


def call_item(item_id: str, status: str = "in_progress") -> dict[str, Any]:
    """Return the item of a call in the API's fields, without the call."""
    return {"id": item_id, "object": "realtime.item", "type": "function_call", "status": status}


def message_item(
    item_id: str, role: str, content: list[dict[str, Any]], status: str = "completed"
) -> dict[str, Any]:
    """Return the item of a message in the API's fields."""
    about = {"id": item_id, "object": "realtime.item", "type": "message", "status": status}
    return {**about, "role": role, "content": content}
