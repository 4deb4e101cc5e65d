"""Questions of the microphone: answers are spoken if the talker can follow."""

import asyncio
import base64
import json
import math
import wave
from collections.abc import Iterator
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import numpy as np
import pytest

from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.demo.handlers import Handlers
from oscar_mm.apps.demo.live_speech import LiveSpeech
from oscar_mm.apps.demo.measured_chat import MemorySample
from oscar_mm.apps.demo.sessions import Sessions
from oscar_mm.models import SAMPLES
from oscar_mm.pipelines.families.qwen3_omni_talker import Qwen3OmniTalker
from tests.apps.demo.conftest import COMPACT
from tests.pipelines.conftest import NEVER


@pytest.fixture
def talking(qwen3_omni_talker_folder, uploads, monkeypatch) -> Iterator[Sessions]:
    monkeypatch.setattr(Qwen3OmniTalker, "max_frames", 12)
    pipe = OscarOmniPipeline(qwen3_omni_talker_folder, policy=COMPACT.policy, device="cpu")
    pipe.model.generation_config.eos_token_id = NEVER
    pipe.family.talker.end_code = -1
    made = Sessions(pipe, COMPACT, (uploads,))
    yield made
    made.close()


def talked(session: Any, *files: Path) -> Any:
    for _ in session.ask("", files, is_talk=True, max_new_tokens=9, temperature=0.0):
        pass
    assert not session.exchanges[-1].error and session.exchanges[-1].answer
    return session.conversation.speech


def test_answers_are_spoken_unless_the_talker_missed_media(talking, uploads) -> None:
    session = talking.session("a")
    for _ in range(2):
        rate, samples = talked(session, uploads / "tone.wav")
        assert rate == 24_000 and len(samples) and samples.dtype == np.float32
        assert "Not spoken" not in session.exchanges[-1].hint
    for _ in session.ask("And this?", [uploads / "0.png"], max_new_tokens=9):
        pass
    assert session.conversation.speech is None
    assert "Not spoken" not in session.exchanges[-1].hint
    assert talked(session, uploads / "tone.wav") is None
    assert "Not spoken" in session.exchanges[-1].hint


def test_the_page_gets_the_text_first_and_then_the_speech(talking, uploads, monkeypatch) -> None:
    handlers, session = Handlers(talking, uploads / "made"), talking.session("a")
    monkeypatch.setattr(handlers, "_session", lambda _: session)
    request: Any = SimpleNamespace(session_hash="a")
    scenario = "H100", "Qwen3-VL-8B", "32K tokens"
    push(handlers, SAMPLES / "clips" / "01.wav")
    steps = handlers.answer_heard(request, 0.0, 9, *scenario)
    first, *shown, last = [*steps]
    assert first[-2] != gr.skip()  # The player is emptied.
    answer = session.turns[0].answer
    assert shown and all(one[-2] == gr.skip() for one in shown)
    assert escape(answer.strip()[:4]) in last[0]
    rate, samples = last[-2]
    assert rate == 24_000 and samples.dtype == np.int16 and np.abs(samples).max() > 100
    # The key comes once, and names what the page may play meanwhile.
    keys = [one[-1] for one in (first, *shown, last) if one[-1] != gr.skip()]
    spoken = talking.speech(keys[0])
    assert len(keys) == 1 and spoken is not None and talking.speech("") is None
    *lines, end = asyncio.run(lines_of(spoken))
    sounds = b"".join(base64.b64decode(line["sound"]) for line in lines)
    assert sounds == samples.astype("<i2").tobytes() and {line["rate"] for line in lines} == {rate}
    assert end == {"text": answer}
    said = [line["said"] for line in lines]
    assert said[2] == answer
    assert 0 < len(said[0]) < len(said[1]) and answer.startswith(said[0].rstrip("\ufffd"))


def push(handlers: Handlers, recording: Path) -> None:
    """Push to talk."""
    with wave.open(str(recording)) as file:
        sound = file.readframes(file.getnframes())
    for begin in range(0, len(sound), 64_000):
        part = base64.b64encode(sound[begin : begin + 64_000]).decode()
        marks = {"push": True, "begins": not begin, "ends": begin + 64_000 >= len(sound)}
        event: Any = SimpleNamespace(sound=part, **marks)
        request: Any = SimpleNamespace(session_hash="a")
        handlers.hear(request, event)


async def lines_of(spoken: LiveSpeech) -> list[dict[str, Any]]:
    return [json.loads(line) async for line in spoken.lines()]


def test_speech_comes_while_the_answer_is_made(talking, uploads, monkeypatch) -> None:
    session, add = talking.session("a"), LiveSpeech.add
    found, heard = list[Any](), list[int]()

    def noted(spoken: Any, speech: Any, said: str) -> None:
        found.append((session.is_answering, len(session.turns), said))
        running = session.conversation.chat.so_far
        assert running is not None
        heard.append(MemorySample.of(running.memory, 0).parts["speech"])
        add(spoken, speech, said)

    monkeypatch.setattr(LiveSpeech, "add", noted)
    talked(session, uploads / "tone.wav")
    now, report = session.conversation.curve.last, session.conversation.memory
    assert min(heard) > 0 and now.parts["speech"] == report.by_modality["speech"] > 0
    assert now.used_bytes == sum(now.parts.values())
    assert len(found) == 3 and all(one[:2] == (True, 0) for one in found)
    said = [one[2] for one in found]
    assert 0 < len(said[0]) < len(said[1]) <= len(said[2])
    assert said[2].startswith(said[1]) and said[1].startswith(said[0])


def test_what_nobody_heard_is_not_part_of_the_conversation(
    talking, uploads, tmp_path, monkeypatch
) -> None:
    handlers, session = Handlers(talking, tmp_path), talking.session("a")
    monkeypatch.setattr(handlers, "_session", lambda _: session)
    rate, samples = talked(session, uploads / "tone.wav")
    [whole] = [turn.answer for turn in session.conversation.chat.turns]
    request: Any = SimpleNamespace(session_hash="a")

    def silenced(**data: Any) -> None:
        event = gr.EventData(None, {"key": session.aloud.key} | data)
        handlers.keep_heard(request, event, "H100", "Qwen3-VL-8B", "32K tokens")

    for wrong in (math.nan, -1, "1", None):
        with pytest.raises(gr.Error, match="seconds must be"):
            silenced(seconds=wrong)
    silenced(seconds=0.0, key="other")
    silenced(seconds=1e9)
    assert session.turns[-1].answer == session.conversation.chat.turns[-1].answer == whole
    silenced(seconds=len(samples) / rate * 4.5 / 9)
    [turn] = session.conversation.chat.turns
    assert turn.answer_tokens == 5 and turn.finish_reason == "interrupted"
    assert whole.startswith(turn.answer) and session.turns[-1].answer == turn.answer != whole
    assert "stopped" in session.turns[-1].note
    key = session.aloud.key
    for _ in session.ask("And?", [], max_new_tokens=3):
        pass
    silenced(seconds=0.0, key=key)  # It is not the last answer any more.
    assert session.conversation.chat.turns[0].answer == turn.answer


def test_a_recording_is_asked_again(talking, uploads, tmp_path, monkeypatch) -> None:
    handlers, session = Handlers(talking, tmp_path), talking.session("a")
    talked(session, uploads / "tone.wav")
    monkeypatch.setattr(handlers, "_session", lambda _: session)
    request: Any = SimpleNamespace(session_hash="a")
    for _ in handlers.retry(request, 0.0, 9, "H100", "Qwen3-VL-8B", "32K tokens"):
        pass
    assert len(session.turns) == 1 and not session.exchanges[-1].error
