"""Turns of realtime sessions: pushed to talk and found by the server, as in a chat."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.serve.server import create_app
from oscar_mm.apps.serve.service import ServerLimits
from oscar_mm.engine.message import Message
from tests.apps.serve.conftest import png, started
from tests.apps.serve.realtime.client import (
    KEY,
    RATE,
    Talk,
    ask,
    connected,
    show,
    sound,
    speech,
    talked,
)
from tests.apps.serve.realtime.conftest import SmallServer
from tests.pipelines.conftest import NEVER


def test_push_to_talk(address: str) -> None:
    async def talk(one: Talk) -> None:
        await one.say(sound(9.7))
        await one.connection.input_audio_buffer.commit()
        await one.connection.response.create()
        done = await one.until("response.done")
        assert done.response.status == "incomplete"
        assert done.response.status_details.reason == "max_output_tokens"
        usage = done.response.usage
        assert usage.input_token_details.audio_tokens == 13 * 9 + 9
        assert usage.output_token_details.text_tokens == 5
        assert usage.output_token_details.audio_tokens > 0
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens

    one = talked(address, talk, max_output_tokens=5)
    kinds = one.kinds()
    assert kinds[:7] == [
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
    ]
    assert kinds[-6:] == [
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    said = [x.delta for x in one.seen if x.type == "response.output_audio_transcript.delta"]
    transcript = next(x for x in one.seen if x.type == "response.output_audio_transcript.done")
    assert (
        "".join(said)
        == transcript.transcript
        == one.seen[-1].response.output[0].content[0].transcript
    )
    assert sum(x.type == "response.output_audio.delta" for x in one.seen) > 0


def test_answers_are_those_of_a_chat(address: str, pipe) -> None:
    """In text, over two turns, with what was created between."""
    answers: list[str] = []

    async def talk(one: Talk) -> None:
        for number, seconds in enumerate((9.7, 1.3)):
            await one.connection.conversation.item.create(
                item={
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": f"Listen: {number}"}],
                }
            )
            await one.say(sound(seconds, seed=number), size=5000)
            await one.connection.input_audio_buffer.commit()
            await one.connection.response.create()
            done = await one.until("response.done")
            answers.append(done.response.output[0].content[0].text)

    settings = {"instructions": "Be brief.", "output_modalities": ["text"], "max_output_tokens": 6}
    talked(address, talk, **settings)
    with pipe.chat("Be brief.") as chat, chat.listen(RATE) as listening:
        for number, seconds in enumerate((9.7, 1.3)):
            listening.add(Message("user", (f"Listen: {number}",)))
            heard = (sound(seconds, seed=number) * 32767).astype("<i2").astype(np.float32) / 32768
            listening.hear(heard)
            listening.commit()
            assert listening.ask(max_new_tokens=6).text == answers[number]


def test_the_server_hears_where_turns_end(address: str) -> None:
    async def talk(one: Talk) -> None:
        update = {"type": "realtime", "max_output_tokens": 3, "output_modalities": ["text"]}
        await one.connection.session.update(session=update)
        await one.until("session.updated")
        for number in (1, 2):
            await one.say(speech(number))
            began = await one.until("input_audio_buffer.speech_started")
            ended = await one.until("input_audio_buffer.speech_stopped")
            committed = await one.until("input_audio_buffer.committed")
            assert began.item_id == ended.item_id == committed.item_id
            assert 1000 < ended.audio_end_ms - began.audio_start_ms < 4500
            done = await one.until("response.done")
            assert done.response.usage.input_token_details.audio_tokens > 13 * number

    talked(address, talk)


def test_instructions_may_change(address: str, pipe) -> None:
    used: list[int] = []

    async def talk(one: Talk) -> None:
        for text in ("Be brief.", "Be long."):
            await one.connection.session.update(session={"type": "realtime", "instructions": text})
            await ask(one, "What is it?")
            used.append((await one.until("response.done")).response.usage.input_tokens)

    talked(address, talk, max_output_tokens=4, output_modalities=["text"])
    with pipe.chat("Be brief.") as chat:
        chat.ask("What is it?", max_new_tokens=4)
        asked = [{"role": "system", "content": "Be long."}]
        chat.ask(messages=[*asked, {"role": "user", "content": "What is it?"}], max_new_tokens=4)
        stops = [turn.stop + len(ids) for turn, ids in zip(chat.turns, ([], []), strict=True)]
        assert used[0] < stops[0] < used[1] <= stops[1]


def test_idle_sessions_give_up_their_memory(small_server: SmallServer) -> None:
    """Three conversations do not fit into memory together; each goes on where it was."""

    async def talk(address: str) -> None:
        async with (
            connected(address) as one,
            connected(address) as two,
            connected(address) as three,
        ):
            for number, each in enumerate((one, two, three, one)):
                await small_server.ask(each, number)

    asyncio.run(talk(small_server.address))
    small_server.check()


def test_a_model_that_does_not_speak_answers_in_text(qwen3_omni_folder: Path) -> None:
    pipe = OscarOmniPipeline(qwen3_omni_folder, policy="compact", device="cpu")
    pipe.model.generation_config.eos_token_id = NEVER
    limits = ServerLimits(api_key=KEY, max_new_tokens=4)

    async def talk(one: Talk) -> None:
        await one.say(sound(1.0))
        await one.connection.input_audio_buffer.commit()
        await one.connection.response.create()
        done = await one.until("response.done")
        assert done.response.output[0].content[0].type == "output_text"
        await one.connection.response.create(response={"output_modalities": ["audio"]})
        assert "text only" in (await one.until("error")).error.message

    with started(create_app(pipe, "tiny", limits)) as (_, address):
        talked(address, talk, instructions="Be brief.")


def test_a_model_that_does_not_hear_reads_texts(qwen3_vl_folder: Path) -> None:
    from oscar_mm import OscarVLPipeline

    pipe = OscarVLPipeline(qwen3_vl_folder, policy="compact", device="cpu")
    limits = ServerLimits(api_key=KEY, max_new_tokens=4)

    async def talk(one: Talk) -> None:
        await show(one, png(), "Look.")
        await ask(one, "What is it?")
        done = (await one.until("response.done")).response
        assert done.output[0].content[0].text and done.usage.input_token_details.image_tokens == 6
        await one.say(sound(0.2))
        assert "does not support audio" in (await one.until("error")).error.message

    with started(create_app(pipe, "tiny", limits)) as (_, address):
        talked(address, talk, output_modalities=["text"])
