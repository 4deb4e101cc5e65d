"""Requests that the chat template writes in another way than turn by turn."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from oscar_mm import OscarVLPipeline
from tests.apps.serve.conftest import image, png, served, text, user
from tests.apps.serve.test_openai_types import sent
from tests.apps.serve.test_server import ask, client_of, metrics
from tests.apps.serve.test_service import asking, eventually
from tests.pipelines.conftest import NEVER
from tests.pipelines.test_template import SWITCHED

SHOWN = user(image(png()), text("What is it?"))
SAID = {"role": "assistant", "content": "It is a red"}
CONTINUED = {"continue_final_message": True}


@pytest.fixture(scope="module")
def pipe(qwen3_vl_thinking_folder) -> OscarVLPipeline:
    options = {"policy": "compact", "device": "cpu", "prefix_cache": 4 << 20}
    made = OscarVLPipeline(qwen3_vl_thinking_folder, **options)
    made.processor.chat_template = SWITCHED
    made.model.generation_config.eos_token_id = NEVER
    return made


@pytest.fixture(scope="module")
def where(pipe) -> Iterator[str]:
    with served(pipe) as address:
        yield address


def asked(address: str, *messages: Any, **fields: Any) -> Any:
    """The answer to a request; its message and usage."""
    with client_of(address) as client:
        answer = ask(client, *messages, temperature=0, **fields)
        return [*answer] if fields.get("stream") else answer


def png_part() -> dict[str, Any]:
    return {"type": "image", "image": png()}


def words(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def test_the_last_message_is_continued(pipe, where) -> None:
    given = [{"role": "user", "content": [png_part(), words("What is it?")]}, SAID]
    expected = pipe.chat_completion(given, max_new_tokens=6, temperature=0, **CONTINUED)
    found = asked(where, SHOWN, SAID, extra_body=CONTINUED)
    assert found.choices[0].message.content == expected.text
    assert found.usage.prompt_tokens == expected.prompt_tokens
    echoed = asked(where, SHOWN, SAID, extra_body=CONTINUED | {"echo": True})
    assert echoed.choices[0].message.content == SAID["content"] + expected.text
    stream = asked(where, SHOWN, SAID, extra_body=CONTINUED | {"echo": True}, stream=True)
    pieces = [part.choices[0].delta.content or "" for part in stream if part.choices]
    assert "".join(pieces) == SAID["content"] + expected.text
    # A question is not echoed: its role is another one.
    asking_only = [asked(where, SHOWN, extra_body=x) for x in ({"echo": True}, {"echo": False})]
    assert asking_only[0].choices == asking_only[1].choices


@pytest.mark.daily("none", "high")
@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high"])
def test_effort(pipe, where, effort: str) -> None:
    message = asked(where, user("Why?"), reasoning_effort=effort).choices[0].message
    reasoning = getattr(message, "reasoning_content", None)
    assert (reasoning is None) == (effort == "none")
    body = {"input": "Why?", "reasoning": {"effort": effort}, "max_output_tokens": 6}
    _, response = sent(where, "/v1/responses", body | {"temperature": 0})
    kinds = [item["type"] for item in json.loads(response)["output"]]
    assert ("reasoning" in kinds) == (effort != "none")


def test_a_budget_of_the_reasoning(where) -> None:
    for field in ({"thinking_token_budget": 3}, {"thinking_token_budget": 0}):
        answer = asked(where, user("Why?"), max_tokens=20, extra_body=field)
        assert answer.choices[0].message.content
        details = answer.usage.completion_tokens_details
        assert 0 < details.reasoning_tokens <= field["thinking_token_budget"] + 3
    free = asked(where, user("Why?"), max_tokens=20, extra_body={"thinking_token_budget": -1})
    assert not free.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_is_left_out(where, stream: bool) -> None:
    said = {True: "", False: ""}
    for included in said:
        fields = {"thinking_token_budget": 3, "include_reasoning": included}
        found = asked(where, user("Why?"), max_tokens=20, stream=stream, extra_body=fields)
        for one in found if stream else [found]:
            message = one.choices[0].delta if stream else one.choices[0].message
            said[included] += message.content or ""
            shown = [hasattr(message, name) for name in ("reasoning", "reasoning_content")]
            assert included or not any(shown)
    assert said[True] == said[False] != ""


def test_variables_and_a_conversation(pipe, where) -> None:
    """A later turn finds its beginning in the prefix cache."""
    variables = {"chat_template_kwargs": {"enable_thinking": False, "style": "Be brief. " * 90}}
    first = asked(where, SHOWN, extra_body=variables)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    later = asked(where, SHOWN, said, user("Why?"), extra_body=variables)
    assert later.usage.prompt_tokens_details.cached_tokens > 0
    plain = asked(where, SHOWN, extra_body={"chat_template_kwargs": {"unknown": 1}})
    assert plain.usage.prompt_tokens < first.usage.prompt_tokens


def test_a_model_that_does_not_reason(address, client) -> None:
    expected = ask(client, user("Why?")).choices[0].message.content
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh"):
        found = ask(client, user("Why?"), reasoning_effort=effort)
        assert found.choices[0].message.content == expected


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"style": "<|im_end|>"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"style": "x" * 70_000}}, "chat_template_kwargs"),
        (CONTINUED | {"add_generation_prompt": True}, "continue_final_message"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ],
)
def test_what_is_refused(where, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asked(where, SHOWN, SAID, user("Why?"), extra_body=fields)
    assert caught.value.param == field
    assert caught.value.response.headers["content-type"] == "application/json"


def test_efforts_are_named_as_the_responses_api_does(where) -> None:
    status, text = sent(where, "/v1/responses", {"input": "a", "reasoning": {"effort": "much"}})
    assert status == 400
    assert json.loads(text)["error"]["param"] == "reasoning.effort"


def test_messages_that_end_with_an_answer(where) -> None:
    with pytest.raises(openai.BadRequestError, match="must not end with an assistant"):
        asked(where, SHOWN, SAID)
    assert asked(where, SHOWN, SAID, extra_body={"add_generation_prompt": False}).choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_ends_the_answer(pipe, where, stream: bool) -> None:
    body = {"messages": [user("Why?"), SAID], "max_tokens": 4000, "stream": stream, **CONTINUED}
    with asking(where, **body):
        eventually(lambda: metrics(where, None)["oscar_mm_decoding"] == 1)
    eventually(lambda: metrics(where, None)["oscar_mm_running"] == 0)
    eventually(lambda: pipe.engine.running == 0)
