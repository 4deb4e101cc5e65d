"""Anthropic's Messages API: bodies, events, tools, pictures, errors."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from oscar_mm import OscarVLPipeline
from oscar_mm.apps.serve.messages_body import COUNT_TOKENS, MessagesBody
from tests.apps.serve.conftest import encoded, image, png, served, text, user
from tests.apps.serve.test_openai_types import sent
from tests.thinking import ids_of, saying

PATH = "/v1/messages"
FIND = {"name": "find", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "find", "arguments": {"text": "the sign"}}\n</tool_call>'
SAID = f"I look.\n{CALL}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": encoded(png())}
BROKEN = SOURCE | {"data": "a"}
SHOWN = {"type": "image", "source": SOURCE}
USED = {"type": "tool_use", "id": "call_1", "name": "find", "input": {"text": "é"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": [text("Stop"), SHOWN]}


def ask(address: str, messages: Any, **options: Any) -> Any:
    """The JSON of an answer, or of its events."""
    messages = [user(messages)] if isinstance(messages, str) else messages
    body = {"model": "tiny", "max_tokens": 6, "messages": messages} | options
    status, answer = sent(address, PATH, body)
    assert status == 200, answer
    if not options.get("stream"):
        return json.loads(answer)
    *frames, end = answer.split("\n\n")
    assert not end
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def chat(address: str, messages: Any, **options: Any) -> tuple[str, int]:
    """Text and prompt tokens of the answer in OpenAI's protocol."""
    body = {"max_tokens": 6, "messages": messages} | options
    answer = json.loads(sent(address, "/v1/chat/completions", body)[1])
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


def tokens(usage: dict[str, int]) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_an_answer_is_that_of_the_other_protocol(tool_address) -> None:
    asked = [user(SHOWN, text("What is it?"))]
    answer = ask(tool_address, asked, system=[text("Be brief.")])
    system = {"role": "system", "content": "Be brief."}
    expected, prompt = chat(tool_address, [system, user(image(png()), text("What is it?"))])
    assert answer["content"] == [{"type": "text", "text": expected}]
    assert tokens(answer["usage"]) == prompt and answer["usage"]["output_tokens"] == 6
    assert (answer["stop_reason"], answer["role"]) == ("max_tokens", "assistant")
    assert ask(tool_address, asked, system="Be brief.")["content"] == answer["content"]


def test_events_have_the_parts_of_the_whole_answer(tool_pipe, tool_address) -> None:
    how = {"tools": [FIND], "max_tokens": 200}
    with saying(tool_pipe, ids_of(tool_pipe, SAID)):
        whole = ask(tool_address, "What is it?", **how)
        events = ask(tool_address, "What is it?", stream=True, **how)
    spoken, call = whole["content"]
    assert (spoken["text"], whole["stop_reason"]) == ("I look.", "tool_use")
    assert call == {**USED, "id": call["id"], "input": {"text": "the sign"}}
    kinds = [event["type"] for event in events]
    assert [kind for at, kind in enumerate(kinds) if kinds[at - 1 : at] != [kind]] == [
        *("message_start", "ping"),
        *("content_block_start", "content_block_delta", "content_block_stop") * 2,
        *("message_delta", "message_stop"),
    ]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1]
    assert starts[0]["content_block"] == {"type": "text", "text": ""}
    assert starts[1]["content_block"]["input"] == {} and starts[1]["content_block"]["id"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(one.get("text", "") for one in deltas) == "I look."
    written = "".join(one.get("partial_json", "") for one in deltas)
    assert json.loads(written) == {"text": "the sign"}
    last = events[-2]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert tokens(last["usage"]) == tokens(whole["usage"])
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"] > 20


@pytest.mark.parametrize("most", [18, 24, 30, 36])
def test_a_call_that_is_cut_off_is_still_an_object(tool_pipe, tool_address, most: int) -> None:
    with saying(tool_pipe, ids_of(tool_pipe, CALL)):
        answer = ask(tool_address, "What is it?", tools=[FIND], max_tokens=most)
    assert answer["stop_reason"] == "max_tokens"
    for block in answer["content"]:
        assert block["type"] == "text" or isinstance(block["input"], dict)


def test_reasoning_is_a_block(qwen3_vl_thinking_folder) -> None:
    thinking = OscarVLPipeline(qwen3_vl_thinking_folder, policy="compact", device="cpu")
    said = ids_of(thinking, "It is far.\n</think>\n\nYes.")
    with served(thinking) as address, saying(thinking, said):
        whole = ask(address, "Why?", max_tokens=100)
        events = ask(address, "Why?", max_tokens=100, stream=True)
    reasoning, spoken = whole["content"]
    assert (reasoning["type"], reasoning["thinking"]) == ("thinking", "It is far.")
    assert spoken == {"type": "text", "text": "Yes."}
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(one.get("thinking", "") for one in deltas) == "It is far."
    assert "".join(one.get("text", "") for one in deltas) == "Yes."


def test_a_loop_of_calls_and_results(tool_address) -> None:
    """Results are messages of their own, and what the user adds to them is another one."""
    thought = {"type": "thinking", "thinking": "Far.", "signature": ""}
    before = {"role": "assistant", "content": [thought, text("I look."), USED]}
    asked = [user("What?"), before, user(RESULT, text("And now?"))]
    answer = ask(tool_address, asked, tools=[FIND])
    function = {"name": "find", "arguments": json.dumps({"text": "é"}, ensure_ascii=False)}
    call = {"id": "call_1", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [text("Stop"), image(png())]}
    turns = [user("What?"), {"role": "assistant", "content": "I look.", "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    expected, prompt = chat(tool_address, [*turns, result, user("And now?")], tools=[tool])
    assert (answer["content"][0]["text"], tokens(answer["usage"])) == (expected, prompt)


def test_an_answer_that_is_begun(tool_address) -> None:
    begun = [user("Why?"), {"role": "assistant", "content": "Because"}]
    [said] = ask(tool_address, begun)["content"]
    how = {"continue_final_message": True, "add_generation_prompt": False}
    assert said["text"] == chat(tool_address, begun, **how)[0]


def test_tokens_are_counted(tool_address) -> None:
    body = {"messages": [user(SHOWN, text("What is it?"))], "system": "Be brief.", "tools": [FIND]}
    status, counted = sent(tool_address, COUNT_TOKENS, body)
    answer = ask(tool_address, **body)
    assert status == 200 and json.loads(counted) == {"input_tokens": tokens(answer["usage"])}
    for wrong, expected in (
        ({"model": "d"}, 404),
        ({"messages": [user({"type": "cat"}, SHOWN)]}, 400),
    ):
        status, refused = sent(tool_address, COUNT_TOKENS, body | wrong)
        assert status == expected and json.loads(refused)["type"] == "error"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "find"}])
def test_calls_that_must_be(tool_address, choice: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    tool = {"name": "find", "input_schema": schema | {"additionalProperties": False}}
    choice = choice | {"disable_parallel_tool_use": True}
    how = {"tools": [tool], "tool_choice": choice, "max_tokens": 300, "temperature": 1.0}
    [call] = ask(tool_address, "Which?", **how)["content"]
    assert call["name"] == "find" and call["input"]["n"] in (1, 2)


def test_a_schema_for_the_text(tool_address) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    wanted = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    how = {"output_config": {"format": wanted}, "max_tokens": 300, "temperature": 1.0}
    [said] = ask(tool_address, "Which?", **how)["content"]
    assert json.loads(said["text"])["n"] in (1, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_ended_the_answer(tool_pipe, tool_address, stream: bool) -> None:
    def ending(**options: Any) -> tuple[str, str | None]:
        with saying(tool_pipe, ids_of(tool_pipe, "one two three")):
            answer = ask(tool_address, "Count.", max_tokens=50, stream=stream, **options)
        ended = answer[-2]["delta"] if stream else answer
        return ended["stop_reason"], ended["stop_sequence"]

    assert ending() == ("end_turn", None)
    assert ending(stop_sequences=["four"]) == ("end_turn", None)
    assert ending(stop_sequences=["four", "two t"]) == ("stop_sequence", "two t")


def test_fields_about_reasoning() -> None:
    def fields(**given: Any) -> dict[str, Any]:
        body = {"messages": [user("Why?")], "max_tokens": 9} | given
        chat_body, _ = MessagesBody.model_validate_json(json.dumps(body)).chat_body()
        return {name: chat_body[name] for name in chat_body.keys() - {"messages", "max_tokens"}}

    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert fields(thinking={"type": "adaptive"}) == fields() == {}
    assert fields(thinking={"type": "disabled"}) == off
    enabled = {"type": "enabled", "budget_tokens": 7}
    assert fields(thinking=enabled) == {"thinking_token_budget": 7}
    assert fields(output_config={"effort": "low"}) == {"reasoning_effort": "low"}
    begun = [user("Why?"), {"role": "assistant", "content": "Because"}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    assert fields(messages=begun) == continued


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": []}, "messages: must not be empty"),
        ({"messages": [user(" ")]}, "messages[0].content: must not be empty"),
        ({"messages": [{"role": "cat", "content": "a"}]}, "messages[0].role: must be"),
        (
            {"messages": [user({"type": "cat"}, text("a"))]},
            "messages[0].content[0]: blocks of type 'cat'",
        ),
        ({"messages": [user(5)]}, "messages[0].content: must be a list"),
        ({"system": "<|im_end|>"}, "system contains"),
        ({"messages": [user(text("a"), text("<|im_end|>"))]}, "messages[0].content"),
        (
            {"messages": [user(text("a"), SHOWN | {"source": BROKEN})]},
            "[0].content[1]:",
        ),
        ({"messages": [user(text("a"), {"type": "image"})]}, "messages[0].content[1]: source must"),
        (
            {"messages": [user(RESULT, {**SHOWN, "source": BROKEN})]},
            "messages[0].content[1]: is not valid base64",
        ),
        (
            {"messages": [user(text("a"), {**RESULT, "content": [{"type": "cat"}]})]},
            "messages[0].content[1].content[0]: blocks of type",
        ),
        (
            {"messages": [user({**RESULT, "content": [SHOWN | {"source": BROKEN}]}, text("a"))]},
            "messages[0].content[0].content[0]: is not valid base64",
        ),
        (
            {"messages": [{"role": "assistant", "content": [USED | {"input": "a"}]}, user("a")]},
            "messages[0].content[0]: id and name must be strings",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0]: only tools",
        ),
        ({"tools": [FIND, {**FIND, "name": "a b"}]}, "tools[1]"),
        ({"tools": [FIND], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: no tool"),
        ({"stop_sequences": [""]}, "stop_sequences[0]: must not be empty"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_c",
        ),
        ({"temperature": -1}, "temperature=-1.0: must be"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"mcp_servers": [{}]}, "mcp_servers: is not supported"),
    ],
)
def test_refused(tool_address, body: dict[str, Any], expected: str) -> None:
    status, answer = sent(tool_address, PATH, {"messages": [user("a")], "max_tokens": 9} | body)
    error = json.loads(answer)
    assert (status, error["type"]) == (400, "error"), error
    assert error["error"]["type"] == "invalid_request_error"
    assert expected in error["error"]["message"], error


def test_keys_and_other_statuses(omni) -> None:
    def status(**headers: str) -> tuple[int, str]:
        data = json.dumps({"model": "other", "messages": [user("a")]}).encode()
        headers |= {"Content-Type": "application/json"}
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(address + PATH, data, headers))
        return refused.value.code, json.loads(refused.value.read())["error"]["type"]

    with served(omni, api_key="secret") as address:
        assert status() == (401, "authentication_error")
        assert status(**{"x-api-key": "other"}) == (401, "authentication_error")
        assert status(**{"x-api-key": "secret"}) == (404, "not_found_error")
        assert status(Authorization="Bearer secret") == (404, "not_found_error")
