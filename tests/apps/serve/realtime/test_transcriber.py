"""Transcripts of what realtime sessions hear."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import soxr
from openai import OpenAI

from oscar_mm.apps.serve.spoken import audio_file
from tests.apps.serve.realtime.client import KEY, RATE, Talk, ask, sound, talked


def test_what_was_said_is_transcribed(
    address: str, server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transcripts equal the audio API's, come beside answers, can be switched off; bounded."""
    sounds = [sound(seconds, seed=seed) for seed, seconds in enumerate((1.7, 0.9, 0.8, 9.0))]
    kind = "conversation.item.input_audio_transcription."
    for name in ("_MIN_TOKENS", "_TOKENS_PER_SECOND"):
        monkeypatch.setattr(f"oscar_mm.apps.serve.transcriptions_body.{name}", 4)
    spoken: list[str] = []

    async def talk(one: Talk) -> None:
        for samples in sounds[:2]:
            await one.say(samples)
            await one.connection.input_audio_buffer.commit()
        for _ in sounds[:2]:
            done = await one.until(kind + "completed")
            told = [x for x in one.seen if x.type == kind + "delta" and x.item_id == done.item_id]
            assert "".join(x.delta for x in told) == done.transcript
            assert done.usage.input_token_details.audio_tokens > 9
            spoken.append(done.transcript)
        await one.connection.conversation.item.retrieve(item_id=done.item_id)
        item = (await one.until("conversation.item.retrieved")).item
        assert item.content[0].transcript == done.transcript
        monkeypatch.setattr("oscar_mm.apps.serve.realtime_transcriber._MAX_S", 1)
        for samples in sounds[2:]:
            await one.say(samples)
            await one.connection.input_audio_buffer.commit()
        assert "more than 1 s" in (await one.until(kind + "failed")).error.message
        audio = {"input": {"transcription": None}}
        await one.connection.session.update(session={"type": "realtime", "audio": audio})
        await one.say(sounds[0])
        await one.connection.input_audio_buffer.commit()
        await ask(one, "So?")
        await one.until("response.done")
        assert sum(x.type == kind + "completed" for x in one.seen) == 3

    transcription = {"model": "tiny", "language": "en"}
    audio = {"input": {"turn_detection": None, "transcription": transcription}}
    how: dict[str, Any] = {"max_output_tokens": 3, "output_modalities": ["text"]}
    talked(address, talk, audio=audio, **how)
    for samples, text in zip(sounds, spoken, strict=False):
        assert transcribed(address, samples) == text
    while server[0].service.conversations.give_way():
        pass


def transcribed(address: str, samples: np.ndarray) -> str:
    """The audio API's transcript of what a session hears."""
    stream = soxr.ResampleStream(RATE, 16_000, 1, dtype="float32")
    sent = (samples * 32767).astype("<i2") / np.float32(32768)
    heard = (stream.resample_chunk(sent, last=True) * 32767).astype(np.int16)
    file = ("a.wav", audio_file(heard, 16_000, "wav"))
    with OpenAI(base_url=f"{address}/v1", api_key=KEY) as client:
        return client.audio.transcriptions.create(model="tiny", file=file, language="en").text
