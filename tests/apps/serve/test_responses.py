"""OpenAI's Responses API: bodies, events, tools, media, and conversations that go on."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from oscar_mm import OscarVLPipeline
from oscar_mm.apps.serve.kept_responses import KeptResponse, KeptResponses
from tests.apps.serve.conftest import encoded, image, png, served, text, user
from tests.apps.serve.test_openai_types import sent
from tests.engine.engine import counted
from tests.thinking import ids_of, saying

FIND = {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": True}
SAID = 'I look.\n<tool_call>\n{"name": "find", "arguments": {"text": "the sign"}}\n</tool_call>'
EVENT: Any = TypeAdapter(ResponseStreamEvent)
SHOWN = {"type": "input_image", "image_url": f"data:image/png;base64,{encoded(png())}"}


@pytest.fixture
def client(tool_address) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{tool_address}/v1", api_key="none", max_retries=0) as made:
        yield made


def respond(client: Any, given: Any, **options: Any) -> Any:
    options = {"model": "tiny", "max_output_tokens": 6} | options
    return client.responses.create(input=given, **options)


def test_an_answer_is_that_of_the_other_protocol(client) -> None:
    asked = [{"type": "input_text", "text": "What is it?"}, SHOWN]
    response = respond(client, [{"role": "user", "content": asked}], instructions="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    expected = client.chat.completions.create(
        model="tiny",
        messages=[system, user(text("What is it?"), image(png()))],
        max_tokens=6,
    )
    assert response.output_text == expected.choices[0].message.content
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens) == (expected.usage.prompt_tokens, 6)
    assert usage.total_tokens == usage.input_tokens + 6
    assert response.status == "incomplete" and response.instructions == "Be brief."
    assert response.incomplete_details.reason == "max_output_tokens"


def test_bodies_are_valid_for_openai(tool_pipe, tool_address) -> None:
    body = {"input": "What is it?", "tools": [FIND], "max_output_tokens": 200}
    with saying(tool_pipe, ids_of(tool_pipe, SAID)):
        status, whole = sent(tool_address, "/v1/responses", body)
        _, stream = sent(tool_address, "/v1/responses", body | {"stream": True})
    response = Response.model_validate_json(whole, strict=True)
    assert status == 200 and response.status == "completed"
    assert [item.type for item in response.output] == ["message", "function_call"]
    assert response.output_text == "I look."
    assert json.loads(response.output[1].arguments) == {"text": "the sign"}
    *frames, _ = stream.split("\n\n")
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = EVENT.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}"
        events.append(event)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for at, kind in enumerate(kinds) if kinds[at - 1 : at] != [kind]] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    last = events[-1].response
    assert last.output_text == "I look."
    assert last.usage.total_tokens == response.usage.total_tokens
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "I look."
    deltas = [
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    ]
    assert "".join(deltas) == last.output[1].arguments == response.output[1].arguments


def test_reasoning_is_an_item(qwen3_vl_thinking_folder) -> None:
    thinking = OscarVLPipeline(qwen3_vl_thinking_folder, policy="compact", device="cpu")
    said = ids_of(thinking, "It is far.\n</think>\n\nYes.")
    with served(thinking) as address, saying(thinking, said):
        made = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        response = respond(made, "Why?", max_output_tokens=100)
        events = list(respond(made, "Why?", max_output_tokens=100, stream=True))
    reasoning, message = response.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "It is far.")
    assert message.content[0].text == response.output_text == "Yes."
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < len(said)
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "It is far."
    assert events[-1].response.output_text == "Yes."


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def dumped(events: list[Any], kind: str) -> list[dict[str, Any]]:
    """Log-probabilities of all events of a kind."""
    found = [event.logprobs for event in events if event.type == f"response.output_text.{kind}"]
    return [one.model_dump() for some in found for one in some]


def test_logprobs_are_those_of_the_other_protocol(client) -> None:
    [message] = respond(client, "What?", **LOGPROBS).output
    expected = client.chat.completions.create(
        model="tiny", messages=[user("What?")], max_tokens=6, logprobs=True, top_logprobs=2
    )
    found = [one.model_dump() for one in message.content[0].logprobs]
    assert found == [one.model_dump() for one in expected.choices[0].logprobs.content]
    assert len(found) == 6 and {len(one["top_logprobs"]) for one in found} == {2}
    *events, last = respond(client, "What?", stream=True, **LOGPROBS)
    assert found == dumped(events, "done")
    assert (told := dumped(events, "delta")) == found[: len(told)] != []
    [streamed] = last.response.output
    assert found == [one.model_dump() for one in streamed.content[0].logprobs]
    [plain] = respond(client, "What?", top_logprobs=2).output
    assert plain.content[0].logprobs == []
    for options in ({"top_logprobs": 21}, {"top_logprobs": -1}):
        with pytest.raises(openai.BadRequestError, match="top_logprobs: must be from 0 to 20"):
            respond(client, "What?", **LOGPROBS | options)


def test_logprobs_are_of_the_text_alone(qwen3_vl_thinking_folder) -> None:
    thinking = OscarVLPipeline(qwen3_vl_thinking_folder, policy="compact", device="cpu")
    said = ids_of(thinking, "It is far.\n</think>\n\nYes, it is.")
    with served(thinking) as address, saying(thinking, said):
        made = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        whole = respond(made, "Why?", max_output_tokens=100, **LOGPROBS).output
        *events, last = respond(made, "Why?", max_output_tokens=100, stream=True, **LOGPROBS)
    for reasoning, message in (whole, last.response.output):
        assert reasoning.content[0].text == "It is far."
        assert "".join(one.token for one in message.content[0].logprobs) == "Yes, it is."
    told = "".join(one["token"] for one in dumped(events, "delta"))
    assert told and "Yes, it is.".startswith(told)


def test_a_conversation_goes_on_by_its_id(tool_pipe, client) -> None:
    first = respond(client, [{"role": "user", "content": [SHOWN]}])
    with counted(tool_pipe.model.get_decoder().layers[:1]) as passes:
        second = respond(client, "And now?", previous_response_id=first.id, max_output_tokens=1)
    assert passes == [1] and second.usage.input_tokens > first.usage.total_tokens
    assert second.previous_response_id == first.id
    shown = {"role": "user", "content": [image(png())]}
    messages = [shown, {"role": "assistant", "content": first.output_text}]
    expected = client.chat.completions.create(
        model="tiny", messages=[*messages, user("And now?")], max_tokens=1
    )
    assert second.output_text == expected.choices[0].message.content
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    for unknown in (first.id, "resp_x"):
        with pytest.raises(openai.NotFoundError, match=r"with id 'resp_.*' not found: send"):
            respond(client, "And?", previous_response_id=unknown)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(unknown)
    lost = respond(client, "Why?", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(lost.id)


def test_a_loop_of_calls_and_results(tool_pipe, client) -> None:
    with saying(tool_pipe, ids_of(tool_pipe, SAID)):
        first = respond(client, "What is it?", tools=[FIND], max_output_tokens=200)
    [call] = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Stop"}
    by_id = respond(client, [result], previous_response_id=first.id, tools=[FIND])
    said = [item.model_dump(exclude_none=True) for item in first.output]
    whole = [{"role": "user", "content": "What is it?"}, *said, result]
    again = respond(client, whole, tools=[FIND])
    assert again.output_text == by_id.output_text
    assert again.usage.input_tokens == by_id.usage.input_tokens


def test_items_of_earlier_answers_may_be_referenced(tool_pipe, client) -> None:
    """As the AI SDK sends them."""
    with saying(tool_pipe, ids_of(tool_pipe, SAID)):
        first = respond(client, "What is it?", tools=[FIND], max_output_tokens=200)
    message, call = first.output
    question = {"role": "user", "content": "What is it?"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Stop"}
    by_id = [{"type": "item_reference", "id": item.id} for item in (message, call)]
    said = [item.model_dump(exclude_none=True) for item in first.output]
    found = respond(client, [question, *by_id, result], tools=[FIND])
    expected = respond(client, [question, *said, result], tools=[FIND])
    assert found.output_text == expected.output_text != ""
    assert found.usage.input_tokens == expected.usage.input_tokens
    third = respond(client, "And?", tools=[FIND], previous_response_id=found.id)
    assert third.usage.input_tokens > found.usage.total_tokens
    with pytest.raises(openai.BadRequestError, match=r"input\[2\]: is referenced twice"):
        respond(client, [question, by_id[0], by_id[0], question])
    client.responses.delete(first.id)
    for lost in (by_id[0], {"type": "item_reference"}, {"type": "item_reference", "id": [5]}):
        with pytest.raises(openai.NotFoundError, match=r"Item with id .* not found: send") as e:
            respond(client, [question, lost, question])
        assert e.value.param == "input[1]"


def test_dropped_responses_take_their_items_along(monkeypatch) -> None:
    kept = KeptResponses()
    monkeypatch.setattr("oscar_mm.apps.serve.kept_responses.MAX_RESPONSES", 2)
    for name in "abc":
        item = {"id": f"msg_{name}"}
        kept.add(KeptResponse({"id": name, "output": [item]}, (), 1))
    assert [kept.item(f"msg_{name}") for name in "abc"] == [None, {"id": "msg_b"}, item]


def test_structured_output(client) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    shape = {"format": {"type": "json_schema", "name": "number", "schema": schema}}
    response = respond(client, "Which?", text=shape, max_output_tokens=100, temperature=1.0)
    assert json.loads(response.output_text)["n"] in (1, 2)


@pytest.mark.parametrize(
    ("body", "field", "expected"),
    [
        ({}, "input", "is missing"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": 5}, "input", "must be a list"),
        ({"input": " "}, "input[0].content", "must not be empty"),
        ({"input": [{"type": "cat"}]}, "input[0]", "is not supported: use message"),
        ({"input": [{"role": "cat", "content": "a"}]}, "input[0].role", "must be"),
        (
            {"input": [{"role": "user", "content": [{"type": "cat"}]}]},
            "input[0].content[0]",
            "is not supported: use input_text",
        ),
        (
            {"input": [{"role": "user", "content": "a"}, {"role": "user", "content": [SHOWN, {}]}]},
            "input[1].content[1]",
            "is not supported: use input_text",
        ),
        (
            {"input": "<|im_end|>", "instructions": "Be brief."},
            "input[0].content",
            "control token",
        ),
        ({"input": "a", "instructions": "<|im_end|>"}, "instructions", "control token"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0]", "of type 'function'"),
        ({"input": "a", "background": True}, "background", "serve with --engine vllm"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"input": "a", "temperature": -1}, "temperature", "must be 0 or a number"),
        ({"input": [{"type": "function_call", "name": 5}]}, "input[0]", "must be strings"),
    ],
)
def test_refused(tool_address, body: dict[str, Any], field: str, expected: str) -> None:
    status, answer = sent(tool_address, "/v1/responses", body)
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, field), error
    assert expected in error["message"] and "messages" not in error["message"]


def test_version(tool_address) -> None:
    status, body = sent(tool_address, "/version")
    assert status == 200 and json.loads(body)["version"]
