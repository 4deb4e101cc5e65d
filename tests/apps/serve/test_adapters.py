"""A client names an adapter as the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from oscar_mm import OscarVLPipeline
from oscar_mm.apps.serve.messages_body import PATH
from tests.apps.serve.conftest import served, user
from tests.apps.serve.test_openai_types import ModelList, sent
from tests.lora import ADAPTERS, saved_adapters

pytest.importorskip("peft")
NAMES = ["tiny", *ADAPTERS]
QUESTION = "What did the user ask about the sign?"
TOKENS = 8


@pytest.fixture(scope="module")
def pipe(qwen3_vl_folder, tmp_path_factory) -> OscarVLPipeline:
    folders = saved_adapters(qwen3_vl_folder, tmp_path_factory.mktemp("adapters"))
    pipe = OscarVLPipeline(
        qwen3_vl_folder, device="cpu", policy="bf16", adapters=folders, prefix_cache="100MB"
    )
    pipe.family.end_tokens = frozenset
    return pipe


@pytest.fixture(scope="module")
def address(pipe) -> Iterator[str]:
    with served(pipe) as where:
        yield where


@pytest.fixture(scope="module")
def client(address) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def said(pipe: OscarVLPipeline, name: str, **asked: Any) -> str:
    """What the pipeline itself answers with the adapter of this name."""
    adapter = name if name in ADAPTERS else None
    return pipe(adapter=adapter, max_new_tokens=TOKENS, temperature=0, **asked).text


def ask(client: openai.OpenAI, name: str, *messages: Any) -> Any:
    how = {"max_tokens": TOKENS, "temperature": 0}
    return client.chat.completions.create(model=name, messages=list(messages), **how)


def test_the_list_has_them_below_their_model(address, client) -> None:
    cards = ModelList.model_validate_json(sent(address, "/v1/models")[1], strict=False).data
    assert [card.id for card in cards] == NAMES
    assert [card.parent for card in client.models.list()] == [None, "tiny", "tiny"]
    assert client.models.retrieve("decoder").id == "decoder"
    with pytest.raises(openai.NotFoundError, match="`x` does not exist: this server has `tiny`, `"):
        ask(client, "x", user("Hi"))


def test_clients_of_different_adapters_at_once(pipe, client) -> None:
    names = [*NAMES, *NAMES]
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: ask(client, name, user(QUESTION)), names))
    expected = [said(pipe, name, prompt=QUESTION) for name in names]
    assert [answer.choices[0].message.content for answer in answers] == expected
    assert [answer.model for answer in answers] == names
    assert len(set(expected)) == 3


def test_every_api(pipe, address) -> None:
    asked = {"max_tokens": TOKENS, "temperature": 0}
    messages = asked | {"messages": [user(QUESTION)]}
    for name in NAMES:
        expected = said(pipe, name, prompt=QUESTION)
        response = {"input": QUESTION, "max_output_tokens": TOKENS, "temperature": 0}
        found = json.loads(sent(address, "/v1/responses", response | {"model": name})[1])
        assert found["output"][-1]["content"][0]["text"] == expected
        found = json.loads(sent(address, PATH, messages | {"model": name})[1])
        assert found["content"][0]["text"] == expected
        whole = messages | {"model": name, "prompt_logprobs": 0}
        found = json.loads(sent(address, "/v1/chat/completions", whole)[1])
        assert found["choices"][0]["message"]["content"] == expected
    texts = {
        json.loads(sent(address, "/v1/completions", asked | {"prompt": "Hi", "model": name})[1])[
            "choices"
        ][0]["text"]
        for name in NAMES
    }
    assert len(texts) == 3


def test_a_conversation_is_not_continued_with_another_adapter(pipe, client) -> None:
    first = user("Hello there, what is on the sign? " * 20)  # Only whole pages are reported.
    answer = ask(client, "decoder", first).choices[0].message.content
    past = [first, {"role": "assistant", "content": answer}, user("And now?")]
    cached = {}
    for name in NAMES:
        found = ask(client, name, *past)
        # Its own chat has the answer's tokens, which its text would not give again.
        if name != "decoder":
            assert found.choices[0].message.content == said(pipe, name, messages=past), name
        cached[name] = found.usage.prompt_tokens_details.cached_tokens
    assert cached["decoder"] > 0 == cached["towers"] == cached["tiny"]
