"""Events that clients of realtime sessions send, in the names of OpenAI's API."""

from __future__ import annotations

import base64
import binascii
import copy
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from oscar_mm.apps.serve.field_error import FieldError
from oscar_mm.apps.serve.protocol import parsed, refuse_unsupported, validated

RATE = 24_000
"""Samples per second of the API's audio, in both directions."""
_MAX_TEXT = 1 << 20
"""Maximum number of characters of a text, as a first bound; the context is the second."""
_MAX_PARTS = 64
_MAX_NAME, _MAX_TOOL_NAME = 64, 128
Id = Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
Text = Annotated[str, Field(max_length=_MAX_TEXT)]
Name = Annotated[str, Field(max_length=_MAX_NAME)]
Note = Annotated[str, Field(max_length=512)]
Modalities = Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=2)]
ToolChoice = str | dict[str, Any]
MaxTokens = Annotated[int, Field(ge=1)] | Literal["inf"]


class _Fields(BaseModel):
    """Base class of objects in events.

    Attributes:
        refused: unsupported fields, and the values (besides null) that change nothing.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def model_post_init(self, _: Any) -> None:
        """Raise FieldError if an unsupported field would change something."""
        refuse_unsupported(self.model_extra or {}, self.refused)


class AudioFormat(_Fields):
    """Format of audio: 16-bit little-endian samples."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Literal[24000] | None = None


class TurnDetection(_Fields):
    """How the server finds out that the user begins and ends to speak."""

    refused = {"idle_timeout_ms": ()}

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Field(ge=0, le=5000)] = 300
    silence_duration_ms: Annotated[int, Field(ge=100, le=10_000)] = 500
    create_response: bool = True
    interrupt_response: bool = True


class AudioTranscription(_Fields):
    """Settings for the transcription of recordings, see ``TranscriptionBody``."""

    refused = {"languages": ([],), "keywords": ([],), "delay": ()}

    model: str | None = None
    language: Name | None = None
    prompt: Text | None = None


class AudioInput(_Fields):
    """What the client sends."""

    refused = {"noise_reduction": ()}

    format: AudioFormat | None = None
    transcription: AudioTranscription | None = None
    turn_detection: TurnDetection | None = None


class AudioOutput(_Fields):
    """What the server sends."""

    refused = {"speed": (1, 1.0)}

    format: AudioFormat | None = None
    voice: Name | None = None


class Audio(_Fields):
    """Audio of both directions."""

    input: AudioInput | None = None
    output: AudioOutput | None = None


class SessionFields(_Fields):
    """Settings of a session, all of which may be missing."""

    refused = {
        "parallel_tool_calls": (True,),
        "prompt": (),
        "include": ([],),
        "tracing": (),
        "reasoning": (),
        "truncation": ("auto", "disabled"),
    }

    type: Literal["realtime"] = "realtime"
    model: str | None = None
    instructions: Text | None = None
    output_modalities: Modalities | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    audio: Audio | None = None


class ResponseFields(_Fields):
    """Settings of one response."""

    refused = {
        "conversation": ("auto",),
        "input": (),
        "instructions": (),
        "tools": (),
        "parallel_tool_calls": (True,),
        "prompt": (),
        "reasoning": (),
    }

    output_modalities: Modalities | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    tool_choice: ToolChoice | None = None
    metadata: Annotated[dict[Name, Note], Field(max_length=16)] | None = None
    audio: Audio | None = None


class ContentPart(_Fields):
    """Part of a message."""

    type: Literal["input_text", "input_audio", "input_image", "text", "output_text"]
    text: Text | None = None
    audio: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """The part as items show it: without its sound or image."""
        return {"type": self.type} | ({} if self.text is None else {"text": self.text})


class MessageItem(_Fields):
    """Message of a conversation."""

    id: Id | None = None
    type: Literal["message"]
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[ContentPart], Field(min_length=1, max_length=_MAX_PARTS)]


class CallItem(_Fields):
    """Tool call of an earlier answer."""

    id: Id | None = None
    type: Literal["function_call"]
    call_id: Id
    name: Annotated[str, Field(max_length=_MAX_TOOL_NAME)]
    arguments: Text


class CallOutputItem(_Fields):
    """Result of a tool call."""

    id: Id | None = None
    type: Literal["function_call_output"]
    call_id: Id
    output: Text


Item = Annotated[MessageItem | CallItem | CallOutputItem, Field(discriminator="type")]


class ClientEvent(_Fields):
    """Event of a client."""

    type: str
    event_id: Note | None = None


class SessionUpdate(ClientEvent):
    """Changes settings of the session."""

    session: SessionFields


class AudioAppend(ClientEvent):
    """Adds sound to the input."""

    audio: str


class AudioCommit(ClientEvent):
    """Makes the input an item of the conversation."""


class AudioClear(ClientEvent):
    """Forgets the input."""


class ItemCreate(ClientEvent):
    """Adds an item to the conversation."""

    previous_item_id: Id | None = None
    item: Item


class ItemRetrieve(ClientEvent):
    """Asks for an item."""

    item_id: Id


class ItemDelete(ClientEvent):
    """Removes an item."""

    item_id: Id


class ItemTruncate(ClientEvent):
    """Removes the end of an answer that the user has not heard."""

    item_id: Id
    content_index: Literal[0] = 0
    audio_end_ms: Annotated[int, Field(ge=0)]


class ResponseCreate(ClientEvent):
    """Asks for an answer."""

    response: ResponseFields | None = None


class ResponseCancel(ClientEvent):
    """Ends the answer."""

    response_id: Id | None = None


_KINDS: dict[str, type[ClientEvent]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": AudioAppend,
    "input_audio_buffer.commit": AudioCommit,
    "input_audio_buffer.clear": AudioClear,
    "conversation.item.create": ItemCreate,
    "conversation.item.retrieve": ItemRetrieve,
    "conversation.item.delete": ItemDelete,
    "conversation.item.truncate": ItemTruncate,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}


class EventError(FieldError):
    """Error in an event.

    Attributes:
        event_id: the client's name for the event; None if it has none.
    """

    def __init__(self, error: FieldError, event_id: str | None) -> None:
        super().__init__(str(error))
        self.field, self.event_id = error.field, event_id


def read_event(data: str | bytes) -> ClientEvent:
    """Parse an event of bounded length.

    Raises:
        EventError: if it is not a valid event of a known type.
    """
    try:
        event = parsed(ClientEvent, data if isinstance(data, bytes) else data.encode())
    except FieldError as error:
        raise EventError(error, None) from None
    try:
        if (kind := _KINDS.get(event.type)) is None:
            raise FieldError(f"must be one of {', '.join(_KINDS)}", "type")
        return validated(kind, {**(event.model_extra or {}), **event.__dict__})
    except FieldError as error:
        raise EventError(error, event.event_id) from None


def samples_of(audio: str, field: str) -> np.ndarray:
    """Return the (n,) float32 samples of base64 text with 16-bit samples.

    Raises:
        FieldError: if the text is something else.
    """
    try:
        data = base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError):
        raise FieldError("must be base64", field) from None
    if not data or len(data) % 2:
        raise FieldError(f"has {len(data)} bytes, but samples have 2 bytes each", field)
    return np.frombuffer(data, "<i2").astype(np.float32) / 32768


def merged(old: dict[str, Any], new: BaseModel) -> dict[str, Any]:
    """Return settings with those that an object sets; objects within are merged too.

    Null is a value only of ``turn_detection`` and ``transcription``; elsewhere it changes nothing.
    """
    found = copy.copy(old)
    for name in new.model_fields_set & type(new).model_fields.keys():
        value = getattr(new, name)
        if isinstance(value, TurnDetection | AudioTranscription):
            found[name] = value.model_dump(include={*type(value).model_fields})
        elif isinstance(value, BaseModel):
            found[name] = merged(found.get(name) or {}, value)
        elif value is not None or name in ("turn_detection", "transcription"):
            found[name] = value
    return found
