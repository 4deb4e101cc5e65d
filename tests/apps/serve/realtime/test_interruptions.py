"""Answers that are interrupted, cut off, or left."""

from __future__ import annotations

import asyncio
import base64
import threading
from typing import Any

import pytest

from oscar_mm.apps.serve.realtime_responses import RealtimeResponses
from oscar_mm.engine.speech import Speech
from tests.apps.serve.realtime.client import RATE, Talk, ask, held, sound, speech, talked


def test_speech_interrupts_an_answer(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the interruption, the first piece of speech is sent, and the text of three pieces."""
    goes_on, send, said = threading.Event(), RealtimeResponses._send_piece, list[Any]()

    async def held_up(self: Any, response: Any, piece: Any, times: Any) -> None:
        if isinstance(piece, Speech) and not goes_on.is_set():
            said.append(piece)
            while len(said) == 3 and not goes_on.is_set():
                await asyncio.sleep(0.01)
            if len(said) > 1:
                return
        await send(self, response, piece, times)

    monkeypatch.setattr(RealtimeResponses, "_send_piece", held_up)

    async def talk(one: Talk) -> None:
        update = {"type": "realtime", "max_output_tokens": 60}
        await one.connection.session.update(session=update)
        await one.say(speech(1))
        await one.until("response.output_audio.delta")
        async with asyncio.timeout(20):
            while len(said) < 3:
                await asyncio.sleep(0.01)
        await one.say(speech(2))
        await one.until("input_audio_buffer.speech_started")
        goes_on.set()
        cancelled = await one.until("response.done")
        assert cancelled.response.status == "cancelled"
        assert cancelled.response.status_details.reason == "turn_detected"
        item = cancelled.response.output[0]
        await one.until("response.created")
        await one.connection.response.cancel()
        done = await one.until("response.done")
        assert done.response.status_details.reason == "client_cancelled"
        await one.connection.conversation.item.retrieve(item_id=item.id)
        kept = (await one.until("conversation.item.retrieved")).item.content[0].transcript
        told = [x.delta for x in one.seen if x.type == "response.output_audio_transcript.delta"]
        assert 0 < len(kept) < len("".join(told))

    talked(address, talk)


def test_what_was_not_heard_is_cut_off(address: str) -> None:
    async def talk(one: Talk) -> None:
        await ask(one, "What is it?")
        done = await one.until("response.done")
        item, tokens = done.response.output[0], done.response.usage.output_token_details
        deltas = [x.delta for x in one.seen if x.type == "response.output_audio.delta"]
        heard = sum(len(base64.b64decode(delta)) for delta in deltas) * 500 // RATE // 2
        end = {"item_id": item.id, "content_index": 0, "audio_end_ms": heard}
        await one.connection.conversation.item.truncate(**end)
        assert (await one.until("conversation.item.truncated")).audio_end_ms == heard
        await one.connection.conversation.item.retrieve(item_id=item.id)
        kept = (await one.until("conversation.item.retrieved")).item.content[0].transcript
        assert item.content[0].transcript.startswith(kept)
        assert 0.2 < len(kept) / len(item.content[0].transcript) < 0.8
        await ask(one, "And?")
        later = (await one.until("response.done")).response.usage
        whole = done.response.usage.input_tokens + tokens.text_tokens
        assert later.input_token_details.cached_tokens < whole

    talked(address, talk, max_output_tokens=20)


def test_what_is_said_during_an_answer_is_asked_after_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, send = threading.Event(), RealtimeResponses._send_piece

    async def held_up(*arguments: Any) -> None:
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        await send(*arguments)

    monkeypatch.setattr(RealtimeResponses, "_send_piece", held_up)

    async def talk(one: Talk) -> None:
        await ask(one, "What is it?")
        await one.until("response.created")
        await one.say(sound(1.0))
        await one.connection.input_audio_buffer.commit()
        await one.connection.response.create()
        assert "in progress" in (await one.until("error")).error.message
        goes_on.set()
        first = (await one.until("response.done")).response.usage.input_token_details
        await one.connection.response.create()
        second = (await one.until("response.done")).response.usage.input_token_details
        assert (first.audio_tokens, second.audio_tokens) == (0, 13)

    talked(address, talk, max_output_tokens=9)


@pytest.mark.parametrize("when", ["heard", "asked", "said"])
def test_a_disconnect_frees_everything(address: str, server, pipe, when: str) -> None:
    async def talk(one: Talk) -> None:
        await one.say(sound(20.0), size=RATE)
        if when != "heard":
            await one.connection.input_audio_buffer.commit()
            await one.connection.response.create()
        if when == "said":
            await one.until("response.output_audio.delta")
        while when == "heard" and held(server, pipe)[0] == 0:
            await asyncio.sleep(0.01)

    talked(address, talk, max_output_tokens=190)
