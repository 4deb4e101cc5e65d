"""RealtimeSound: the sound of a realtime session's client, cut into recordings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import soxr

from oscar_mm.apps.serve.realtime_events import RATE, AudioAppend, ItemCreate, samples_of
from oscar_mm.apps.serve.realtime_items import Entry, RealtimeItems, message_item, new_id
from oscar_mm.apps.serve.realtime_tasks import RealtimeTasks
from oscar_mm.apps.serve.realtime_transcriber import RealtimeTranscriber
from oscar_mm.apps.serve.refusals import Refusal
from oscar_mm.apps.turn_detection import Began, Ended, SpeechDetector
from oscar_mm.media.resample import MIN_SECONDS
from oscar_mm.media.resample import RATE as HEARD_RATE

_WAITING_S = 30
"""Seconds of unread sound from which on the server receives no more until some is read."""


class RealtimeSound:
    """Sound of one session: resampled, cut where the user begins and ends to speak, and read.

    Args:
        tasks: tasks of the session.
        items: items, which the recordings become.
        transcriber: transcribes the recordings.
        began: function called when the user begins to speak.
        ended: function called when the server has found the end of what the user says, after it
            became an item.

    Attributes:
        uncommitted: number of samples of the current recording.
        item_id: id of the item that the current recording becomes.
    """

    def __init__(
        self,
        tasks: RealtimeTasks,
        items: RealtimeItems,
        transcriber: RealtimeTranscriber,
        began: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._tasks, self._items, self._transcriber = tasks, items, transcriber
        self._began, self._ended = began, ended
        self._waiting = 0
        """Number of samples that wait to be read."""
        self._drained = asyncio.Event()
        tasks.gone.add_done_callback(lambda _: self._drained.set())
        self._resampler = _resampler()
        self._received = self.uncommitted = 0
        self.item_id = new_id()
        self._detection: dict[str, Any] | None = None
        self._detector: SpeechDetector | None = None

    def detect(self, how: dict[str, Any] | None) -> None:
        """Find turns from here on by these settings of the API; None for push to talk."""
        self._detection, self._detector = how, None
        if how is not None:
            fields = how["threshold"], how["prefix_padding_ms"], how["silence_duration_ms"]
            self._detector = SpeechDetector(*fields, self._received)

    async def append(self, event: AudioAppend) -> None:
        """Add sound of the client.

        Raises:
            FieldError: if it is no sound, or the model does not read sound.
        """
        self._items.check_hears()
        given = samples_of(event.audio, "audio")
        await self._add(self._resampler.resample_chunk(given))
        await self._wait()

    async def add_item(self, entry: Entry, samples: np.ndarray, event: ItemCreate) -> None:
        """Queue an item's (n,) float32 samples at 16 kHz, which the model then reads.

        Args:
            entry: item that the client created.
            samples: its samples.
            event: event that created it, for errors.
        """
        self._hear(samples, event)
        self._tasks.enqueue(partial(self._items.end_recording, entry), event)
        await self._wait()

    async def _wait(self) -> None:
        """Wait while too much sound is unread."""
        while self._waiting > _WAITING_S * HEARD_RATE and not self._tasks.gone.done():
            self._drained.clear()
            await self._drained.wait()

    async def _add(self, samples: np.ndarray) -> None:
        """Add samples at 16 kHz, and find where the user begins and ends to speak."""
        self._received += len(samples)
        if self._detector is None:
            self._keep(samples)
            return
        for found in self._detector.push(samples):
            if isinstance(found, Began):
                await self._send_event(
                    "speech_started", audio_start_ms=found.at * 1000 // HEARD_RATE
                )
                self._began()
            elif isinstance(found, Ended):
                await self._send_event("speech_stopped", audio_end_ms=found.at * 1000 // HEARD_RATE)
                await self._make_item()
                self._ended()
            else:
                self._keep(found)

    def _keep(self, samples: np.ndarray) -> None:
        """Queue samples of the current recording, which the model then reads."""
        if len(samples):
            self.uncommitted += len(samples)
            self._transcriber.hear(samples)
            self._hear(samples)

    def _hear(self, samples: np.ndarray, event: ItemCreate | None = None) -> None:
        self._waiting += len(samples)
        self._tasks.enqueue(partial(self._read, samples), event)

    async def _read(self, samples: np.ndarray) -> None:
        try:
            await self._items.hear(samples)
        finally:
            self._waiting -= len(samples)
            self._drained.set()

    async def commit(self) -> None:
        """Make the current recording an item.

        Raises:
            Refusal: if it is too short.
            FieldError: if the model does not read sound.
        """
        self._items.check_hears()
        if self._detector is None:
            await self._add(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))
            self._resampler = _resampler()
        if self.uncommitted < MIN_SECONDS * HEARD_RATE:
            raise Refusal(
                400,
                f"the input audio buffer has {self.uncommitted / HEARD_RATE:.3f} s, but an item "
                f"must have at least {MIN_SECONDS:g} s: append more",
                code="input_audio_buffer_commit_empty",
            )
        await self._make_item()
        self.detect(self._detection)

    async def _make_item(self) -> None:
        entry = Entry(
            message_item(self.item_id, "user", [{"type": "input_audio", "transcript": None}])
        )
        await self._send_event("committed", previous_item_id=self._items.last_id)
        self.item_id, self.uncommitted = new_id(), 0
        await self._items.add(entry)
        self._tasks.enqueue(partial(self._items.end_recording, entry))
        self._transcriber.transcribe(entry)

    def clear(self) -> None:
        """Forget the current recording."""
        self._resampler, self.uncommitted = _resampler(), 0
        self.detect(self._detection)
        self._transcriber.forget()
        self._tasks.enqueue(self._items.discard)

    async def _send_event(self, kind: str, **fields: Any) -> None:
        await self._tasks.send_event(f"input_audio_buffer.{kind}", **fields, item_id=self.item_id)


def _resampler() -> Any:
    return soxr.ResampleStream(RATE, HEARD_RATE, 1, dtype="float32")
