"""Requests of OpenAI's speech API, and the audio that answers them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi.responses import Response
from pydantic import ConfigDict, Field, model_validator

from oscar_mm.apps.serve.answer_set import Choice
from oscar_mm.apps.serve.field_error import FieldError
from oscar_mm.apps.serve.media_parts import StrictModel
from oscar_mm.apps.serve.protocol import ApiRequest, refuse_unsupported
from oscar_mm.apps.serve.refusals import Refusal
from oscar_mm.apps.serve.spoken import (
    MEDIA_TYPES,
    WHY_NOT_WAV,
    SoundEncoder,
    SpokenFormat,
    audio_file,
    checked_speaker,
)
from oscar_mm.engine.message import Message
from oscar_mm.engine.speech import Speech
from oscar_mm.errors import InputError
from oscar_mm.pipelines.omni import READ_ALOUD
from oscar_mm.pipelines.pipeline import Pipeline
from oscar_mm.tool_parsers.parser import Piece

SPEECH = "/v1/audio/speech"
_MAX_CHARACTERS = 4096
"""Maximum length of a text, in characters, as in OpenAI's API."""
_WHOLE = ("wav", "flac")
"""Formats of files that begin with their length; some readers of flac need it."""
_REFUSED: dict[str, tuple[Any, ...]] = {"instructions": ("",), "speed": (1,)}
"""Unsupported fields, and the values (besides null) that do not change the speech."""


class SpeechBody(StrictModel):
    """JSON body of a request to read a text aloud."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    input: Annotated[str, Field(min_length=1, max_length=_MAX_CHARACTERS)]
    voice: Annotated[str, Field(max_length=64)] | None = None
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm"] = "mp3"
    stream_format: Literal["audio", "sse"] = "audio"
    seed: int | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> SpeechBody:
        refuse_unsupported(self.model_extra or {}, _REFUSED)
        if self.stream_format == "sse" and self.response_format == "wav":
            raise FieldError(
                f"must be pcm, flac, mp3 or opus with stream_format: sse: {WHY_NOT_WAV}",
                "response_format",
            )
        return self

    def request(self, pipe: Pipeline) -> ApiRequest:
        """Convert the body to a request.

        Args:
            pipe: pipeline that speaks the text.

        Raises:
            FieldError: if the model cannot speak, or the voice or the text is refused.
        """
        speaker = checked_speaker(pipe, self.voice, field="voice", asks="model")
        try:
            pipe.script("the text", self.input)
        except InputError as error:
            raise FieldError(str(error), "input") from None
        return ApiRequest(
            model=self.model,
            system=None,
            past=(),
            question=(Message("user", (READ_ALOUD,), "input"),),
            sampling={} if self.seed is None else {"seed": self.seed},
            stream=self.stream_format == "sse" or self.response_format not in _WHOLE,
            user=self.user or "",
            spoken=SpokenFormat(speaker, self.response_format),
            script=self.input,
        )


class SpeechWriter:
    """Formats the speech of a text, see ``AnswerFormat``: it is sent as it is generated, and a file
    that begins with its length once it is complete.

    Args:
        body: the request.

    Attributes:
        media_type: media type of the response.
    """

    def __init__(self, body: SpeechBody) -> None:
        self._kind, self._has_events = body.response_format, body.stream_format == "sse"
        kind = "text/event-stream" if self._has_events else MEDIA_TYPES[self._kind]
        self.media_type: str = kind
        self._encoder = SoundEncoder(self._kind)

    def whole(self, choices: Sequence[Choice], _: Mapping[str, Any]) -> Response:
        """Return the response with a file."""
        answer = choices[0].completed.answer
        assert answer.speech is not None and answer.sample_rate is not None
        data = audio_file(answer.speech, answer.sample_rate, self._kind)
        return Response(data, media_type=self.media_type)

    def begin(self, _: int) -> Iterator[bytes]:
        """Yield nothing: the stream begins with the first samples."""
        return iter(())

    def piece(self, _: int, __: Piece, ___: object) -> Iterator[str]:
        """Yield nothing for a piece of the text, which the client knows."""
        return iter(())

    def speech(self, _: int, speech: Speech) -> Iterator[bytes]:
        """Encode a piece of speech, and yield the bytes that are ready."""
        self._encoder.write(speech.samples, speech.sample_rate)
        yield from self._taken()

    def _taken(self) -> Iterator[bytes]:
        data = self._encoder.take()
        if data and self._has_events:
            data = _event("speech.audio.delta", audio=base64.b64encode(data).decode())
        if data:
            yield data

    def end(self, _: int, choice: Choice) -> Iterator[bytes]:
        """Yield the rest of the audio, and the event after it."""
        self._encoder.close()
        yield from self._taken()
        if self._has_events:
            read, said = choice.completed.prompt_tokens, choice.completed.tokens
            usage = {"input_tokens": read, "output_tokens": said, "total_tokens": read + said}
            yield _event("speech.audio.done", usage=usage)

    def close(self, _: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield nothing: the last event contains the usage."""
        return iter(())

    def failed(self, refusal: Refusal) -> Iterator[bytes]:
        """Yield the event for speech that cannot be completed."""
        if self._has_events:
            yield f"data: {json.dumps(refusal.body)}\n\n".encode()

    def last(self) -> Iterator[bytes]:
        """Yield nothing: the stream ends with the speech."""
        return iter(())


def _event(kind: str, **fields: Any) -> bytes:
    return f"data: {json.dumps({'type': kind, **fields})}\n\n".encode()
