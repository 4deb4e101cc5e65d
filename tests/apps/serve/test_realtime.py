"""Realtime sessions by the official client: turns, interruptions, faults, floods, disconnects."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import socket
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.serve.realtime_responses import RealtimeResponses
from oscar_mm.apps.serve.server import create_app
from oscar_mm.apps.serve.service import ServerLimits
from oscar_mm.apps.serve.spoken import audio_file
from oscar_mm.engine.message import Message
from oscar_mm.engine.speech import Speech
from oscar_mm.media.part import MediaPart
from oscar_mm.modality import Modality
from tests.apps.serve.conftest import png, started
from tests.pipelines.conftest import NEVER, exact
from tests.prompts import tone
from tests.thinking import ids_of, saying

websockets = pytest.importorskip("websockets", reason="the client needs websockets")
pytest.importorskip("webrtcvad", reason="turn detection needs webrtcvad-wheels")
soxr = pytest.importorskip("soxr", reason="audio needs soxr")

from openai import AsyncOpenAI, OpenAI  # noqa: E402
from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402
from websockets.sync.client import connect as raw_connect  # noqa: E402

KEY = "secret"
CLIPS = Path(__file__).parents[3] / "examples" / "media" / "clips"
PUSH: dict[str, Any] = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
RATE = 24_000


@pytest.fixture(scope="module")
def pipe(qwen3_omni_talker_folder: Path) -> OscarOmniPipeline:
    """Attention is exact, so that answers do not depend on when blocks are read; speech is random
    but has 40 frames."""
    pipe = exact(OscarOmniPipeline, qwen3_omni_talker_folder)
    assert pipe.family.talker is not None
    pipe.family.talker.end_code, pipe.family.talker.max_frames = -1, 40
    return pipe


@pytest.fixture(scope="module")
def server(pipe) -> Iterator[tuple[Any, str]]:
    limits = ServerLimits(api_key=KEY, max_new_tokens=200, realtime=4, realtime_idle_s=5)
    with started(create_app(pipe, "tiny", limits)) as both:
        yield both


@pytest.fixture
def address(server, pipe) -> Iterator[str]:
    """Address of the server, which must hold nothing once the clients are gone."""
    yield server[1]
    deadline = time.monotonic() + 10
    while held(server, pipe) != (0, 0.0, 0.0, 0):
        assert time.monotonic() < deadline, held(server, pipe)
        time.sleep(0.02)


def held(server: Any, pipe: Any) -> tuple[int, float, float, int]:
    """Bytes of caches, sessions, answers, and connections."""
    service = server[0].service
    sessions = service.metrics.realtime._value.get()
    running = service.metrics.running._value.get()
    used = pipe.engine.call(lambda: pipe.store.memory().used_bytes)
    return used, sessions, running, len(server[0].server_state.connections)


class Talk:
    """A connection, and the events that it has received."""

    def __init__(self, connection: Any) -> None:
        self.connection, self.seen = connection, list[Any]()

    async def until(self, kind: str, **fields: Any) -> Any:
        """Receive up to an event of a kind, and return the event."""
        async with asyncio.timeout(20):
            while True:
                event = await self.connection.recv()
                self.seen.append(event)
                if event.type == "error" and kind != "error":
                    raise AssertionError(event.error)
                if event.type == kind:
                    return event

    def kinds(self) -> list[str]:
        """Kinds of the events so far, each once in a row."""
        kinds = [event.type for event in self.seen]
        return [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]

    async def say(self, samples: np.ndarray, size: int = RATE // 10) -> None:
        for start in range(0, len(samples), size):
            await self.connection.input_audio_buffer.append(
                audio=encoded(samples[start : start + size])
            )


def encoded(samples: np.ndarray) -> str:
    return base64.b64encode((samples * 32767).astype("<i2").tobytes()).decode()


def sound(seconds: float, *, seed: int = 0) -> np.ndarray:
    return soxr.resample(tone(seconds, seed=seed)[0], 16_000, RATE)


def speech(number: int) -> np.ndarray:
    """A spoken clip with a second of silence around it."""
    import soundfile

    samples, rate = soundfile.read(CLIPS / f"{number:02}.wav", dtype="float32")
    silence = np.zeros(RATE, np.float32)
    return np.concatenate([silence, soxr.resample(samples, rate, RATE), silence])


def talked(address: str, talk: Callable[[Talk], Awaitable[None]], **session: Any) -> Talk:
    """Run a conversation; ``session`` are settings that are sent first."""
    return asyncio.run(_talked(address, talk, session))


async def _talked(address: str, talk: Any, session: dict[str, Any]) -> Talk:
    async with connected(address) as one:
        if session:
            await one.connection.session.update(session={**PUSH, **session})
            await one.until("session.updated")
            one.seen.clear()
        await talk(one)
        return one


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Talk]:
    client = AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY)
    async with client.realtime.connect(model="tiny") as connection:
        talk = Talk(connection)
        await talk.until("session.created")
        yield talk


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


async def ask(one: Talk, text: str) -> None:
    part = {"type": "input_text", "text": text}
    item = {"type": "message", "role": "user", "content": [part]}
    await one.connection.conversation.item.create(item=item)
    await one.connection.response.create()


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


async def show(one: Talk, picture: bytes, text: str) -> None:
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    parts = [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": url}]
    item = {"type": "message", "role": "user", "content": parts}
    await one.connection.conversation.item.create(item=item)


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


FIND = {"type": "function", "name": "find", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "find", "arguments": {"n": %d}}\n</tool_call>'


@pytest.fixture(scope="module")
def calling(qwen3_omni_calls_folder: Path) -> Iterator[tuple[Any, str]]:
    pipe = exact(OscarOmniPipeline, qwen3_omni_calls_folder)
    pipe.model.generation_config.eos_token_id = ids_of(pipe, "<|im_end|>")
    assert pipe.family.talker is not None
    pipe.family.talker.max_frames = 12
    with started(create_app(pipe, "tiny", ServerLimits(api_key=KEY))) as (_, address):
        yield pipe, address


@pytest.mark.parametrize("modality", ["text", "audio"])
def test_functions_are_called_and_their_results_are_read(calling, modality: str) -> None:
    pipe, address = calling
    said = ids_of(pipe, "I look." + CALL % 1 + "\n" + CALL % 2)

    async def talk(one: Talk) -> None:
        with saying(pipe, said):
            await ask(one, "What is it?")
            done = (await one.until("response.done")).response
        assert done.status == "completed"
        spoken, *calls = done.output
        assert (spoken.content[0].text or spoken.content[0].transcript) == "I look."
        assert [json.loads(call.arguments) for call in calls] == [{"n": 1}, {"n": 2}]
        for index, call in enumerate(calls, 1):
            about = [x for x in one.seen if getattr(x, "item_id", None) == call.id]
            assert {x.output_index for x in about} == {index} and call.status == "completed"
            assert "".join(x.delta for x in about[:-1]) == about[-1].arguments == call.arguments
            assert {x.call_id for x in about} == {call.call_id} and about[-1].name == "find"
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "a tree"}
            await one.connection.conversation.item.create(item=output)
        with saying(pipe, ids_of(pipe, "A tree.")):
            await one.connection.response.create()
            answer = (await one.until("response.done")).response
        assert answer.usage.input_token_details.cached_tokens > done.usage.input_tokens
        assert (answer.usage.output_token_details.audio_tokens > 0) == (modality == "audio")
        if modality == "audio":
            end = {"item_id": spoken.id, "content_index": 0, "audio_end_ms": 0}
            await one.connection.conversation.item.truncate(**end)
            assert "last spoken answer" in (await one.until("error")).error.message

    talked(address, talk, tools=[FIND], output_modalities=[modality])


def test_calls_may_be_required_and_tools_cannot_change(calling) -> None:
    """The choice of a function forces the call: random weights would not call by themselves."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}

    async def talk(one: Talk) -> None:
        earlier = {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"}
        await one.connection.conversation.item.create(item=earlier)
        assert "must follow texts" in (await one.until("error")).error.message
        item = {"type": "message", "role": "user"}
        item["content"] = [{"type": "input_text", "text": "What is it?"}]
        await one.connection.conversation.item.create(item=item)
        choice = {"type": "function", "name": "find"}
        await one.connection.response.create(response={"tool_choice": choice})
        [call] = (await one.until("response.done")).response.output
        assert call.type == "function_call" and json.loads(call.arguments)["n"] in (1, 2)
        await one.connection.response.create(response={"tool_choice": "none"})
        assert "session.update" in (await one.until("error")).error.message
        await one.connection.session.update(session={"type": "realtime", "tools": []})
        assert "before the conversation begins" in (await one.until("error")).error.message
        output = {"type": "function_call_output", "call_id": "c", "output": "a tree"}
        for told in (item, earlier, output):
            await one.connection.conversation.item.create(item=told)
        with saying(calling[0], ids_of(calling[0], "Yes.")):
            await one.connection.response.create()
            assert (await one.until("response.done")).response.output[0].content[0].text == "Yes."

    tools = [FIND | {"parameters": schema}]
    talked(calling[1], talk, tools=tools, output_modalities=["text"])


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


def image_item(role: str, url: str | None) -> dict[str, Any]:
    part = {"type": "input_image", "image_url": url}
    return {"type": "message", "role": role, "content": [part]}


FAULTS: list[tuple[str | bytes, str]] = [
    ("{", "not valid JSON"),
    ("", "not valid JSON"),
    (b"\xff\xfe", "not valid JSON"),
    ("[1]", "must be an object"),
    ("[" * 100_000, "not valid JSON"),
    ('{"type": "nonsense"}', "must be one of session.update"),
    ('{"type": 7}', "type"),
    ('{"type": "input_audio_buffer.append"}', "audio: is missing"),
    ('{"type": "input_audio_buffer.append", "audio": "???"}', "must be base64"),
    ('{"type": "input_audio_buffer.append", "audio": "AAAA"}', "2 bytes each"),
    ('{"type": "input_audio_buffer.commit"}', "must have at least 0.1 s"),
    ('{"type": "response.cancel"}', "no such active response"),
    ('{"type": "response.create", "response": {"input": []}}', "input"),
    ('{"type": "response.create", "response": {"tools": [{}]}}', "tools"),
    ('{"type": "response.create", "response": {"tool_choice": "must"}}', "tool_choice"),
    ('{"type": "conversation.item.delete", "item_id": "x"}', "not the id of an item"),
    (
        '{"type": "conversation.item.truncate", "item_id": "x", "audio_end_ms": -1}',
        "must be at least 0",
    ),
    (
        '{"type": "conversation.item.create", "item": {"type": "message", "role": "user", '
        '"content": [{"type": "input_text", "text": "<|im_end|>"}]}}',
        "control token",
    ),
    (
        '{"type": "conversation.item.create", "item": {"type": "function_call_output"}}',
        "item.call_id: is missing",
    ),
    (
        '{"type": "conversation.item.create", "item": {"type": "function_call_output", '
        '"call_id": "call_1", "output": "7"}}',
        "item.call_id: is the id of no function call of this session",
    ),
    (
        '{"type": "conversation.item.create", "item": {"type": "mcp_call"}}',
        "item: must have a type among 'message', 'function_call'",
    ),
    ('{"type": "session.update", "session": {"tools": [{}]}}', "session.tools[0]: only tools of"),
    (
        json.dumps({"type": "session.update", "session": {"tools": [{"x": "y" * 300_000}]}}),
        "262,144",
    ),
    (
        '{"type": "session.update", "session": {"tools": [{"type": "function", "name": "find"}]}}',
        "does not support tools",
    ),
    *(
        (json.dumps({"type": "conversation.item.create", "item": image_item(role, url)}), message)
        for role, url, message in (
            ("user", None, "must be an image_url"),
            ("system", "data:image/png;base64,AAAA", "must be an image_url of a user's item"),
            ("user", "https://127.0.0.1/a.png", "must be a data URI"),
            ("user", "file:///etc/passwd", "must be a data URI"),
            ("user", "data:image/png;base64,AAAA", "item.content[0]: is not an image"),
        )
    ),
    (
        '{"type": "session.update", "session": {"type": "realtime", "audio": {"input": '
        '{"transcription": {"model": "whisper-1"}}}}}',
        "`whisper-1` does not exist",
    ),
    (
        '{"type": "session.update", "session": {"type": "realtime", "audio": {"input": '
        '{"transcription": {"language": "xx"}}}}}',
        "ISO 639-1",
    ),
    (
        '{"type": "session.update", "session": {"type": "realtime", "audio": {"output": '
        '{"voice": "alloy"}}}}',
        "must be one of",
    ),
    ('{"type": "session.update", "session": {"model": "other"}}', "does not exist"),
]


def test_faults_are_told_and_change_nothing(address: str) -> None:
    uri = address.replace("http", "ws") + "/v1/realtime?model=tiny"
    headers = {"Authorization": f"Bearer {KEY}"}
    with raw_connect(uri, additional_headers=headers) as client:
        first = json.loads(client.recv(5))["session"]
        for number, (sent, message) in enumerate(FAULTS):
            client.send(sent)
            event = json.loads(client.recv(5))
            assert event["type"] == "error", event
            assert message in event["error"]["message"], (number, event)
        client.send(json.dumps({"type": "session.update", "event_id": "e1", "session": {}}))
        assert json.loads(client.recv(5))["session"] == first
        client.send('{"type": "response.create", "event_id": "e2"}')
        assert json.loads(client.recv(5))["type"] == "response.created"
        failed = json.loads(client.recv(5))["response"]
        assert failed["status"] == "failed"
        assert "nothing to answer" in failed["status_details"]["error"]["message"]
        client.send('{"type": "response.cancel", "event_id": "e3"}')
        assert json.loads(client.recv(5))["error"]["event_id"] == "e3"


def test_who_may_connect(address: str) -> None:
    uri = address.replace("http", "ws") + "/v1/realtime"
    for headers, query, status in (
        ({}, "?model=tiny", 401),
        ({"Authorization": "Bearer wrong"}, "?model=tiny", 401),
        ({"Authorization": f"Bearer {KEY}"}, "?model=other", 404),
    ):
        with pytest.raises(InvalidStatus) as refused:
            raw_connect(uri + query, additional_headers=headers)
        assert refused.value.response.status_code == status
    protocols = ["realtime", f"openai-insecure-api-key.{KEY}"]
    with raw_connect(uri, subprotocols=protocols) as client:
        assert json.loads(client.recv(5))["type"] == "session.created"
        assert client.subprotocol == "realtime"


def test_a_client_has_no_more_sessions_than_it_leaves_free(address: str) -> None:
    async def talk(one: Talk) -> None:
        async with connected(address):
            with pytest.raises(InvalidStatus) as refused:
                async with connected(address):
                    pass
            assert refused.value.response.status_code == 503
        request = urllib.request.Request(f"{address}/metrics")
        request.add_header("Authorization", f"Bearer {KEY}")
        read = await asyncio.to_thread(lambda: urllib.request.urlopen(request).read().decode())
        assert 'oscar_mm_refusals_total{reason="realtime"} ' in read
        assert "oscar_mm_realtime_sessions " in read

    talked(address, talk)


def test_large_and_half_messages(address: str) -> None:
    uri = address.replace("http", "ws") + "/v1/realtime?model=tiny"
    headers = {"Authorization": f"Bearer {KEY}"}
    with raw_connect(uri, additional_headers=headers) as client:
        client.recv(5)
        with pytest.raises(ConnectionClosed) as closed:
            client.send("x" * (5 << 20))
            while True:
                client.recv(5)
        assert closed.value.rcvd is None or closed.value.rcvd.code == 1009
    with raw_connect(uri, additional_headers=headers) as client:
        client.recv(5)
        client.send('{"type": ' for _ in range(3))
        with pytest.raises(AssertionError, match="went on"):
            client.send(_unfinished())
        # The session is idle until its end, and others are served meanwhile.
        with urllib.request.urlopen(f"{address}/health", timeout=2) as health:
            assert health.read() == b"ok"


def _unfinished() -> Iterator[str]:
    yield '{"type": "input_audio'
    raise AssertionError("went on")


def test_a_flood_is_slowed_down_and_others_are_served(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_BURST": 100, "_MAX_SLOWED": 20, "_EVENTS_PER_S": 20}.items():
        monkeypatch.setattr(f"oscar_mm.apps.serve.realtime.{name}", value)
    uri = address.replace("http", "ws") + "/v1/realtime?model=tiny"
    headers = {"Authorization": f"Bearer {KEY}"}

    def flood() -> int:
        how: dict[str, Any] = {"additional_headers": headers, "max_queue": None}
        with raw_connect(uri, **how) as client, pytest.raises(ConnectionClosed) as closed:
            while True:
                client.send('{"type": "response.cancel"}')
        return closed.value.rcvd.code

    async def talk(one: Talk) -> None:
        flooding = asyncio.ensure_future(asyncio.to_thread(flood))
        await asyncio.sleep(0.3)
        start = time.monotonic()
        await ask(one, "What is it?")
        await one.until("response.done")
        assert time.monotonic() - start < 20
        assert await flooding == 1008

    talked(address, talk, max_output_tokens=3, output_modalities=["text"])


def test_replies_count_like_events(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small events that are answered by large ones are a flood too."""
    settings = {"_BURST": 200, "_MAX_SLOWED": 3, "_EVENTS_PER_S": 200, "_EVENT_BYTES": 100}
    for name, value in settings.items():
        monkeypatch.setattr(f"oscar_mm.apps.serve.realtime.{name}", value)
    uri = address.replace("http", "ws") + "/v1/realtime?model=tiny"
    headers = {"Authorization": f"Bearer {KEY}"}
    with raw_connect(uri, additional_headers=headers) as client:
        update = {"type": "session.update", "session": {"instructions": "Word " * 1000}}
        client.send(json.dumps(update))
        with pytest.raises(ConnectionClosed) as closed:
            for _ in range(20):
                client.recv(5)
                client.send('{"type": "session.update", "session": {}}')
    assert closed.value.rcvd.code == 1008


def test_a_client_that_does_not_read_is_left(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscar_mm.apps.serve.realtime._SEND_S", 0.3)
    port = int(address.rpartition(":")[2])
    with socket.socket() as narrow:
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect(("127.0.0.1", port))
        head = f"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        head += "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        narrow.sendall(f"{head}Sec-WebSocket-Key: {'A' * 22}==\r\n\r\n".encode())
        update = {"type": "session.update", "session": {"instructions": "Word " * 8000}}
        data = json.dumps(update).encode()
        frame = b"\x81\xff" + len(data).to_bytes(8, "big") + bytes(4) + data
        sent = itertools.count()
        with pytest.raises(OSError):
            while next(sent) < 1000:
                narrow.sendall(frame)
        assert next(sent) > 1


def test_sound_faster_than_it_is_read_waits(address: str) -> None:
    async def talk(one: Talk) -> None:
        await one.say(sound(70.0), size=RATE * 10)
        await one.connection.input_audio_buffer.commit()
        await one.connection.response.create()
        done = await one.until("response.done")
        assert done.response.usage.input_token_details.audio_tokens == 70 * 13

    talked(address, talk, max_output_tokens=3, output_modalities=["text"])


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


@pytest.mark.soak
def test_a_hundred_interrupted_sessions_leave_nothing(address: str, server, pipe) -> None:
    """Answers are cancelled, cut by speech or left after each number of events."""

    async def talk(number: int) -> None:
        async with connected(address) as one:
            session = {"type": "realtime", "max_output_tokens": 60}
            await one.connection.session.update(session=session | (PUSH if number % 2 else {}))
            await one.say(speech(1), size=RATE // 2)
            if number % 2:
                await one.connection.input_audio_buffer.commit()
                await one.connection.response.create()
            await one.until("response.created")
            for _ in range(number // 4 % 24):
                await one.connection.recv()
            if number % 4 == 0:
                await one.say(speech(2), size=RATE // 2)
                await one.until("response.done")
            elif number % 4 == 1:
                await one.connection.response.cancel()
                await one.until("response.done")

    asyncio.run(talk(1))
    before = threading.active_count()
    for number in range(100):
        asyncio.run(talk(number))
    deadline = time.monotonic() + 10
    while held(server, pipe) != (0, 0.0, 0.0, 0) or pipe.engine.speech_bytes:
        assert time.monotonic() < deadline, (held(server, pipe), pipe.engine.speech_bytes)
        time.sleep(0.02)
    assert threading.active_count() <= before + 2


def test_an_idle_session_ends(pipe) -> None:
    limits = ServerLimits(realtime_idle_s=0.6, head_s=0.2)
    with started(create_app(pipe, "tiny", limits)) as (_, address):
        client = raw_connect(address.replace("http", "ws") + "/v1/realtime")
        with client, pytest.raises(ConnectionClosed) as closed:
            while True:
                client.recv(5)
        assert "idle" in closed.value.rcvd.reason


def test_idle_sessions_give_up_their_memory(qwen3_omni_talker_folder: Path) -> None:
    """Three conversations do not fit into memory together; each goes on where it was."""
    how: dict[str, Any] = {"policy": "bf16", "device": "cpu", "kv_budget": "1.1MB"}
    pipe = OscarOmniPipeline(qwen3_omni_talker_folder, **how)
    pipe.model.generation_config.eos_token_id = NEVER
    read, used = list[int](), list[int]()

    async def talk(address: str) -> None:
        async with (
            connected(address) as one,
            connected(address) as two,
            connected(address) as three,
        ):
            for number, each in enumerate((one, two, three, one)):
                how = {"output_modalities": ["text"], "max_output_tokens": 3}
                await each.connection.session.update(session=PUSH | how)
                await each.say(sound(9.7, seed=number))
                await each.connection.input_audio_buffer.commit()
                await each.connection.response.create()
                usage = (await each.until("response.done")).response.usage
                read.append(usage.input_token_details.cached_tokens)
                used.append(pipe.engine.call(lambda: pipe.store.memory().used_bytes))

    with started(create_app(pipe, "tiny", ServerLimits(api_key=KEY))) as (_, address):
        asyncio.run(talk(address))
    assert read[:3] == [0, 0, 0] and read[3] > 126
    assert 3 * used[0] > 1_100_000 > max(used)


def test_web_pages_of_other_sites_are_refused(pipe) -> None:
    with started(create_app(pipe, "tiny", ServerLimits())) as (_, address):
        with pytest.raises(InvalidStatus) as refused:
            raw_connect(
                address.replace("http", "ws") + "/v1/realtime", origin="https://evil.example"
            )
        assert refused.value.response.status_code == 403


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
