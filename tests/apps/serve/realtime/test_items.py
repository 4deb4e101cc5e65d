"""Items of realtime sessions: texts, images, recordings, answers of the client."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from oscar_mm.apps.serve.realtime_items import Entry
from oscar_mm.apps.serve.server import create_app
from oscar_mm.apps.serve.service import ServerLimits
from oscar_mm.engine.message import Message
from oscar_mm.media.part import MediaPart
from oscar_mm.modality import Modality
from tests.apps.serve.conftest import png, started
from tests.apps.serve.realtime.client import (
    KEY,
    RATE,
    Talk,
    ask,
    encoded,
    show,
    sound,
    speech,
    talked,
)


def test_a_past_is_told_and_recordings_are_forgotten(address: str) -> None:
    async def talk(one: Talk) -> None:
        for role, kind, text in (
            ("user", "input_text", "Hello"),
            ("assistant", "output_text", "Hi"),
        ):
            item = {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
            await one.connection.conversation.item.create(item=item)
        sounds = {"type": "input_audio", "audio": encoded(sound(2.0))}
        item = {"type": "message", "role": "user", "content": [sounds], "id": "mine"}
        await one.connection.conversation.item.create(item=item)
        await one.connection.response.create()
        before = (await one.until("response.done")).response.usage.input_token_details
        assert before.audio_tokens == 26
        await one.connection.conversation.item.delete(item_id="mine")
        await one.until("conversation.item.deleted")
        await ask(one, "And?")
        after = (await one.until("response.done")).response.usage.input_token_details
        assert after.audio_tokens == 0

    talked(address, talk, max_output_tokens=3, output_modalities=["text"])


def test_texts_that_came_during_a_recording_outlast_it(address: str) -> None:
    """Clearing a recording leaves the texts that came during it in the next question."""

    async def talk(one: Talk) -> None:
        await one.say(sound(0.5))
        part = {"type": "input_text", "text": "What is it?"}
        item = {"type": "message", "role": "user", "content": [part]}
        await one.connection.conversation.item.create(item=item)
        await one.connection.input_audio_buffer.clear()
        await one.until("input_audio_buffer.cleared")
        await one.connection.response.create()
        done = (await one.until("response.done")).response
        assert done.usage.input_token_details.audio_tokens == 0
        assert done.output[0].content[0].text

    talked(address, talk, max_output_tokens=3, output_modalities=["text"])


def test_images_are_seen_between_sounds(address: str, pipe) -> None:
    """As a chat sees them; the answer is text. Recordings among them can be forgotten."""
    picture = png()
    texts: list[str] = []

    async def talk(one: Talk) -> None:
        await one.say(sound(9.7), size=5000)
        await one.connection.input_audio_buffer.commit()
        await show(one, picture, "Look:")
        await one.say(sound(1.3, seed=1), size=5000)
        await one.connection.input_audio_buffer.commit()
        await one.connection.response.create()
        done = await one.until("response.done")
        texts.append(done.response.output[0].content[0].text)
        details = done.response.usage.input_token_details
        assert (details.image_tokens, details.audio_tokens) == (6, 9 * 13 + 9 + 13 + 4)
        [shown] = [x.item for x in one.seen if x.type == "conversation.item.done"][1:2]
        assert [part.type for part in shown.content] == ["input_text", "input_image"]
        recordings = [x.item_id for x in one.seen if x.type == "input_audio_buffer.committed"]
        await one.connection.conversation.item.delete(item_id=recordings[1])
        await one.until("conversation.item.deleted")
        await ask(one, "And?")
        details = (await one.until("response.done")).response.usage.input_token_details
        assert (details.image_tokens, details.audio_tokens) == (6, 9 * 13 + 9)

    talked(address, talk, output_modalities=["text"], max_output_tokens=6)
    with pipe.chat() as chat, chat.listen(RATE) as listening:
        for number, seconds in enumerate((9.7, 1.3)):
            heard = (sound(seconds, seed=number) * 32767).astype("<i2").astype(np.float32) / 32768
            listening.hear(heard)
            if number == 0:
                part = MediaPart(Modality.IMAGE, picture, "picture")
                listening.add(Message("user", ("Look:", part)))
        assert listening.ask(max_new_tokens=6).text == texts[0]


def test_images_that_are_not_answered_are_bounded(pipe) -> None:
    picture = png()
    limits = ServerLimits(api_key=KEY, max_new_tokens=2, max_request_bytes=2 * len(picture))

    async def talk(one: Talk) -> None:
        for _ in range(2):
            await show(one, picture, "")
            await one.connection.response.create()
            await one.until("response.done")
        await show(one, picture, "")
        await show(one, picture, "Two")
        assert "ask for a response" in (await one.until("error")).error.message

    with started(create_app(pipe, "tiny", limits)) as (_, address):
        talked(address, talk, output_modalities=["text"])


def test_sound_that_is_not_read_is_bounded(pipe) -> None:
    """Short recordings are read with the question that they belong to."""
    limits = ServerLimits(api_key=KEY, max_new_tokens=2, max_request_bytes=200_000)

    async def talk(one: Talk) -> None:
        for _ in range(3):  # A second of sound takes some 13,600 bytes.
            await one.say(sound(6.0), size=RATE * 6)
            await one.connection.input_audio_buffer.commit()
            await one.until("conversation.item.done")
        await one.say(sound(6.0), size=RATE * 6)
        assert "ask for a response" in (await one.until("error")).error.message
        await one.connection.input_audio_buffer.clear()
        await one.connection.response.create()
        await one.until("response.done")
        await one.say(sound(6.0), size=RATE * 6)
        await one.connection.input_audio_buffer.commit()
        await one.until("conversation.item.done")

    with started(create_app(pipe, "tiny", limits)) as (_, address):
        talked(address, talk, output_modalities=["text"])


def test_instructions_that_are_not_answered_are_bounded(pipe) -> None:
    limits = ServerLimits(api_key=KEY, max_new_tokens=2, max_request_bytes=3000)

    async def talk(one: Talk) -> None:
        async def instruct(text: str) -> None:
            await one.connection.session.update(session={"type": "realtime", "instructions": text})

        for _ in range(2):
            await ask(one, "What is it?")
            await one.until("response.done")
            await instruct("brief " * 200)
            await instruct("long " * 200)
        await instruct("loud " * 200)
        error = (await one.until("error")).error
        assert error.param == "session.instructions" and "new instructions" in error.message
        await ask(one, "What is it?")
        await one.until("response.done")
        await instruct("loud " * 200)
        await one.until("session.updated")

    with started(create_app(pipe, "tiny", limits)) as (_, address):
        talked(address, talk, output_modalities=["text"])


def test_an_answer_of_the_client_that_is_refused_is_no_item(address: str) -> None:
    """The model has no tools."""

    async def talk(one: Talk) -> None:
        create = one.connection.conversation.item.create
        part = {"type": "input_text", "text": "What is it?"}
        await create(item={"type": "message", "role": "user", "content": [part]})
        call = {"type": "function_call", "call_id": "call_1", "name": "find", "arguments": "{}"}
        await create(item={"id": "ghost", **call})
        assert "tool calls" in (await one.until("error")).error.message
        await one.connection.conversation.item.retrieve(item_id="ghost")
        assert "not the id of an item" in (await one.until("error")).error.message

    talked(address, talk, output_modalities=["text"])


def test_no_item_has_the_id_of_the_current_recording(address: str) -> None:
    """Otherwise the recording would replace it, and its size would no longer count."""

    async def talk(one: Talk) -> None:
        detection = {"type": "server_vad", "create_response": False}
        audio = {"input": {"turn_detection": detection}}
        await one.connection.session.update(session={"type": "realtime", "audio": audio})
        await one.say(speech(1)[: 2 * RATE])
        began = await one.until("input_audio_buffer.speech_started")
        part = {"type": "input_text", "text": "What is it?"}
        item = {"type": "message", "role": "user", "content": [part], "id": began.item_id}
        await one.connection.conversation.item.create(item=item)
        assert "current recording" in (await one.until("error")).error.message
        await one.connection.input_audio_buffer.commit()
        assert (await one.until("input_audio_buffer.committed")).item_id == began.item_id

    talked(address, talk)


def test_an_item_takes_no_longer_after_many_others(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes of all items would take 4 ms to add up when there are as many as there may be."""
    sizes, size = itertools.count(), Entry.size.fget
    monkeypatch.setattr(Entry, "size", property(lambda one: (next(sizes), size(one))[1]))
    counts = []

    async def talk(one: Talk) -> None:
        for number in range(40):
            part = {"type": "input_text", "text": f"Item {number}"}
            item = {"type": "message", "role": "user", "content": [part]}
            await one.connection.conversation.item.create(item=item)
            await one.until("conversation.item.done")
            counts.append(next(sizes))

    talked(address, talk)
    assert counts[39] - counts[38] == counts[1] - counts[0]
