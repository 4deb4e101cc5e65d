"""RealtimeTranscriber: what a realtime session's user says, as text."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from anyio.to_thread import run_sync

from oscar_mm.apps.serve.protocol import ApiRequest, checked, validated
from oscar_mm.apps.serve.realtime_items import Entry
from oscar_mm.apps.serve.realtime_tasks import RealtimeTasks
from oscar_mm.apps.serve.refusals import ClientGone, Refusal, as_refusals
from oscar_mm.apps.serve.running_answer import RunningAnswer
from oscar_mm.apps.serve.spoken import audio_file
from oscar_mm.apps.serve.transcription_writer import audio_usage
from oscar_mm.apps.serve.transcriptions_body import TranscriptionBody
from oscar_mm.engine.answer import Reasoning
from oscar_mm.media.resample import RATE

if TYPE_CHECKING:
    from oscar_mm.apps.serve.service import Service

_MAX_S = 600
"""Maximum seconds of sound that are kept for transcription, in all recordings that wait for it."""


class RealtimeTranscriber:
    """Transcribes the recordings of one session, one after the other, beside its answers.

    A transcription is a request of its own, as those of ``/v1/audio/transcriptions``: the model
    reads the recording once more.

    Args:
        service: service of the server.
        client: names that identify the client; see ``Request``.
        tasks: tasks of the session.
    """

    def __init__(self, service: Service, client: tuple[str, ...], tasks: RealtimeTasks) -> None:
        self._service, self._client, self._tasks = service, client, tasks
        self._salt = uuid4().hex
        self._how: dict[str, Any] | None = None
        self._recorded: list[np.ndarray] = []
        """Samples of the current recording, int16, up to the bound on all that wait."""
        self._length = self._waiting = 0
        """Numbers of samples of the current recording, and of those that wait."""
        self._turn = asyncio.Lock()

    def check(self, how: dict[str, Any] | None) -> None:
        """Refuse settings that are not supported.

        Raises:
            FieldError: if a field is wrong.
            Refusal: if the model is not served.
        """
        if how is not None:
            self._service.check_model(how["model"])
            _form(b"", how)

    def use(self, how: dict[str, Any] | None) -> None:
        """Transcribe the next recordings with checked settings of the API; None for none."""
        self._how = how

    def hear(self, samples: np.ndarray) -> None:
        """Add (n,) float32 samples at 16 kHz to the current recording."""
        if self._how is None and not self._length:
            return
        self._length += len(samples)
        if self._length + self._waiting <= _MAX_S * RATE:
            self._recorded.append((samples.clip(-1, 1) * 32767).astype(np.int16))

    def forget(self) -> None:
        """Forget the current recording."""
        self._recorded, self._length = [], 0

    def transcribe(self, entry: Entry) -> None:
        """Transcribe the current recording, which is an item now."""
        recorded, length, how = self._recorded, self._length, self._how
        self.forget()
        if how is not None and length:
            self._waiting += sum(map(len, recorded))
            self._tasks.run(self._transcribe(entry, recorded, length, how))

    async def _transcribe(
        self, entry: Entry, recorded: list[np.ndarray], length: int, how: dict[str, Any]
    ) -> None:
        samples = np.concatenate([np.zeros(0, np.int16), *recorded])
        try:
            async with self._turn:
                if len(samples) < length:
                    raise Refusal(
                        400,
                        f"more than {_MAX_S} s of sound wait to be transcribed: send shorter "
                        "recordings, or wait for their transcripts",
                    )
                with as_refusals():
                    await self._answer(entry, samples, how)
        except ClientGone:
            pass
        except Refusal as error:
            self._tasks.count(error)
            await self._send_event(entry, "failed", error=error.body["error"])
        finally:
            self._waiting -= len(samples)

    async def _answer(self, entry: Entry, samples: np.ndarray, how: dict[str, Any]) -> None:
        """Send the transcript of a recording, piece by piece."""
        service, arrival = self._service, perf_counter()
        queue, conversations = service.queue, service.conversations
        request = await run_sync(self._request, samples, how)
        [slot] = await queue.take(self._client, self._tasks.gone)
        answer = RunningAnswer(queue, slot, conversations, request, self._tasks.gone, arrival)
        try:
            await answer.begin(service.limits.memory_wait_s)
            async for piece in answer.pieces():
                if isinstance(piece, str) and not isinstance(piece, Reasoning):
                    await self._send_event(entry, "delta", delta=piece)
            text, usage = answer.completed.answer.text, audio_usage(answer.completed.usage)
        finally:
            await asyncio.shield(answer.end())
        entry.item["content"][0]["transcript"] = text
        await self._send_event(entry, "completed", transcript=text, usage=usage)

    def _request(self, samples: np.ndarray, how: dict[str, Any]) -> ApiRequest:
        form = _form(audio_file(samples, RATE, "wav"), how)
        body = form.model_copy(update={"stream": True, "cache_salt": self._salt})
        [request] = self._service.requests_of(checked(body.chat_body(translate=False)))
        return replace(request, keeps=False)

    async def _send_event(self, entry: Entry, kind: str, **fields: Any) -> None:
        name = f"conversation.item.input_audio_transcription.{kind}"
        await self._tasks.send_event(name, item_id=entry.id, content_index=0, **fields)


def _form(file: bytes, how: dict[str, Any]) -> TranscriptionBody:
    """Return a recording with settings of the API as a request of the audio API.

    Raises:
        FieldError: if a setting is wrong.
    """
    return validated(TranscriptionBody, {"file": file, **how})
