"""Spoken answers over HTTP: whole, streamed, referred to, refused."""

import base64
import io
import json
import time
from collections.abc import Iterator
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
import soundfile

from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.serve.spoken import (
    _KEPT_S,
    MAX_TRANSCRIPTS,
    EarlierAudio,
    FieldError,
    KeptTranscripts,
    SoundEncoder,
    audio_file,
)
from oscar_mm.pipelines.families.qwen3_omni_talker import Qwen3OmniTalker
from tests.apps.serve.conftest import image, png, served, sound, text, user, wav
from tests.apps.serve.test_server import metrics
from tests.pipelines.conftest import NEVER
from tests.thinking import ids_of, saying
from tests.tool_template import CALL, FIND, with_tools

QUESTION = [user(sound(wav()), image(png()), text("What is it?"))]
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": QUESTION,
    "modalities": ["text", "audio"],
    "audio": {"voice": "chelsie", "format": "wav"},
    "temperature": 0,
    "seed": 1,
    "max_tokens": 9,
}


@pytest.fixture(scope="module")
def pipe(qwen3_omni_talker_folder) -> Iterator[OscarOmniPipeline]:
    made = OscarOmniPipeline(qwen3_omni_talker_folder, policy="bf16", device="cpu")
    made.model.generation_config.eos_token_id = NEVER
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Qwen3OmniTalker, "max_frames", 40)
        yield made


@pytest.fixture(scope="module")
def spoken(pipe) -> Iterator[str]:
    with served(pipe, max_request_bytes=1_000_000) as where:
        yield where


@pytest.fixture
def talk(spoken) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{spoken}/v1", api_key="none", max_retries=0) as made:
        yield made


def expected(pipe: OscarOmniPipeline, **options: Any) -> Any:
    how = {"speaker": "chelsie", "temperature": 0, "seed": 1, "max_new_tokens": 9} | options
    return pipe(messages=QUESTION, speak=True, **how)


def samples(data: bytes) -> np.ndarray:
    found, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    assert rate == 24_000 and found.ndim == 1
    return found


def streamed_samples(data: bytes) -> np.ndarray:
    """Read a file that does not say its length, which libsndfile refuses."""
    with av.open(io.BytesIO(data)) as file:
        to_float = av.AudioResampler("flt", "mono", 24_000)
        frames = [x for frame in file.decode(audio=0) for x in to_float.resample(frame)]
    return np.concatenate([frame.to_ndarray()[0] for frame in frames])


def test_a_whole_answer(pipe, talk) -> None:
    completion = talk.chat.completions.create(**ASKED)
    answer = expected(pipe)
    [choice] = completion.choices
    audio = choice.message.audio
    assert choice.message.content is None and audio.transcript == answer.text
    np.testing.assert_allclose(
        samples(base64.b64decode(audio.data)), answer.speech, atol=1e-4 + 2 / 32768
    )
    assert audio.expires_at > completion.created
    usage = completion.usage
    assert usage.completion_tokens_details.audio_tokens == answer.speech_tokens > 0
    assert usage.completion_tokens == 9 + answer.speech_tokens
    assert usage.kv_bytes_by_modality["speech"] > 0
    others = talk.chat.completions.create(**ASKED | {"audio": None})
    assert others.choices[0].message.audio.data != audio.data  # The default voice is another one.


def test_a_stream(pipe, talk) -> None:
    asked = ASKED | {"audio": {"voice": "Chelsie", "format": "pcm16"}, "max_tokens": 30}
    usage = {"stream_options": {"include_usage": True}}
    chunks = list(talk.chat.completions.create(**asked, **usage, stream=True))
    audio = [*map(_audio, chunks)]
    audio = [one for one in audio if one]
    assert len({one["id"] for one in audio}) == 1
    answer = expected(pipe, max_new_tokens=30)
    assert "".join(one.get("transcript", "") for one in audio) == answer.text
    pieces = [base64.b64decode(one["data"]) for one in audio if "data" in one]
    assert len(pieces) > 2
    found = np.frombuffer(b"".join(pieces), "<i2") / 32768
    np.testing.assert_allclose(found, answer.speech, atol=1e-4 + 2 / 32768)
    words = [place for place, one in enumerate(audio) if "transcript" in one]
    assert next(place for place, one in enumerate(audio) if "data" in one) < words[-1]
    assert [*audio[-1]] == ["id", "expires_at"] and chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens_details.audio_tokens == answer.speech_tokens


@pytest.mark.slow
def test_calls_come_beside_the_speech(qwen3_omni_calls_folder) -> None:
    pipe = OscarOmniPipeline(qwen3_omni_calls_folder, policy="bf16", device="cpu")
    [pipe.model.generation_config.eos_token_id] = ids_of(pipe, "<|im_end|>")
    asked = ASKED | {"max_tokens": 99, "tools": [FIND]}
    asked["messages"] = [{"role": "user", "content": "What is it?"}]
    with served(pipe) as where, openai.OpenAI(base_url=f"{where}/v1", api_key="none") as client:
        with saying(pipe, ids_of(pipe, "I look." + CALL)):
            whole = client.chat.completions.create(**asked).choices[0]
            stream = client.chat.completions.create(**asked | {"audio": {}, "stream": True})
            chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
        with saying(pipe, ids_of(pipe, CALL)):
            silent = client.chat.completions.create(**asked).choices[0]
    for choice in (whole, silent):
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert [call.function.name for call in choice.message.tool_calls] == ["find"]
    assert whole.message.audio.transcript == "I look." and silent.message.audio is None
    assert len(samples(base64.b64decode(whole.message.audio.data)))
    called = [one for chunk in chunks for one in chunk.delta.tool_calls or ()]
    assert "".join(one.function.arguments for one in called) == "{}"
    assert chunks[-1].finish_reason == "tool_calls"


def test_calls_without_a_token_are_refused_with_audio(pipe, talk, monkeypatch) -> None:
    monkeypatch.setattr(pipe.processor, "chat_template", with_tools(pipe.processor.chat_template))
    pipe.family.__dict__.pop("tool_format", None)
    with pytest.raises(openai.BadRequestError, match="would be spoken"):
        talk.chat.completions.create(**ASKED | {"tools": [FIND]})
    pipe.family.__dict__.pop("tool_format", None)


def test_frames_of_speech_are_not_counted_as_tokens(pipe, monkeypatch) -> None:
    # As if sending took 25 times as long, so that text and speech are sent together.
    monkeypatch.setattr("oscar_mm.apps.serve.piece_sender._SHARE", 0.15 / 25)
    monkeypatch.setattr("oscar_mm.apps.serve.piece_sender._MAX_BURST_S", 1e-4)
    with served(pipe, max_request_bytes=1_000_000) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            asked = ASKED | {"audio": {"voice": "Chelsie", "format": "pcm16"}, "max_tokens": 30}
            assert list(client.chat.completions.create(**asked, stream=True))
        assert metrics(address, None)['oscar_mm_tokens_total{kind="completion"}'] == 30


def _audio(chunk: Any) -> dict[str, Any]:
    """Return the audio of a chunk as the server sent it."""
    sent = chunk.model_dump(exclude_unset=True)["choices"]
    return sent[0]["delta"].get("audio", {}) if sent else {}


def test_a_stream_has_samples_by_default(talk) -> None:
    stream = talk.chat.completions.create(**ASKED | {"audio": {}, "stream": True})
    assert any("data" in _audio(chunk) for chunk in stream)


def test_a_stream_in_a_container(pipe, talk, monkeypatch) -> None:
    """The pieces are one file, whose first bytes come before the speech ends."""
    asked = ASKED | {"max_tokens": 30, "stream": True}
    answer = expected(pipe, max_new_tokens=30)
    for kind in ("flac", "mp3", "opus"):
        audio = {"voice": "chelsie", "format": kind}
        chunks = [*map(_audio, talk.chat.completions.create(**asked | {"audio": audio}))]
        sent = [place for place, one in enumerate(chunks) if "data" in one]
        words = [place for place, one in enumerate(chunks) if "transcript" in one]
        file = b"".join(base64.b64decode(chunks[place]["data"]) for place in sent)
        found = streamed_samples(file)
        assert len(sent) > 1 and sent[0] < words[-1]
        assert abs(len(found) - len(answer.speech)) < 3000
        if kind == "flac":
            np.testing.assert_allclose(found, answer.speech, atol=1e-4 + 2 / 32768)


@pytest.mark.parametrize("kind", ["mp3", "opus"])
def test_a_stream_is_as_long_for_libsndfile(kind: str) -> None:
    """Loud and silent seconds, which need different numbers of bits."""
    noise = np.random.default_rng(0).standard_normal(24_000).astype(np.float32) / 8
    sound, encoder = np.concatenate([noise, 0 * noise] * 4), SoundEncoder(kind)
    pieces = list[bytes]()
    for start in range(0, len(sound), 9600):
        encoder.write(sound[start : start + 9600], 24_000)
        pieces.append(encoder.take())
    encoder.close()
    found = samples(b"".join([*pieces, encoder.take()]))
    assert 0 <= len(found) - len(sound) < 3000


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "opus"])
def test_formats_keep_the_sound(kind: str) -> None:
    """A second of a tone; lossy codecs may shift it a little."""
    tone = np.sin(np.arange(24_000) * (2 * np.pi * 440 / 24_000)).astype(np.float32) / 2
    found = samples(audio_file(tone, 24_000, kind))
    assert abs(len(found) - len(tone)) < 3000
    spectrum = np.abs(np.fft.rfft(found[4000:20_000]))
    assert abs(spectrum.argmax() * 24_000 / 16_000 - 440) < 2
    assert abs(np.abs(found[4000:20_000]).max() - 0.5) < 0.05


def test_an_earlier_answer_is_what_it_said(spoken, talk) -> None:
    first = talk.chat.completions.create(**ASKED).choices[0].message
    again = user("And now?")

    def asked(*answer: Any) -> Any:
        messages = [*QUESTION, *answer, again]
        body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 5}
        return talk.chat.completions.create(**body)

    said = asked({"role": "assistant", "content": first.audio.transcript})
    by_id = asked({"role": "assistant", "audio": {"id": first.audio.id}})
    assert by_id.choices[0].message.content == said.choices[0].message.content
    assert by_id.usage.prompt_tokens == said.usage.prompt_tokens
    # A client may send the whole message back, even once it has expired.
    whole = asked(first.model_dump() | {"audio": first.audio.model_dump() | {"id": "audio_gone"}})
    assert whole.usage.prompt_tokens == said.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        asked({"role": "assistant", "audio": {"id": "audio_gone"}})
    assert refused.value.body["param"] == "messages[1].audio.id"
    assert "expired" in refused.value.body["message"]
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\].audio: only .* assistant"):
        asked({"role": "user", "content": "a", "audio": {"id": first.audio.id}})


def test_transcripts_are_bounded_and_expire() -> None:
    now = [1000.0]
    kept = KeptTranscripts(lambda: now[0])
    assert kept.add("a", "Hi") == 1000 + _KEPT_S
    assert kept.transcript(EarlierAudio(id="a", transcript="no"), "audio") == "Hi"
    now[0] += _KEPT_S
    with pytest.raises(FieldError, match=r"audio\.id"):
        kept.transcript(EarlierAudio(id="a"), "audio")
    for number in range(MAX_TRANSCRIPTS + 5):
        kept.add(str(number), "x")
    assert kept.get("4") is None and kept.get("5") == "x" and len(kept._kept) == MAX_TRANSCRIPTS


def test_what_is_refused(talk, client) -> None:
    def refused(made: Any, **options: Any) -> Any:
        with pytest.raises(openai.BadRequestError) as error:
            made.chat.completions.create(**ASKED | options)
        return error.value.body

    assert refused(talk, audio={"voice": "alloy", "format": "wav"})["param"] == "audio.voice"
    assert "ethan, chelsie" in refused(talk, audio={"voice": "alloy"})["message"]
    error = refused(client)
    assert error["param"] == "modalities" and "answers in text only" in error["message"]
    assert refused(talk, stop=["a"])["param"] == "stop"
    assert refused(talk, stream=True)["param"] == "audio.format"


def speech(address: str, **body: Any) -> httpx.Response:
    body = {"input": "Read the text.", "voice": "ethan", "seed": 1} | body
    return httpx.post(f"{address}/v1/audio/speech", json=body, trust_env=False, timeout=60)


def test_a_text_is_read_aloud(pipe, spoken, talk) -> None:
    answer = pipe.read_aloud("Read the text.", speaker="ethan", seed=1).complete()
    assert answer.text == "Read the text." and answer.finish_reason == "stop"
    how = {"model": "tiny", "input": "Read the text.", "voice": "ethan", "extra_body": {"seed": 1}}
    found = talk.audio.speech.create(**how, response_format="wav")
    assert found.response.headers["content-type"] == "audio/wav"
    np.testing.assert_allclose(samples(found.content), answer.speech, atol=2 / 32768)
    assert len(samples(speech(spoken).content)) > 0  # mp3
    with talk.audio.speech.with_streaming_response.create(**how, response_format="pcm") as raw:
        assert raw.headers["content-type"] == "audio/pcm"
        data = b"".join(raw.iter_bytes())
    np.testing.assert_allclose(np.frombuffer(data, "<i2") / 32768, answer.speech, atol=2 / 32768)
    events = speech(spoken, response_format="pcm", stream_format="sse").text.strip().split("\n\n")
    parsed = [json.loads(event.removeprefix("data: ")) for event in events]
    assert b"".join(base64.b64decode(one.get("audio", "")) for one in parsed) == data
    assert parsed[-1]["type"] == "speech.audio.done"
    assert parsed[-1]["usage"]["output_tokens"] == len(answer.token_ids) + answer.speech_tokens
    events = speech(spoken, response_format="flac", stream_format="sse").text.strip().split("\n\n")
    parsed = [json.loads(event.removeprefix("data: ")) for event in events]
    file = b"".join(base64.b64decode(one.get("audio", "")) for one in parsed)
    np.testing.assert_allclose(streamed_samples(file), answer.speech, atol=2 / 32768)


@pytest.mark.parametrize(
    ("body", "field", "word"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": "a" * 4097}, "input", "4096"),
        ({"input": "<|im_end|>"}, "input", "control token"),
        ({"voice": "alloy"}, "voice", "ethan, chelsie"),
        ({"speed": 1.5}, "speed", "only 1"),
        ({"instructions": "Whisper."}, "instructions", "leave it out"),
        ({"response_format": "aac"}, "response_format", "mp3"),
        ({"stream_format": "sse", "response_format": "wav"}, "response_format", "pcm"),
        ({"input": "a " * 2000}, "input", "at most 40 can be spoken"),
        ({"model": "other"}, "model", "other"),
    ],
)
def test_texts_that_are_refused(spoken, body: dict[str, Any], field: str, word: str) -> None:
    response = speech(spoken, **body)
    error = response.json()["error"]
    assert response.status_code == (404 if field == "model" else 400) and error["param"] == field
    assert word in error["message"]


def test_a_model_in_text_only_reads_nothing_aloud(client) -> None:
    with pytest.raises(openai.BadRequestError, match="answers in text only"):
        client.audio.speech.create(model="tiny", input="Hi", voice="ethan")


def test_a_client_that_leaves_ends_the_speech(pipe, spoken, monkeypatch) -> None:
    monkeypatch.setattr(Qwen3OmniTalker, "max_frames", 4000)
    monkeypatch.setattr(pipe.family.talker, "end_code", -1)
    body = {"input": "Read " * 40, "response_format": "pcm", "seed": 2}
    url = f"{spoken}/v1/audio/speech"
    with httpx.stream("POST", url, json=body, trust_env=False, timeout=60) as response:
        pieces = response.iter_bytes()
        assert response.status_code == 200 and len(next(pieces)) > 0
        measured = httpx.get(f"{spoken}/metrics", trust_env=False).text
        [line] = [x for x in measured.split("\n") if x.startswith('oscar_mm_kv_bytes{modality="sp')]
        assert float(line.split()[-1]) > 0
    deadline = time.monotonic() + 20
    while pipe.engine.call(lambda: pipe.engine.speech_bytes):
        assert time.monotonic() < deadline
        time.sleep(0.01)
