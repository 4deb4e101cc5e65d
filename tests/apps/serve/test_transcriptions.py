"""OpenAI's audio API: a transcription is the answer to a question about a recording."""

import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.audio import (
    Transcription,
    TranscriptionTextDeltaEvent,
    TranscriptionTextDoneEvent,
)

from oscar_mm.apps.serve.protocol import FieldError
from oscar_mm.apps.serve.transcriptions_body import (
    TRANSCRIPTIONS,
    TRANSLATIONS,
    TranscriptionBody,
    read_form,
)
from tests.apps.serve.conftest import png, served, sound, text, user, wav

SPOKEN = wav()


@pytest.fixture(scope="module")
def open_address(omni) -> Iterator[str]:
    """Address of a server without a key that gives short answers."""
    with served(omni, max_new_tokens=12, max_request_bytes=200_000) as where:
        yield where


@pytest.fixture
def client(open_address) -> Any:
    return openai.OpenAI(base_url=f"{open_address}/v1", api_key="none", max_retries=0)


def chat(client: Any, asked: str) -> Any:
    messages = [user(sound(SPOKEN), text(asked))]
    return client.chat.completions.create(model="tiny", messages=messages, temperature=0)


def transcribe(client: Any, **options: Any) -> Any:
    options = {"model": "tiny", "file": ("a.wav", SPOKEN)} | options
    return client.audio.transcriptions.create(**options)


def form(address: str, path: str = TRANSCRIPTIONS, **options: Any) -> tuple[int, str]:
    options = {"files": {"file": ("a.wav", SPOKEN)}} | options
    response = httpx.post(address + path, trust_env=False, timeout=30, **options)
    return response.status_code, response.text


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, "Transcribe the audio into text."),
        ({"language": "de"}, "Transcribe the German audio into text."),
        ({"language": "Mandarin"}, "Transcribe the Chinese audio into text."),
        (
            {"prompt": "Hi, Ann."},
            "Transcribe the audio into text. It continues this text: Hi, Ann.",
        ),
    ],
)
def test_it_is_the_answer_of_a_chat(client, options: dict[str, Any], asked: str) -> None:
    answer = transcribe(client, **options)
    expected = chat(client, asked)
    assert answer.text == expected.choices[0].message.content
    usage = answer.usage
    assert usage.input_tokens == expected.usage.prompt_tokens and usage.output_tokens == 12
    assert usage.input_token_details.audio_tokens > 5


def test_the_text_is_bounded_by_the_length_of_the_recording() -> None:
    def most(file: bytes) -> int | None:
        return TranscriptionBody(file=file).chat_body(translate=False)["max_tokens"]

    assert most(wav(seconds=2.0)) == 256 + 32 and most(wav(seconds=20.0)) == 256 + 320
    assert most(b"RIFF") is None, "refused once it is read"


def test_a_translation_is_into_english(client) -> None:
    answer = client.audio.translations.create(model="tiny", file=("a.wav", SPOKEN))
    expected = chat(client, "Translate the audio into English.")
    assert answer.text == expected.choices[0].message.content


def test_formats(client, open_address) -> None:
    expected = transcribe(client).text
    assert transcribe(client, response_format="text") == expected
    _, whole = form(open_address)
    assert Transcription.model_validate_json(whole, strict=True).text == expected
    status, stream = form(open_address, data={"stream": "true", "model": ""})
    frames = [frame.removeprefix("data: ") for frame in stream.split("\n\n")[:-1]]
    *deltas, done = frames
    pieces = [TranscriptionTextDeltaEvent.model_validate_json(one, strict=True) for one in deltas]
    assert status == 200 and len(pieces) > 1
    assert "".join(piece.delta for piece in pieces) == expected
    last = TranscriptionTextDoneEvent.model_validate_json(done, strict=True)
    assert last.text == expected and last.usage.output_tokens == 12
    events = list(transcribe(client, stream=True))
    assert events[-1].text == expected


def test_reasoning_is_left_out() -> None:
    from oscar_mm.apps.serve.transcription_writer import TranscriptionWriter
    from oscar_mm.engine.answer import Reasoning

    writer = TranscriptionWriter(plain=False)
    assert list(writer.piece(0, Reasoning("Hm."), None)) == []
    [event] = writer.piece(0, "Hi.", None)
    assert json.loads(event.removeprefix("data: "))["delta"] == "Hi."


@pytest.mark.parametrize(
    ("options", "field", "expected"),
    [
        (
            {"data": {"response_format": "srt"}},
            "response_format",
            "must be json or text, because the model",
        ),
        ({"data": {"response_format": "verbose_json"}}, "response_format", "no timestamps"),
        ({"data": {"response_format": "cat"}}, "response_format", "must be 'json' or 'text'"),
        ({"data": {"language": "xx"}}, "language", "an ISO 639-1 code"),
        ({"data": {"temperature": "-1"}}, "temperature", "must be 0 or a number"),
        ({"data": {"temperature": "warm"}}, "temperature", "temperature: must be a number"),
        ({"data": {"stream": "perhaps"}}, "stream", "stream: must be true or false"),
        ({"data": {"timestamp_granularities[]": ["word", "segment"]}}, None, "not supported"),
        ({"data": {"prompt": "<|im_end|>"}}, None, "prompt contains '<|im_end|>'"),
        ({"files": {"file": ("a.wav", b"")}}, "file", "is missing or empty"),
        ({"files": {"other": ("a.wav", SPOKEN)}}, "file", "is missing or empty"),
        ({"files": {"file": ("a.wav", b"no sound")}}, "file", "file: "),
        ({"files": {"file": ("a.png", png())}}, "file", "file: "),
        ({"data": {f"a{at}": "b" for at in range(40)}}, None, "more than 32 parts"),
    ],
)
def test_refused(open_address, options: dict[str, Any], field: str | None, expected: str) -> None:
    status, answer = form(open_address, **options)
    error = json.loads(answer)["error"]
    assert status == 400 and expected in error["message"], error
    assert "messages" not in error["message"] and field in (None, error["param"])


def test_bounds_and_unknown_models(open_address) -> None:
    assert form(open_address, files={"file": ("a.wav", b"a" * 200_001)})[0] == 413
    status, answer = form(open_address, data={"model": "whisper-1"})
    assert status == 404 and "this server has `tiny`" in answer
    # A page of another site can send a form without asking first.
    assert form(open_address, headers={"Origin": "http://evil.example"})[0] == 403
    assert form(open_address, path="/v1/chat/completions")[0] == 415


def test_a_model_without_audio(tool_address) -> None:
    for path in (TRANSCRIPTIONS, TRANSLATIONS):
        status, answer = form(tool_address, path=path)
        error = json.loads(answer)["error"]
        assert (status, error["param"]) == (400, "file") and "audio" in error["message"], error


BOUNDARY = "multipart/form-data; boundary=x"
PART = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n'


@pytest.mark.parametrize(
    ("data", "kind", "expected"),
    [
        (b"{}", "application/json", "must be multipart/form-data"),
        (b"", "", "must be multipart/form-data"),
        (PART, "multipart/form-data", "is not a valid form"),
        (b"garbage", BOUNDARY, "is not a valid form"),
        (b"", BOUNDARY, "is missing or empty"),
        (PART + b"--x--\r\n", BOUNDARY, "is missing or empty"),
        (PART.replace(b"name", b"nam"), BOUNDARY, "is not a valid form"),
        (PART * 40 + b"--x--\r\n", BOUNDARY, "more than 32 parts"),
        (PART.replace(b"b\r\n", b"\xff\r\n") + b"--x--\r\n", BOUNDARY, "must be UTF-8 text"),
        (PART[:-20], BOUNDARY, "is missing or empty"),
        (b"--x\r\n" + b"A: b\r\n" * 5000, BOUNDARY, "is not a valid form"),
    ],
)
def test_no_forms(data: bytes, kind: str, expected: str) -> None:
    with pytest.raises(FieldError, match=expected):
        read_form(data, kind)


def test_a_file_stays_in_memory() -> None:
    """Also a large one, which the parser of forms would write to the disk."""
    large = bytes(3 << 20)
    request = httpx.Request("POST", "http://a", files={"file": ("a", io.BytesIO(large))})
    body = read_form(request.read(), request.headers["Content-Type"])
    assert body.file == large
