"""Spoken answers: their fields in requests, their audio files, and transcripts of earlier ones."""

from __future__ import annotations

import base64
import io
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

import numpy as np
from pydantic import Field

from oscar_mm.apps.serve.field_error import FieldError
from oscar_mm.apps.serve.media_parts import StrictModel
from oscar_mm.engine.speech import Speech
from oscar_mm.errors import InputError

if TYPE_CHECKING:
    import soundfile

    from oscar_mm.pipelines.pipeline import Pipeline

_FILES = {
    "wav": ("WAV", "PCM_16"),
    "flac": ("FLAC", "PCM_16"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "opus": ("OGG", "OPUS"),
}
"""Container and codec of each format, as libsndfile names them."""
_CONSTANT = {"bitrate_mode": "CONSTANT", "compression_level": 0.5}
"""Options of mp3: 80 kbit/s. libsndfile takes the length of a stream from its size and its first
frames, so with a variable bit rate it would leave out the end."""
_STREAMED = "pcm16, flac, mp3 or opus"
WHY_NOT_WAV = "a wav file begins with its length"
MEDIA_TYPES = {
    "wav": "audio/wav",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "pcm": "audio/pcm",
}
_MAX_NAME = 64
"""Maximum number of characters of ids and names."""
MAX_TRANSCRIPTS = 1024
_KEPT_S = 3600
"""Seconds for which an answer can be referred to by the id of its audio, as in OpenAI's API."""


class GivenAudio(StrictModel):
    """Voice and format of a spoken answer."""

    voice: Annotated[str, Field(max_length=_MAX_NAME)] | None = None
    format: Literal["wav", "mp3", "flac", "opus", "pcm16"] | None = None


class EarlierAudio(StrictModel):
    """Reference of an assistant's message to the audio of an earlier answer."""

    id: Annotated[str, Field(max_length=_MAX_NAME)]
    transcript: str | None = None


@dataclass(frozen=True)
class SpokenFormat:
    """Voice and audio format of an answer.

    Attributes:
        speaker: name of the voice in lower case.
        format: format of the audio.
    """

    speaker: str
    format: str


def check_modalities(given: list[str] | None, audio: GivenAudio | None, *, stream: bool) -> bool:
    """Check the fields that ask for speech, and return whether they do.

    Raises:
        FieldError: if a value is not supported, or the fields contradict each other.
    """
    asked = given or ["text"]
    if sorted(asked) not in (["text"], ["audio", "text"]):
        raise FieldError('must be ["text"] or ["text", "audio"]', "modalities")
    if "audio" not in asked:
        if audio is not None:
            raise FieldError('requires modalities: ["text", "audio"]', "audio")
        return False
    if stream and audio is not None and audio.format == "wav":
        raise FieldError(f"must be {_STREAMED} in a stream: {WHY_NOT_WAV}", "audio.format")
    return True


def checked_speaker(pipe: Pipeline, voice: str | None, *, field: str, asks: str) -> str:
    """Return the name of a voice in lower case.

    Args:
        pipe: pipeline that answers.
        voice: name of the voice that a request gives; None for the default.
        field: the API's name for the field with the voice.
        asks: the API's name for the field that asks for speech.

    Raises:
        FieldError: if the model has no talker or no such voice.
    """
    talker = pipe.family.talker
    if talker is None:
        raise FieldError(
            "this model answers in text only: for audio, serve a checkpoint with a talker, such as "
            "Qwen/Qwen3-Omni-30B-A3B-Instruct",
            asks,
        )
    try:
        return pipe.check_speech(voice)
    except InputError as error:
        known = voice is None or voice.lower() in talker.speakers
        message = str(error) if known else f"must be one of {', '.join(talker.speakers)}"
        raise FieldError(message, field) from None


def pcm16(samples: np.ndarray) -> bytes:
    """Return (samples,) float32 from -1 to 1 as 16-bit little-endian integers."""
    return (samples * 32767).round().astype("<i2").tobytes()


def audio_file(samples: np.ndarray, rate: int, kind: str) -> bytes:
    """Encode speech; takes up to seconds.

    Args:
        samples: (samples,) float32 from -1 to 1.
        rate: samples per second.
        kind: "wav", "mp3", "flac" or "opus"; "pcm16" or "pcm" for the samples alone.
    """
    encoder = SoundEncoder(kind)
    encoder.write(samples, rate)
    return encoder.close()


class SoundEncoder:
    """Encodes speech to a file, of which the beginning is known while it is written.

    Args:
        kind: see ``audio_file``.
    """

    def __init__(self, kind: str) -> None:
        self._kind, self._file, self._taken = kind, io.BytesIO(), 0
        self._sound: soundfile.SoundFile | None = None
        """Writer of the file; None before the first samples, and for the samples alone."""

    def write(self, samples: np.ndarray, rate: int) -> None:
        """Add samples, see ``audio_file``; the rate is the same in all calls."""
        if self._kind not in _FILES:
            self._file.write(pcm16(samples))
            return
        if self._sound is None:
            import soundfile

            container, codec = _FILES[self._kind]
            how: dict[str, Any] = {"format": container, "subtype": codec}
            how |= {"samplerate": rate, "channels": 1}
            how |= _CONSTANT if self._kind == "mp3" else {}
            self._sound = soundfile.SoundFile(self._file, "w", **how)
        self._sound.write(samples)

    def take(self) -> bytes:
        """Return the bytes since the last call, perhaps none: codecs collect up to a second."""
        new = bytes(self._file.getbuffer()[self._taken :])
        self._taken += len(new)
        return new

    def close(self) -> bytes:
        """End the file, and return all of it: no bytes without any ``write``. ``take`` then returns
        its last bytes."""
        if self._sound is not None:
            self._sound.close()
        return self._file.getvalue()


class KeptTranscripts:
    """LRU store of the transcripts of spoken answers, by the unguessable ids of their audio."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._kept: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._lock, self._now = threading.Lock(), now

    def add(self, key: str, transcript: str) -> int:
        """Store a transcript, and return the Unix time in seconds at which it expires."""
        expires = int(self._now()) + _KEPT_S
        with self._lock:
            self._kept[key] = transcript, expires
            while len(self._kept) > MAX_TRANSCRIPTS:
                self._kept.popitem(last=False)
        return expires

    def get(self, key: str) -> str | None:
        """Return a transcript; None if it is not stored or has expired."""
        with self._lock:
            transcript, expires = self._kept.get(key, (None, 0))
        return transcript if self._now() < expires else None

    def transcript(self, audio: EarlierAudio, field: str) -> str:
        """Return what an earlier answer said.

        Args:
            audio: reference to the answer; its own transcript is used if the server has none.
            field: the API's name for the reference.

        Raises:
            FieldError: if there is no transcript.
        """
        found = self.get(audio.id)
        found = audio.transcript if found is None else found
        if found is None:
            raise FieldError(
                "no answer with this id is stored (it may have expired): send the text of the "
                "answer as content",
                f"{field}.id",
            )
        return found


class SpokenChoice:
    """The audio of one answer in a response.

    Args:
        spoken: voice and format of the audio.
        kept: store of its transcript.
    """

    def __init__(self, spoken: SpokenFormat, kept: KeptTranscripts) -> None:
        self._spoken, self._kept, self.id = spoken, kept, f"audio_{uuid4().hex}"
        self._encoder = SoundEncoder(spoken.format)

    def delta(self, **fields: Any) -> dict[str, Any]:
        """Return the audio of a chunk in a stream."""
        return {"audio": {"id": self.id, **fields}}

    def sent(self, speech: Speech) -> dict[str, Any] | None:
        """Encode a piece of speech, and return the audio of a chunk with the bytes that are ready;
        None if there are none yet."""
        self._encoder.write(speech.samples, speech.sample_rate)
        return self._taken()

    def rest(self) -> dict[str, Any] | None:
        """End the audio, and return that of a chunk with its last bytes; None if there are none."""
        self._encoder.close()
        return self._taken()

    def _taken(self) -> dict[str, Any] | None:
        data = self._encoder.take()
        return self.delta(data=base64.b64encode(data).decode()) if data else None

    def end(self, transcript: str) -> dict[str, Any]:
        """Store the transcript, and return the audio of the last chunk."""
        return self.delta(expires_at=self._kept.add(self.id, transcript))

    def whole(self, transcript: str, samples: np.ndarray, rate: int) -> dict[str, Any]:
        """Store the transcript, and return the audio of a message."""
        data = base64.b64encode(audio_file(samples, rate, self._spoken.format)).decode()
        expires = self._kept.add(self.id, transcript)
        return {"id": self.id, "data": data, "expires_at": expires, "transcript": transcript}
