"""RealtimeSession: a conversation over a WebSocket, with OpenAI's realtime events.

The loop that receives events answers at once what needs no model: settings, beginnings and ends of
speech, cancellation. Everything else is done in order by one task: it reads sound into the chat's
cache while the user speaks, and begins answers. Another task sends the pieces of an answer.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import soxr
from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from oscar_mm.apps.serve.completed import CompletedAnswer
from oscar_mm.apps.serve.fair_queue import Slot, token_cost
from oscar_mm.apps.serve.field_error import FieldError
from oscar_mm.apps.serve.metrics import AnswerTimes
from oscar_mm.apps.serve.realtime_events import (
    RATE,
    AudioAppend,
    AudioClear,
    AudioCommit,
    ClientEvent,
    EventError,
    Item,
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
    ResponseCancel,
    ResponseCreate,
    ResponseFields,
    SessionFields,
    SessionUpdate,
    merged,
    read_event,
    samples_of,
)
from oscar_mm.apps.serve.refusals import ClientGone, Refusal, as_refusals
from oscar_mm.apps.serve.spoken import checked_speaker, pcm16
from oscar_mm.apps.turn_detection import Began, Ended, SpeechDetector
from oscar_mm.chat.chat import Chat
from oscar_mm.chat.history import PastTurn
from oscar_mm.engine.answer import Answer, AnswerStream
from oscar_mm.engine.async_pieces import AsyncPieces
from oscar_mm.engine.message import Message
from oscar_mm.engine.speech import Speech
from oscar_mm.errors import Cancelled, InputError, MemoryBusy
from oscar_mm.media.resample import MIN_SECONDS
from oscar_mm.media.resample import RATE as HEARD_RATE
from oscar_mm.modality import Modality

if TYPE_CHECKING:
    from oscar_mm.apps.serve.service import Service

_WAITING_S = 30
"""Seconds of sound that wait to be read; then the server stops receiving until they are."""
_MAX_ITEMS = 4096
_PCM = {"type": "audio/pcm", "rate": RATE}


@dataclass(eq=False)
class _Entry:
    """An item of the conversation.

    Attributes:
        item: the item in the API's fields.
        message: the message of an item of text; None for a recording.
        turn: number of the chat's turn that contains it; None while it is not answered.
        medium: number of its recording in that turn; None if it has none.
        tokens: number of tokens of an answer.
        speech_ms: milliseconds of speech of an answer that were sent.
        frames_per_ms: frames of speech in a millisecond.
        is_said: whether that is all of it.
    """

    item: dict[str, Any]
    message: Message | None = None
    turn: int | None = None
    medium: int | None = None
    tokens: int = 0
    speech_ms: int = 0
    frames_per_ms: float = 0.0
    is_said: bool = True


@dataclass(eq=False)
class _Response:
    """An answer from its request to its last event.

    Attributes:
        fields: settings of this answer.
        speaks: whether it is spoken.
        entry: item of the answer.
        cut: future that is done when the answer is to end early, with the reason.
        done: future that is done after the last event.
        is_begun: whether its turn has come.
        asked: items that it answers.
    """

    fields: ResponseFields
    speaks: bool
    entry: _Entry
    cut: asyncio.Future[None]
    done: asyncio.Future[None]
    id: str = field(default_factory=lambda: f"resp_{uuid4().hex}")
    reason: str = "client_cancelled"
    is_begun: bool = False
    asked: list[_Entry] = field(default_factory=list)
    text: str = ""
    samples: int = 0


class RealtimeSession:
    """One session, which lives as long as its connection.

    Args:
        service: service of the server.
        chat: new chat, which the session closes.
        model: name of the model that the client has asked for; None for the served one.
        client: names that identify the client; see ``Request``.
        send: function that sends a JSON value to the client.
        threads: limit on the threads of all sessions.
    """

    def __init__(
        self,
        service: Service,
        chat: Chat,
        model: str | None,
        client: tuple[str, ...],
        send: Callable[[dict[str, Any]], Awaitable[None]],
        threads: CapacityLimiter,
    ) -> None:
        self.service, self.client, self._send_json = service, client, send
        self._pipe, self._threads = service.conversations.pipe, threads
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._id, self._chat, chat.client = f"sess_{uuid4().hex}", chat, client
        self._hears = Modality.AUDIO in self._pipe.family.reads
        talker = self._pipe.family.talker
        self._speaks = talker is not None and bool(talker.speakers)
        heard = partial(self._chat.listen, HEARD_RATE, speak=self._speaks)
        self._listening = heard() if self._hears else None
        self._entries: dict[str, _Entry] = {}
        self._unanswered: list[_Entry] = []
        self._later: list[_Entry] = []
        """Texts that came during a recording, and follow it."""
        self._response: _Response | None = None
        self._worker: asyncio.Task[None] | None = None
        self._delivery: asyncio.Task[None] | None = None
        self._work: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._waiting = 0
        """Samples that wait to be read."""
        self._drained = asyncio.Event()
        self._resampler = _resampler()
        self._received = self._uncommitted = 0
        """Samples of the session, and those of the current recording."""
        self._speech_id = _item_id()
        """Id of the item that the current recording becomes."""
        self._settings = self._first_settings(service.answering(model))
        self._detector: SpeechDetector | None = None
        self._set_detector()

    def _first_settings(self, model: str) -> dict[str, Any]:
        detection = SessionFields.model_validate(
            {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
        )
        settings = {
            "id": self._id,
            "object": "realtime.session",
            "type": "realtime",
            "model": model,
            "output_modalities": ["audio"] if self._speaks else ["text"],
            "instructions": "",
            "max_output_tokens": "inf",
            "tools": [],
            "tool_choice": "none",
            "truncation": "disabled",
            "expires_at": int(time() + self.service.limits.realtime_s),
            "audio": {
                "input": {"format": _PCM, "transcription": None, "noise_reduction": None},
                "output": {"format": _PCM, "speed": 1.0},
            },
        }
        if self._listening is not None and self._listening.speaker is not None:
            settings["audio"]["output"]["voice"] = self._listening.speaker
        if self._hears:
            return merged(settings, detection)
        settings["audio"]["input"]["turn_detection"] = None
        return settings

    def _set_detector(self) -> None:
        given = self._settings["audio"]["input"]["turn_detection"]
        if given is None:
            self._detector = None
            return
        how = given["threshold"], given["prefix_padding_ms"], given["silence_duration_ms"]
        self._detector = SpeechDetector(*how, self._received)

    # Events of the client.

    async def begin(self) -> None:
        """Send the first event, and begin to work."""
        self._worker = asyncio.ensure_future(self._work_on())
        await self._tell("session.created", session=self._settings)

    async def take(self, data: str | bytes) -> None:
        """Handle an event; what is wrong with it is told to the client."""
        event_id = None
        try:
            event = read_event(data)
            event_id = event.event_id
            await self._handle(event)
        except EventError as error:
            await self._refuse(_refusal_of(error), error.event_id)
        except InputError as error:
            await self._refuse(_refusal_of(error), event_id)
        except Refusal as error:
            await self._refuse(error, event_id)

    async def _handle(self, event: ClientEvent) -> None:
        match event:
            case AudioAppend():
                await self._append(event)
            case AudioCommit():
                await self._commit_buffer()
            case AudioClear():
                self._clear()
                await self._tell("input_audio_buffer.cleared")
            case SessionUpdate():
                await self._update(event.session)
                await self._tell("session.updated", session=self._settings)
            case ItemCreate():
                await self._create(event)
            case ItemRetrieve():
                entry = self._entry(event.item_id)
                await self._tell("conversation.item.retrieved", item=entry.item)
            case ItemDelete():
                self._entry(event.item_id)
                self._do(partial(self._delete, event.item_id), event)
            case ItemTruncate():
                self._begin_truncating(event)
            case ResponseCreate():
                self._ask(event.response or ResponseFields(), event)
            case ResponseCancel():
                self._cancel_asked(event)

    async def _update(self, given: SessionFields) -> None:
        """Change settings; a fault in one of them changes none."""
        self.service.check_model(given.model)
        if given.model and given.model != self._settings["model"]:
            raise FieldError("cannot change within a session", "session.model")
        new = merged(self._settings, given)
        self._check_modalities(new["output_modalities"], "session.output_modalities")
        output, voice = new["audio"]["output"], None
        if given.audio is not None and given.audio.output is not None:
            voice = given.audio.output.voice
        if voice is not None:
            names = {"field": "session.audio.output.voice", "asks": "session.output_modalities"}
            output["voice"] = checked_speaker(self._pipe, voice, **names)
        if new["audio"]["input"]["turn_detection"] is not None:
            self._check_hears()
        if (text := given.instructions) and text != self._settings["instructions"]:
            await self._in_thread(partial(self._pipe.check_text, "instructions", text))
        detection = self._settings["audio"]["input"]["turn_detection"]
        said, self._settings = self._settings["instructions"], new
        if new["audio"]["input"]["turn_detection"] != detection:
            self._set_detector()
        if new["instructions"] != said or voice is not None:
            self._do(partial(self._instruct, new["instructions"], output.get("voice")), None)

    async def _instruct(self, text: str, voice: str | None) -> None:
        """Change the voice, and the system prompt; once it was read, a system message follows."""
        chat, listening = self._chat, self._listening
        if listening is not None:
            listening.speaker = voice
        begun = chat.turns or (listening is not None and listening.read_tokens)
        if not begun:
            chat.system = text or None
        elif text and text != chat.system:
            chat.system = text
            await self._add_text(_Entry({}, Message("system", (text,), "instructions")))

    async def _append(self, event: AudioAppend) -> None:
        self._check_hears()
        given = samples_of(event.audio, "audio")
        samples = self._resampler.resample_chunk(given)
        await self._add(samples)
        while self._waiting > _WAITING_S * HEARD_RATE and not self._gone.done():
            self._drained.clear()
            await self._drained.wait()

    async def _add(self, samples: np.ndarray) -> None:
        """Add samples at 16 kHz, and find out what the user says."""
        self._received += len(samples)
        if self._detector is None:
            self._keep(samples)
            return
        for found in self._detector.push(samples):
            if isinstance(found, Began):
                await self._begin_speech(found)
            elif isinstance(found, Ended):
                await self._end_speech(found)
            else:
                self._keep(found)

    def _keep(self, samples: np.ndarray) -> None:
        """Have samples read that belong to the current recording."""
        if len(samples):
            self._uncommitted += len(samples)
            self._waiting += len(samples)
            self._do(partial(self._hear, samples), None)

    async def _begin_speech(self, found: Began) -> None:
        at = {"audio_start_ms": found.at * 1000 // HEARD_RATE, "item_id": self._speech_id}
        await self._tell("input_audio_buffer.speech_started", **at)
        if self._detection["interrupt_response"]:
            self._cut("turn_detected")

    async def _end_speech(self, found: Ended) -> None:
        at = {"audio_end_ms": found.at * 1000 // HEARD_RATE, "item_id": self._speech_id}
        await self._tell("input_audio_buffer.speech_stopped", **at)
        await self._commit()
        if not self._detection["create_response"]:
            return
        if self._response is None:
            self._ask(ResponseFields(), None)
        elif self._response.cut.done():
            self._do(partial(self._ask_after, self._response), None)

    async def _ask_after(self, response: _Response) -> None:
        """Ask for an answer once another one, which the user has interrupted, has ended."""
        await response.done
        if self._response is None and not self._uncommitted:
            self._ask(ResponseFields(), None)

    @property
    def _detection(self) -> dict[str, Any]:
        return self._settings["audio"]["input"]["turn_detection"]

    async def _commit_buffer(self) -> None:
        self._check_hears()
        if self._detector is None:
            await self._add(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))
            self._resampler = _resampler()
        if self._uncommitted < MIN_SECONDS * HEARD_RATE:
            raise Refusal(
                400,
                f"the input audio buffer has {self._uncommitted / HEARD_RATE:.3f} s, but an item "
                f"must have at least {MIN_SECONDS:g} s: append more",
                code="input_audio_buffer_commit_empty",
            )
        await self._commit()
        self._set_detector()

    async def _commit(self) -> None:
        """Make the current recording an item."""
        item = _message(self._speech_id, "user", [{"type": "input_audio", "transcript": None}])
        previous = self._last_id
        self._speech_id, self._uncommitted = _item_id(), 0
        committed = {"previous_item_id": previous, "item_id": item["id"]}
        await self._tell("input_audio_buffer.committed", **committed)
        await self._add_item(_Entry(item))
        self._do(partial(self._end_recording, self._entries[item["id"]]), None)

    def _clear(self) -> None:
        self._resampler, self._uncommitted = _resampler(), 0
        self._set_detector()
        if self._listening is not None:
            self._do(self._discard, None)

    async def _create(self, event: ItemCreate) -> None:
        given = event.item
        if event.previous_item_id not in (None, self._last_id):
            raise FieldError("items can only be added at the end: leave it out", "previous_item_id")
        if given.id is not None and given.id in self._entries:
            raise FieldError("is the id of another item", "item.id")
        samples, message = await self._in_thread(partial(self._content, given))
        content = [
            {"type": part.type, "text": part.text} if part.audio is None else {"type": part.type}
            for part in given.content
        ]
        entry = _Entry(_message(given.id or _item_id(), given.role, content), message)
        await self._add_item(entry)
        if samples is not None:
            self._waiting += len(samples)
            self._do(partial(self._hear, samples), event)
            self._do(partial(self._end_recording, entry), event)
        elif given.role == "assistant":
            self._do(partial(self._add_answer, entry), event)
        else:
            self._do(partial(self._add_text, entry), event)

    def _content(self, item: Item) -> tuple[np.ndarray | None, Message | None]:
        """Return the sound of an item of sound, or the message of an item of text."""
        sounds = [part for part in item.content if part.type == "input_audio"]
        if not sounds:
            texts = tuple(part.text or "" for part in item.content)
            message = Message(item.role, texts, "item.content")
            self._pipe.admission.check_message(message)
            if not message.text.strip():
                raise FieldError("must not be empty", "item.content")
            return None, message
        self._check_hears()
        if len(item.content) > 1 or item.role != "user":
            raise FieldError(
                "audio must be the only part of a user's item: send texts as other items",
                "item.content",
            )
        samples = samples_of(sounds[0].audio or "", "item.content[0].audio")
        if len(samples) < MIN_SECONDS * RATE:
            raise FieldError(f"must have at least {MIN_SECONDS:g} s", "item.content[0].audio")
        return soxr.resample(samples, RATE, HEARD_RATE), None

    def _begin_truncating(self, event: ItemTruncate) -> None:
        entry = self._entry(event.item_id)
        if entry.item["role"] != "assistant":
            raise FieldError("only items of the assistant can be truncated", "item_id")
        if self._response is not None and self._response.entry is entry:
            self._cut("client_cancelled")
        self._do(partial(self._truncate, entry, event.audio_end_ms), event)

    def _cancel_asked(self, event: ResponseCancel) -> None:
        response = self._response
        if response is None or event.response_id not in (None, response.id):
            message = "there is no such active response"
            raise Refusal(400, message, code="response_cancel_not_active")
        self._cut("client_cancelled")

    def _ask(self, fields: ResponseFields, event: ResponseCreate | None) -> None:
        """Ask for an answer, after all that was sent before."""
        if (active := self._response) is not None:
            raise Refusal(
                400,
                f"the response {active.id} is in progress: wait until it is done, or cancel it",
                code="conversation_already_has_active_response",
            )
        if self._uncommitted:
            raise Refusal(
                400,
                "the input audio buffer is not committed: commit or clear it first",
                code="input_audio_buffer_not_committed",
            )
        wanted = fields.output_modalities or self._settings["output_modalities"]
        self._check_modalities(wanted, "response.output_modalities")
        output = None if fields.audio is None else fields.audio.output
        if output is not None and output.voice is not None:
            raise FieldError("is set by session.update", "response.audio.output.voice")
        loop = asyncio.get_running_loop()
        entry = _Entry(_message(_item_id(), "assistant", [], "in_progress"))
        cut, done = loop.create_future(), loop.create_future()
        self._response = _Response(fields, "audio" in wanted, entry, cut, done)
        self._do(partial(self._answer, self._response), event)

    def _cut(self, reason: str) -> None:
        """End the active answer, if there is one."""
        response = self._response
        if response is not None and not response.cut.done():
            response.reason = reason
            response.cut.set_result(None)
            self._chat.stop()

    # What is done in order.

    def _do(self, action: Callable[[], Awaitable[None]], event: ClientEvent | None) -> None:
        """Do something after all that is to be done before.

        Args:
            action: what to do.
            event: event that asks for it, for errors; None if none does.
        """
        event_id = None if event is None else event.event_id

        async def guarded() -> None:
            try:
                with as_refusals():
                    await action()
            except ClientGone:
                pass
            except Refusal as error:
                await self._refuse(error, event_id)

        self._work.put_nowait(guarded)

    async def _work_on(self) -> None:
        """Do everything in order, until the task is cancelled."""
        while True:
            await (await self._work.get())()

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await run_sync(function, limiter=self._threads)

    async def _hear(self, samples: np.ndarray) -> None:
        listening, reads = self._listening, self._response is None
        assert listening is not None
        try:
            await self._in_thread(partial(listening.hear, samples, read=reads))
        except InputError:
            await self._discard()
            raise
        finally:
            self._waiting -= len(samples)
            self._drained.set()

    async def _discard(self) -> None:
        if self._listening is not None:
            await self._in_thread(self._listening.discard)

    async def _catch_up(self) -> None:
        if self._listening is not None and self._response is None:
            await self._in_thread(self._listening.catch_up)

    async def _end_recording(self, entry: _Entry) -> None:
        assert self._listening is not None
        if not self._listening.is_recording:
            raise FieldError("the sound could not be read, and was discarded", "audio")
        await self._in_thread(self._listening.commit)
        self._unanswered.append(entry)
        later, self._later = self._later, []
        for text in later:
            await self._add_text(text)

    async def _add_text(self, entry: _Entry) -> None:
        if self._listening is not None and self._listening.is_recording:
            self._later.append(entry)
            return
        self._unanswered.append(entry)
        if self._listening is not None and entry.message is not None:
            await self._in_thread(partial(self._listening.add, entry.message))

    async def _add_answer(self, entry: _Entry) -> None:
        """Add an answer of the client to the texts that are not answered."""
        messages = [one.message for one in self._unanswered if one.message is not None]
        answer, listening = entry.message, self._listening
        if answer is None or not messages or len(messages) < len(self._unanswered):
            self._entries.pop(entry.item["id"], None)
            raise FieldError("an assistant's item must follow texts of the user", "item.role")
        tell = self._tell_past if listening is None else listening.tell
        await self._in_thread(partial(tell, answer))
        self._answered(self._unanswered, entry)

    def _tell_past(self, answer: Message) -> None:
        messages = [one.message for one in self._unanswered if one.message is not None]
        self._chat.tell_all([PastTurn(messages, answer)])

    def _answered(self, asked: Sequence[_Entry], answer: _Entry) -> None:
        """Note that the last turn of the chat consists of some items and their answer."""
        turn, recordings = len(self._chat.turns) - 1, itertools.count()
        for entry in (*asked, answer):
            entry.turn = turn
            if entry.message is None and entry is not answer:
                entry.medium = next(recordings)
        self._unanswered = [entry for entry in self._unanswered if entry not in asked]

    async def _delete(self, item_id: str) -> None:
        entry = self._entry(item_id)
        listening = self._listening
        if entry.turn is None or entry.medium is None:
            raise FieldError("only recordings that were answered can be deleted", "item_id")
        if self._response is not None or (listening and listening.read_tokens):
            raise FieldError("cannot be deleted while something is heard or said", "item_id")
        await self._in_thread(partial(self._forget, entry.turn, entry.medium))
        del self._entries[item_id]
        await self._tell("conversation.item.deleted", item_id=item_id)

    def _forget(self, turn: int, medium: int) -> None:
        of_turn = [one for one in self._chat.segments if one.turn == turn and one.modality]
        self._chat.forget(of_turn[medium])

    async def _truncate(self, entry: _Entry, end_ms: int) -> None:
        response, listening = self._response, self._listening
        if response is not None and response.is_begun:
            await response.done
        if entry.turn != len(self._chat.turns) - 1 or not entry.speech_ms:
            raise FieldError("only the last spoken answer can be truncated", "item_id")
        if listening is not None and listening.read_tokens:
            raise FieldError("what follows the answer was read already", "item_id")
        if end_ms > entry.speech_ms:
            raise FieldError(f"the answer lasts {entry.speech_ms} ms", "audio_end_ms")
        whole = math.ceil(entry.tokens * end_ms / entry.speech_ms)
        await self._shorten(entry, whole if entry.is_said else _said_at_most(entry, end_ms))
        entry.speech_ms = end_ms
        told = {"item_id": entry.item["id"], "content_index": 0, "audio_end_ms": end_ms}
        await self._tell("conversation.item.truncated", **told)

    async def _shorten(self, entry: _Entry, tokens: int) -> None:
        """Remove all but the first tokens of the last answer."""
        if (count := entry.tokens - tokens) > 0:
            await self._in_thread(partial(self._chat.shorten_answer, count))
            entry.tokens = tokens
            for part in entry.item["content"]:
                part["transcript"] = self._chat.turns[-1].answer

    async def _answer(self, response: _Response) -> None:
        """Begin an answer; another task sends its pieces."""
        response.is_begun, response.asked = True, [*self._unanswered]
        arrival = perf_counter()
        created = self._response_fields(response, "in_progress")
        await self._tell("response.created", response=created)
        slot: Slot | None = None
        try:
            [slot] = await self.service.places.take(self.client, response.cut)
            self.service.metrics.running.inc()
            with as_refusals():
                stream, pieces, first = await self._first_piece(response)
        except BaseException as error:
            if slot is not None:
                self._release(slot)
            await self._fail(response, error)
            if not isinstance(error, Refusal):
                raise
            return
        times = AnswerTimes(self.service.metrics, arrival)
        delivering = self._deliver(response, slot, stream, pieces, first, times)
        self._delivery = asyncio.ensure_future(delivering)

    async def _first_piece(
        self, response: _Response
    ) -> tuple[AnswerStream, AsyncPieces[str | Speech], str | Speech | None]:
        """Read the question, and return the stream of the answer with its first piece."""
        deadline = perf_counter() + self.service.limits.memory_wait_s
        places, conversations = self.service.places, self.service.conversations
        while True:
            try:
                stream = await self._in_thread(partial(self._stream, response))
                if response.cut.done():
                    self._chat.stop()
                pieces = stream.async_with_speech()
                return stream, pieces, await anext(pieces, None)
            except Cancelled:
                raise ClientGone from None
            except MemoryBusy:
                if (left := deadline - perf_counter()) <= 0:
                    raise
                if not await run_sync(conversations.give_way):
                    await places.wait_for_memory(response.cut, left)

    def _stream(self, response: _Response) -> AnswerStream:
        """Ask what was not answered, in a thread."""
        options: dict[str, Any] = {}
        longest = response.fields.max_output_tokens or self._settings["max_output_tokens"]
        if longest != "inf":
            options["max_new_tokens"] = longest
        temperature = response.fields.temperature
        temperature = self._settings.get("temperature") if temperature is None else temperature
        if temperature is not None:
            options["temperature"] = temperature
        self.service.bound_answer(options)
        if not self._unanswered:
            raise InputError("there is nothing to answer: create an item first")
        if (listening := self._listening) is not None:
            return listening.stream(speak=response.speaks, **options)
        messages = [one.message for one in self._unanswered if one.message is not None]
        return self._chat.stream(messages=messages, cut_to_fit=True, **options)

    async def _deliver(
        self,
        response: _Response,
        slot: Slot,
        stream: AnswerStream,
        pieces: AsyncPieces[str | Speech],
        first: str | Speech | None,
        times: AnswerTimes,
    ) -> None:
        """Send the pieces of an answer, then its last events."""
        try:
            with as_refusals():
                await self._open_item(response)
                if first is not None:
                    await self._send_piece(response, first, times)
                async for piece in pieces:
                    await self._send_piece(response, piece, times)
                await self._finish(response, slot, stream.result, times)
        except Refusal as error:
            await self._fail(response, error)
        finally:
            pieces.close()
            self._release(slot)

    def _release(self, slot: Slot) -> None:
        self.service.metrics.running.dec()
        self.service.places.release(slot)

    async def _open_item(self, response: _Response) -> None:
        item = response.entry.item
        kind = "audio" if response.speaks else "text"
        part = {"type": kind, "transcript" if response.speaks else "text": ""}
        place = {"response_id": response.id, "output_index": 0}
        await self._tell("response.output_item.added", item=item, **place)
        await self._add_item(response.entry, done=False)
        where = place | {"item_id": item["id"], "content_index": 0}
        await self._tell("response.content_part.added", part=part, **where)

    async def _send_piece(
        self, response: _Response, piece: str | Speech, times: AnswerTimes
    ) -> None:
        if response.cut.done():
            return
        if isinstance(piece, Speech):
            response.samples += len(piece.samples)
            delta = base64.b64encode(pcm16(piece.samples)).decode()
            await self._tell_part(response, "response.output_audio.delta", delta=delta)
            return
        times.note()
        response.text += piece
        kind = "audio_transcript" if response.speaks else "text"
        await self._tell_part(response, f"response.output_{kind}.delta", delta=piece)

    async def _tell_part(self, response: _Response, kind: str, **fields: Any) -> None:
        place = {"item_id": response.entry.item["id"], "output_index": 0, "content_index": 0}
        await self._tell(kind, response_id=response.id, **place, **fields)

    async def _finish(
        self, response: _Response, slot: Slot, answer: Answer, times: AnswerTimes
    ) -> None:
        """Send the last events of an answer that is a turn of the chat now."""
        entry, turn = response.entry, self._chat.turns[-1]
        self._answered(response.asked, entry)
        entry.tokens = len(answer.token_ids)
        entry.speech_ms = response.samples * 1000 // RATE
        if answer.speech is not None and len(answer.speech):
            entry.frames_per_ms = answer.speech_tokens * RATE / (1000 * len(answer.speech))
        was_cut = response.cut.done()
        entry.is_said = not was_cut
        completed = CompletedAnswer(answer, turn.start, turn.start + answer.prompt_tokens)
        slot.cost = token_cost(answer.prompt_tokens, completed.tokens)
        times.end(completed)
        status = "completed" if answer.finish_reason == "stop" else "incomplete"
        status = "cancelled" if was_cut else status
        text = {"transcript" if response.speaks else "text": response.text}
        kind = "output_audio" if response.speaks else "output_text"
        entry.item["content"] = [{"type": kind, **text}]
        entry.item["status"] = "completed" if status == "completed" else "incomplete"
        if was_cut and response.speaks:
            # What was not sent was not heard.
            await self._shorten(entry, _said_at_most(entry, entry.speech_ms))
        if response.speaks:
            await self._tell_part(response, "response.output_audio.done")
            await self._tell_part(response, "response.output_audio_transcript.done", **text)
        else:
            await self._tell_part(response, "response.output_text.done", **text)
        part = {"type": "audio" if response.speaks else "text", **text}
        await self._tell_part(response, "response.content_part.done", part=part)
        place = {"response_id": response.id, "output_index": 0}
        await self._tell("response.output_item.done", item=entry.item, **place)
        await self._tell("conversation.item.done", item=entry.item, previous_item_id=None)
        await self._end_response(response, status, usage=_usage(completed))

    async def _fail(self, response: _Response, error: BaseException) -> None:
        """Send the last event of an answer without text."""
        if response.cut.done() or isinstance(error, asyncio.CancelledError):
            await self._end_response(response, "cancelled")
            return
        refusal = error if isinstance(error, Refusal) else Refusal(500, "the answer failed")
        self._count_refusal(refusal)
        about = {"type": refusal.kind, "code": refusal.code, "message": str(refusal)}
        self._entries.pop(response.entry.item["id"], None)
        await self._end_response(response, "failed", error=about)

    async def _end_response(
        self,
        response: _Response,
        status: str,
        *,
        usage: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> None:
        reasons = {"cancelled": response.reason, "incomplete": "max_output_tokens"}
        details = {"type": status, "reason": reasons.get(status), "error": error}
        self._response = None
        if not response.done.done():
            response.done.set_result(None)
        self._do(self._catch_up, None)
        fields = self._response_fields(response, status)
        details = {name: value for name, value in details.items() if value is not None}
        fields |= {"status_details": details, "usage": usage}
        await self._tell("response.done", response=fields)

    def _response_fields(self, response: _Response, status: str) -> dict[str, Any]:
        fields, entry = response.fields, response.entry
        longest = fields.max_output_tokens or self._settings["max_output_tokens"]
        return {
            "id": response.id,
            "object": "realtime.response",
            "status": status,
            "status_details": None,
            "conversation_id": f"conv_{self._id.removeprefix('sess_')}",
            "output": [entry.item] if entry.turn is not None else [],
            "output_modalities": ["audio"] if response.speaks else ["text"],
            "max_output_tokens": longest,
            "metadata": fields.metadata,
            "audio": {"output": self._settings["audio"]["output"]},
            "usage": None,
        }

    # What the client is told.

    async def _add_item(self, entry: _Entry, *, done: bool = True) -> None:
        if len(self._entries) >= _MAX_ITEMS:
            raise FieldError(f"a session has at most {_MAX_ITEMS:,} items", "item")
        previous = self._last_id
        self._entries[entry.item["id"]] = entry
        about = {"item": entry.item, "previous_item_id": previous}
        await self._tell("conversation.item.added", **about)
        if done:
            await self._tell("conversation.item.done", **about)

    @property
    def _last_id(self) -> str | None:
        return next(reversed(self._entries), None)

    def _entry(self, item_id: str) -> _Entry:
        if (entry := self._entries.get(item_id)) is None:
            raise FieldError("is not the id of an item of this conversation", "item_id")
        return entry

    def _check_hears(self) -> None:
        if not self._hears:
            name = self._pipe.family.name
            raise FieldError(f"{name} does not support audio: send texts", "audio")

    def _check_modalities(self, wanted: Sequence[str], field: str) -> None:
        if "audio" in wanted and self._settings["audio"]["output"].get("voice") is None:
            raise FieldError(
                'this model answers in text only: use ["text"], or serve a checkpoint with a '
                "talker, such as Qwen/Qwen3-Omni-30B-A3B-Instruct",
                field,
            )

    async def _tell(self, kind: str, **fields: Any) -> None:
        if not self._gone.done():
            event = {"type": kind, "event_id": f"event_{uuid4().hex}", **fields}
            await self._send_json(event)

    async def _refuse(self, error: Refusal, event_id: str | None) -> None:
        """Tell the client what is wrong; the session goes on."""
        self._count_refusal(error)
        about = error.body["error"] | {"event_id": event_id}
        await self._tell("error", error=about)

    def _count_refusal(self, error: Refusal) -> None:
        metrics = self.service.metrics
        metrics.requests.labels(str(error.status)).inc()
        if error.reason is not None:
            metrics.refusals.labels(error.reason).inc()

    async def close(self) -> None:
        """End the answer, and free the chat; call it once no event is handled any more."""
        self.leave()
        if self._worker is not None:
            self._worker.cancel()
        tasks = [task for task in (self._worker, self._delivery) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        await run_sync(self._free)

    def leave(self) -> None:
        """Send nothing more, since the client is gone, and end the answer."""
        if not self._gone.done():
            self._gone.set_result(None)
        self._drained.set()
        self._cut("client_cancelled")
        self._chat.cancel()

    def _free(self) -> None:
        if self._listening is not None:
            self._listening.close()
        self._chat.close()


def _resampler() -> Any:
    return soxr.ResampleStream(RATE, HEARD_RATE, 1, dtype="float32")


def _item_id() -> str:
    return f"item_{uuid4().hex}"


def _message(
    item_id: str, role: str, content: list[dict[str, Any]], status: str = "completed"
) -> dict[str, Any]:
    about = {"id": item_id, "object": "realtime.item", "type": "message", "status": status}
    return {**about, "role": role, "content": content}


def _refusal_of(error: InputError) -> Refusal:
    try:
        with as_refusals():
            raise error
    except Refusal as refusal:
        return refusal


def _said_at_most(entry: _Entry, ms: int) -> int:
    """Return how many tokens the first milliseconds of an answer say at most: one in a frame."""
    return math.ceil(entry.frames_per_ms * ms)


def _usage(completed: CompletedAnswer) -> dict[str, Any]:
    answer, read = completed.answer, completed.prompt_tokens
    heard = answer.memory.tokens["audio"]
    spoken = answer.speech_tokens
    return {
        "total_tokens": read + completed.tokens,
        "input_tokens": read,
        "output_tokens": completed.tokens,
        "input_token_details": {
            "text_tokens": max(0, read - heard),
            "audio_tokens": heard,
            "image_tokens": 0,
            "cached_tokens": completed.cached_tokens,
        },
        "output_token_details": {
            "text_tokens": completed.tokens - spoken,
            "audio_tokens": spoken,
        },
    }
