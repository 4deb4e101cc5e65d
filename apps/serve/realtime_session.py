"""RealtimeSession: a conversation over a WebSocket, with OpenAI's realtime events.

The loop that receives events answers at once what needs no model: settings, beginnings and ends of
speech, cancellation. Everything else is done in order (``RealtimeTasks``): sound is read into the
chat's cache while the user speaks (``RealtimeSound``, ``RealtimeItems``), and answers begin
(``RealtimeResponses``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from time import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from anyio import CapacityLimiter

from oscar_mm.apps.serve.field_error import FieldError
from oscar_mm.apps.serve.kept_sessions import KeptSession
from oscar_mm.apps.serve.realtime_events import (
    RATE,
    AudioAppend,
    AudioClear,
    AudioCommit,
    ClientEvent,
    EventError,
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
)
from oscar_mm.apps.serve.realtime_items import RealtimeItems
from oscar_mm.apps.serve.realtime_responses import RealtimeResponses, Response, realtime_offer
from oscar_mm.apps.serve.realtime_sound import RealtimeSound
from oscar_mm.apps.serve.realtime_tasks import RealtimeTasks
from oscar_mm.apps.serve.realtime_transcriber import RealtimeTranscriber
from oscar_mm.apps.serve.refusals import Refusal, as_refusals
from oscar_mm.apps.serve.spoken import checked_speaker
from oscar_mm.chat.chat import Chat
from oscar_mm.errors import InputError
from oscar_mm.tool_parsers.offer import ToolOffer

if TYPE_CHECKING:
    from oscar_mm.apps.serve.service import Service

_PCM = {"type": "audio/pcm", "rate": RATE}


class RealtimeSession:
    """One session while it has a connection.

    Args:
        service: service of the server.
        state: new chat, or the session that the client resumes; the session closes it.
        model: name of the model that a new session has asked for; None for the served one.
        client: names that identify the client; see ``Request``.
        send: function that sends a JSON value to the client.
        threads: limit on the threads of all sessions.
        keeps: whether ``keep`` is to follow, instead of ``close``.
    """

    def __init__(
        self,
        service: Service,
        state: Chat | KeptSession,
        model: str | None,
        client: tuple[str, ...],
        send: Callable[[dict[str, Any]], Awaitable[None]],
        threads: CapacityLimiter,
        *,
        keeps: bool,
    ) -> None:
        self._service, self._pipe = service, service.conversations.pipe
        self._client, self._keeps = client, keeps
        self._tasks = RealtimeTasks(service.metrics, send, threads)
        if isinstance(state, KeptSession):
            self._items, self._settings, tools = state.items, state.settings, state.tools
            self._items.tasks = self._tasks
        else:
            max_size = service.limits.max_request_bytes
            self._items = RealtimeItems(state, self._tasks, service.media_source, max_size)
            self._settings, tools = self._first_settings(service.answering(model)), None
        self._items.chat.client = client
        self._settings["expires_at"] = int(time() + service.limits.realtime_s)
        parts = self._tasks, self._items
        self._responses = RealtimeResponses(service, client, *parts, self._settings)
        self._responses.tools = tools
        self._transcriber = RealtimeTranscriber(service, client, self._tasks)
        self._transcriber.use(self._settings["audio"]["input"]["transcription"])
        self._sound = RealtimeSound(
            *parts, self._transcriber, self._speech_began, self._speech_ended
        )
        self._sound.detect(self._detection)

    def _first_settings(self, model: str) -> dict[str, Any]:
        detection = SessionFields.model_validate(
            {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
        )
        settings = {
            "id": f"sess_{uuid4().hex}",
            "object": "realtime.session",
            "type": "realtime",
            "model": model,
            "output_modalities": ["audio"] if self._items.speaks else ["text"],
            "instructions": "",
            "max_output_tokens": "inf",
            "tools": [],
            "tool_choice": "auto",
            "truncation": "disabled",
            "audio": {
                "input": {"format": _PCM, "transcription": None, "noise_reduction": None},
                "output": {"format": _PCM, "speed": 1.0},
            },
        }
        if self._items.speaker is not None:
            settings["audio"]["output"]["voice"] = self._items.speaker
        if self._items.hears:
            return merged(settings, detection)
        settings["audio"]["input"]["turn_detection"] = None
        return settings

    @property
    def id(self) -> str:
        """The unguessable id of the session."""
        return self._settings["id"]

    @property
    def model(self) -> str:
        """Name of the session's model, which never changes."""
        return self._settings["model"]

    @property
    def _detection(self) -> dict[str, Any] | None:
        """Settings of the turn detection; None for push to talk."""
        return self._settings["audio"]["input"]["turn_detection"]

    async def begin(self) -> None:
        """Send the first events, and begin to work."""
        self._tasks.begin()
        await self._tasks.send_event("session.created", session=self._settings)
        await self._items.send_all()

    async def receive(self, data: str | bytes) -> None:
        """Handle an event; if it is invalid, send the client an error."""
        await self._tasks.wait_for_capacity()
        event_id = None
        try:
            event = read_event(data)
            event_id = event.event_id
            await self._handle(event)
        except EventError as error:
            await self._tasks.refuse(_refusal_of(error), error.event_id)
        except InputError as error:
            await self._tasks.refuse(_refusal_of(error), event_id)
        except Refusal as error:
            await self._tasks.refuse(error, event_id)

    async def _handle(self, event: ClientEvent) -> None:
        match event:
            case AudioAppend():
                await self._sound.append(event)
            case AudioCommit():
                await self._sound.commit()
            case AudioClear():
                self._sound.clear()
                await self._tasks.send_event("input_audio_buffer.cleared")
            case SessionUpdate():
                await self._update(event.session)
                await self._tasks.send_event("session.updated", session=self._settings)
            case ItemCreate():
                if event.item.id == self._sound.item_id:
                    raise FieldError("is the id of the current recording: leave it out", "item.id")
                entry, samples = await self._items.create(event)
                if samples is not None:
                    await self._sound.add_item(entry, samples, event)
            case ItemRetrieve():
                item = self._items.find(event.item_id).item
                await self._tasks.send_event("conversation.item.retrieved", item=item)
            case ItemDelete():
                self._items.find(event.item_id)
                self._tasks.enqueue(partial(self._items.delete, event.item_id), event)
            case ItemTruncate():
                self._begin_truncating(event)
            case ResponseCreate():
                await self._ask(event)
            case ResponseCancel():
                self._responses.cancel(event)

    async def _update(self, given: SessionFields) -> None:
        """Change settings; a fault in one of them changes none."""
        self._service.check_model(given.model)
        if given.model and given.model != self._settings["model"]:
            raise FieldError("cannot change within a session", "session.model")
        new = merged(self._settings, given)
        self._responses.check_modalities(new["output_modalities"], "session.output_modalities")
        output, voice = new["audio"]["output"], None
        if given.audio is not None and given.audio.output is not None:
            voice = given.audio.output.voice
        if voice is not None:
            names = {"field": "session.audio.output.voice", "asks": "session.output_modalities"}
            output["voice"] = checked_speaker(self._pipe, voice, **names)
        sound = new["audio"]["input"]
        if sound["turn_detection"] is not None or sound["transcription"] is not None:
            self._items.check_hears()
        self._transcriber.check(sound["transcription"])
        offer = await self._tasks.in_thread(partial(self._offer, new))
        if (text := given.instructions) and text != self._settings["instructions"]:
            await self._tasks.in_thread(partial(self._pipe.check_text, "instructions", text))
        detection, said = self._detection, self._settings["instructions"]
        if new["instructions"] != said:
            self._items.hold_instructions(new["instructions"])
        self._settings.update(new)
        self._responses.tools = offer
        if not self._is_begun:
            self._items.chat.tools = offer
        self._transcriber.use(sound["transcription"])
        if self._detection != detection:
            self._sound.detect(self._detection)
        if new["instructions"] != said or voice is not None:
            instruct = self._items.instruct
            self._tasks.enqueue(partial(instruct, new["instructions"], output.get("voice")))

    def _offer(self, new: dict[str, Any]) -> ToolOffer | None:
        """Return the tools of new settings, which cannot change once the conversation has begun."""
        tools, choice, old = new["tools"], new["tool_choice"], self._settings
        is_none, was_none = choice == "none", old["tool_choice"] == "none"
        if self._is_begun and (tools != old["tools"] or (tools and is_none != was_none)):
            raise FieldError(
                "can only change before the conversation begins: begin a new session",
                "session.tools",
            )
        ignore = self._service.limits.ignore_tools
        return realtime_offer(self._pipe, tools, choice, "session.tools", ignore_tools=ignore)

    @property
    def _is_begun(self) -> bool:
        """Whether the model may have read a part of the conversation."""
        return self._items.last_id is not None or self._sound.uncommitted > 0

    def _speech_began(self) -> None:
        if self._detection is not None and self._detection["interrupt_response"]:
            self._responses.cut("turn_detected")

    def _speech_ended(self) -> None:
        if self._detection is None or not self._detection["create_response"]:
            return
        if (active := self._responses.active) is None:
            self._responses.ask(ResponseFields())
        elif active.cut.done():
            self._tasks.enqueue(partial(self._ask_after, active))

    async def _ask_after(self, response: Response) -> None:
        """Ask for an answer once another one, which the user has interrupted, has ended."""
        await response.done
        if self._responses.active is None and not self._sound.uncommitted:
            self._responses.ask(ResponseFields())

    async def _ask(self, event: ResponseCreate) -> None:
        if self._sound.uncommitted and self._responses.active is None:
            raise Refusal(
                400,
                "the input audio buffer is not committed: commit or clear it first",
                code="input_audio_buffer_not_committed",
            )
        fields, tools = event.response or ResponseFields(), None
        if (choice := fields.tool_choice) is not None:
            tools = await self._tasks.in_thread(partial(self._responses.offer, choice))
        self._responses.ask(fields, event, tools)

    def _begin_truncating(self, event: ItemTruncate) -> None:
        entry = self._items.find(event.item_id)
        if entry.item.get("role") != "assistant":
            raise FieldError("only items of the assistant can be truncated", "item_id")
        active = self._responses.active
        if active is not None and active.entry is entry:
            self._responses.cut("client_cancelled")
        self._tasks.enqueue(partial(self._items.truncate, entry, event.audio_end_ms), event)

    async def keep(self) -> KeptSession:
        """End the answer as if it were interrupted, forget sound that is not committed, and return
        what the client can resume; call it once no event is handled any more.

        Raises:
            RuntimeError: if the session has failed; then ``close`` it.
        """
        self.disconnect()
        self._sound.clear()
        await self._tasks.drain()
        parts = self._items, self._settings, self._responses.tools
        return KeptSession(*parts, self._client[0], self._items.is_pinned)

    async def close(self) -> None:
        """End the answer, and free the chat; call it once no event is handled any more."""
        self.disconnect()
        self._items.chat.cancel()
        await self._tasks.close()
        await self._tasks.in_thread(self._items.close)

    def disconnect(self) -> None:
        """Send nothing more, since the client is gone, and end the answer."""
        self._tasks.disconnect()
        self._responses.cut("client_cancelled")
        if not self._keeps:
            self._items.chat.cancel()


def _refusal_of(error: InputError) -> Refusal:
    try:
        with as_refusals():
            raise error
    except Refusal as refusal:
        return refusal
