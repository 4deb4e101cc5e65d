"""Requests of OpenAI's audio API (multipart forms), converted to chat-completions requests.

A transcription is the model's answer to a question about the recording. The usual media limits
therefore apply, and models without audio support refuse the recording with the usual error.
"""

from __future__ import annotations

import base64
import re
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import FormParser, parse_options_header
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from oscar_mm.apps.serve.protocol import FieldError, validated
from oscar_mm.apps.serve.refusals import Refusal
from oscar_mm.media import MediaLimits
from oscar_mm.media.audio import audio_outline

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
_MAX_PARTS, _MAX_CHARACTERS = 32, 1 << 16
"""Maximum number of parts in a form, and of characters in its prompt."""
_LISTS = ("timestamp_granularities", "include")
"""Fields that may be repeated; their names may end with ``[]``."""
_MIN_TOKENS, _TOKENS_PER_SECOND = 256, 16
"""Token limit of a transcription: its minimum, and tokens per second of audio.

The limit is several times what speech needs. Clients cannot set a limit themselves, and without one
a model that repeats itself would fill its context."""
_PLACE = re.compile(r"messages\[0\](?:\.content)?(\[0\])?")
"""Pattern of the name of the recording or the text in errors of the chat-completions API."""


def _timeless(given: Any) -> Any:
    if given in ("verbose_json", "srt", "vtt", "diarized_json"):
        raise FieldError(
            "must be json or text, because the model generates no timestamps", "response_format"
        )
    return given


def _known(given: Any) -> Any:
    name = given.strip().lower() if isinstance(given, str) else given
    if name in (None, ""):
        return None
    if (code := TO_LANGUAGE_CODE.get(name, name)) not in LANGUAGES:
        raise FieldError(
            "must be an ISO 639-1 code such as en, or the English name of a language", "language"
        )
    return LANGUAGES[code].title()


class TranscriptionBody(BaseModel):
    """Fields of a transcription form; unknown fields are ignored."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    file: bytes
    model: str | None = None
    language: Annotated[str | None, BeforeValidator(_known)] = None
    prompt: Annotated[str, Field(max_length=_MAX_CHARACTERS)] | None = None
    response_format: Annotated[Literal["json", "text"], BeforeValidator(_timeless)] = "json"
    temperature: float = 0.0
    stream: bool = False
    timestamp_granularities: list[str] = []
    include: list[str] = []
    cache_salt: str | None = None

    def chat_body(self, *, translate: bool) -> dict[str, Any]:
        """Convert the request to a chat-completions body.

        Args:
            translate: whether to translate the recording into English.

        Raises:
            FieldError: if a field is not supported.
        """
        for name in _LISTS:
            if getattr(self, name):
                raise FieldError("is not supported: leave it out", name)
        sound = {"data": base64.b64encode(self.file).decode("ascii"), "format": "wav"}
        parts = [
            {"type": "input_audio", "input_audio": sound},
            {"type": "text", "text": self.instruction(translate=translate)},
        ]
        return {
            "model": self.model or None,
            "messages": [{"role": "user", "content": parts}],
            "temperature": self.temperature,
            "stream": self.stream,
            "cache_salt": self.cache_salt,
            "max_tokens": self._longest_text,
        }

    @property
    def _longest_text(self) -> int | None:
        """Return the maximum tokens of the text; None if the file's header lacks a duration."""
        sound = audio_outline(self.file, limits=MediaLimits())
        return None if sound is None else _MIN_TOKENS + round(sound.seconds * _TOKENS_PER_SECOND)

    def instruction(self, *, translate: bool) -> str:
        """Return the instruction for the model.

        Args:
            translate: whether to translate the recording into English.
        """
        spoken = "the audio" if self.language is None else f"the {self.language} audio"
        asked = f"Translate {spoken} into English." if translate else None
        asked = asked or f"Transcribe {spoken} into text."
        return asked if not self.prompt else f"{asked} It continues this text: {self.prompt}"


def read_form(data: bytes, content_type: str) -> TranscriptionBody:
    """Parse the form of a transcription request.

    Args:
        data: body of the request, of bounded length.
        content_type: Content-Type header of the request, including the boundary.

    Raises:
        FieldError: if the body is not a valid form, or a field is invalid.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise FieldError(
            "the request must be multipart/form-data, with the recording in the file field"
        )
    form: dict[str, Any] = {}
    parts = count(1)

    def add(part: Any) -> None:
        if next(parts) > _MAX_PARTS:
            raise FieldError(f"the form has more than {_MAX_PARTS} parts")
        name = (part.field_name or b"").decode(errors="replace")
        if (file := getattr(part, "file_object", None)) is not None:
            file.seek(0)
            form[name] = file.read()
        elif name.removesuffix("[]") in _LISTS:
            form.setdefault(name.removesuffix("[]"), []).append(_text(part, name))
        else:
            form[name] = _text(part, name)

    try:
        # Keep files in memory, because the body is in memory anyway.
        limits = {"MAX_MEMORY_FILE_SIZE": len(data) + 1}
        parser = FormParser(
            kind.decode(), add, add, boundary=options.get(b"boundary"), config=limits
        )
        parser.write(data)
        parser.finalize()
    except FormParserError as error:
        raise FieldError(f"the request is not a valid form ({str(error)[:200]})") from None
    if not form.get("file"):
        raise FieldError("must be a recording, but is missing or empty", "file")
    return validated(TranscriptionBody, form)


def renamed(refusal: Refusal) -> Refusal:
    """Rename the fields in a refusal to the names that the form uses."""

    def name(found: re.Match[str]) -> str:
        return "prompt" if found[1] is None else "file"

    refusal.args = (_PLACE.sub(name, str(refusal)),)
    refusal.field = refusal.field and _PLACE.sub(name, refusal.field)
    return refusal


def _text(part: Any, name: str) -> str:
    try:
        return (part.value or b"").decode()
    except UnicodeDecodeError:
        raise FieldError("must be UTF-8 text", name[:100]) from None
