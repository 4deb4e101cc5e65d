"""Every body that the server sends is valid for OpenAI's types, strictly."""

import json
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from pydantic import BaseModel, ConfigDict

from tests.apps.serve.conftest import image, png, served, text, user
from tests.thinking import ids_of, saying

QUESTION = [user(image(png()), text("What is it?"))]


class ModelList(BaseModel):
    """The page of ``client.models.list()``, which openai has as a generic class."""

    model_config = ConfigDict(extra="forbid")
    object: str
    data: list[Model]


class ErrorBody(BaseModel):
    """The body of an error, which openai takes apart by hand."""

    model_config = ConfigDict(extra="forbid")
    error: ErrorObject


def sent(address: str, path: str, body: Any = None, method: str | None = None) -> tuple[int, str]:
    """Status and body of a response."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    request = urllib.request.Request(address + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def asked(address: str, **body: Any) -> tuple[int, str]:
    return sent(address, "/v1/chat/completions", {"messages": QUESTION, "max_tokens": 12} | body)


def test_models(address) -> None:
    _, listed = sent(address, "/v1/models")
    [model] = ModelList.model_validate_json(listed, strict=True).data
    _, one = sent(address, "/v1/models/tiny")
    assert Model.model_validate_json(one, strict=True) == model
    assert time.time() - 3600 < model.created <= time.time()


@pytest.mark.parametrize("most", [1, 12])
def test_answers(address, most: int) -> None:
    _, whole = asked(address, max_tokens=most)
    answer = ChatCompletion.model_validate_json(whole, strict=True)
    for usage in (True, False):
        options = {"stream": True, "stream_options": {"include_usage": usage}}
        _, stream = asked(address, max_tokens=most, **options)
        *events, end, _ = stream.split("\n\n")
        assert end == "data: [DONE]"
        chunks = [
            ChatCompletionChunk.model_validate_json(event.removeprefix("data: "), strict=True)
            for event in events
        ]
        written = (one.choices[0].delta.content or "" for one in chunks if one.choices)
        assert "".join(written) == answer.choices[0].message.content
        assert (chunks[-1].usage is not None) is usage


@pytest.mark.parametrize("stop", [None, "zzz"])
def test_logprobs(address, omni, stop: str | None) -> None:
    """Tokens that stand in no chunk of text come with the next or the last one."""
    body = {"max_tokens": 12, "logprobs": True, "top_logprobs": 2, "stop": stop}
    _, whole = asked(address, **body)
    [choice] = ChatCompletion.model_validate_json(whole, strict=True).choices
    content = choice.logprobs.content
    with omni.chat() as chat:
        expected = chat.ask("What is it?", images=[png()], max_new_tokens=12, logprobs=2)
    assert [one.logprob for one in content] == [one.logprob for one in expected.logprobs]
    assert b"".join(bytes(one.bytes) for one in content).decode(errors="replace") == expected.text
    for one in content:
        assert one.token == bytes(one.bytes).decode(errors="replace")
        assert len(one.top_logprobs) == 2 and one.top_logprobs[0].token == one.token
        assert one.top_logprobs[0].logprob == one.logprob > one.top_logprobs[1].logprob
    _, stream = asked(address, stream=True, **body)
    chunks = [
        ChatCompletionChunk.model_validate_json(event.removeprefix("data: "), strict=True)
        for event in stream.split("\n\n")[:-2]
    ]
    found = [one.choices[0].logprobs for one in chunks]
    assert [one for part in found if part for one in part.content] == content
    assert json.loads(asked(address)[1])["choices"][0]["logprobs"] is None


def test_answers_of_a_thinking_model(qwen3_vl_thinking_folder) -> None:
    from oscar_mm import OscarVLPipeline

    pipe = OscarVLPipeline(qwen3_vl_thinking_folder, policy="compact", device="cpu")
    said = ids_of(pipe, "It is a picture.\n</think>\n\nA sign.")
    with served(pipe) as address, saying(pipe, said):
        _, whole = asked(address, max_tokens=40)
        _, stream = asked(address, max_tokens=40, stream=True)
    assert ChatCompletion.model_validate_json(whole, strict=True).choices[0].message.content
    *events, _, _ = stream.split("\n\n")
    for event in events:
        ChatCompletionChunk.model_validate_json(event.removeprefix("data: "), strict=True)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", {"messages": QUESTION, "temperature": -1}, 400),
        ("/v1/chat/completions", {"messages": [user("7!" * 45_000)]}, 400),
        ("/v1/chat/completions", {"messages": QUESTION, "model": "other"}, 404),
        ("/v1/chat/completions", b" " * 200_001, 413),
        ("/v1/chat/completions", None, 405),
        ("/v1/models/other", None, 404),
        ("/v1/nothing", None, 404),
    ],
)
def test_errors(address, path: str, body: Any, status: int) -> None:
    found, error = sent(address, path, body)
    assert found == status
    assert ErrorBody.model_validate_json(error, strict=True).error.message


def test_errors_of_a_server_without_a_key(omni, monkeypatch) -> None:
    monkeypatch.setattr(omni.family, "render", lambda *_, **__: 1 / 0)
    with served(omni) as address:
        found = [asked(address), asked(address, stream=True)]
        foreign = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{address}/v1/chat/completions", b"{}", foreign)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        found.append((refused.value.code, refused.value.read().decode()))
    with served(omni, api_key="another") as address:
        found.append(asked(address))
    assert [status for status, _ in found] == [500, 500, 415, 401]
    for _, error in found:
        ErrorBody.model_validate_json(error, strict=True)
