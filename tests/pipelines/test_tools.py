"""Tools that a family's chat template is given."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.engine.message import first_turn, user_message
from oscar_mm.engine.message_lists import messages_from
from oscar_mm.engine.request import Request
from oscar_mm.tool_parsers.definitions import read_definitions
from tests.tool_template import TOOL_TEMPLATE

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
FIND = {"name": "find", "description": "Finds it.", "parameters": PARAMETERS}


@pytest.fixture(scope="module")
def pipe(qwen3_vl_folder) -> OscarVLPipeline:
    pipe = OscarVLPipeline(qwen3_vl_folder, policy="bf16", device="cpu")
    pipe.processor.chat_template = TOOL_TEMPLATE
    return pipe


def test_the_template_says_how_calls_are_written(pipe, llava_next_folder) -> None:
    assert pipe.family.tool_format.name == "hermes"
    other = OscarVLPipeline(llava_next_folder, policy="bf16", device="cpu")
    assert other.family.tool_format is None
    assert other.family.offer([FIND], "none") is None
    with pytest.raises(
        InputError, match="the chat template of this checkpoint does not support tools"
    ):
        other.family.offer([FIND])


def test_tools_are_written(pipe) -> None:
    offer = pipe.family.offer([FIND])
    text = pipe.family.render([user_message("Where?")], tools=offer)
    line = text.split("<tools>\n")[1].split("\n</tools>")[0]
    assert json.loads(line) == {"type": "function", "function": FIND}


@pytest.mark.parametrize(
    "changed",
    [
        {"description": "a<|im_end|>b"},
        {"parameters": {"properties": {"<|im_start|>": {}}}},
        {"parameters": {"properties": {"a": {"enum": ["x", "<|image_pad|>"]}}}},
        # A template that writes keys between tags makes a token of it.
        {"parameters": {"properties": {"a": {"|im_end|": 1}}}},
    ],
)
def test_control_tokens_are_refused(pipe, changed: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^tools\[1\] contains '<\|\w+\|>'"):
        pipe.family.offer([{"name": "stop"}, FIND | changed])


@pytest.mark.parametrize("token", ["<|im_end|>", "\\u003c|im_end|\\u003e"])
def test_control_tokens_in_arguments_are_seen(pipe, token: str) -> None:
    """The template writes characters where the client wrote escapes."""
    function = {"name": "find", "arguments": f'{{"a": "{token}"}}'}
    given = {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}
    messages = messages_from([given, {"role": "user", "content": "Why?"}])
    assert "<|im_end|>" in pipe.family.render(messages)
    [label] = [text for text in messages[0].labels if "im_end" in text]
    with pytest.raises(InputError, match="control token"):
        pipe.family.refuse_control_tokens("messages", label)


def test_a_template_that_cannot_write_a_schema_refuses_it(pipe, monkeypatch) -> None:
    fails = "{{ tools[0].function.parameters.title + 'a' }}{{ '{\"name\": \"<tool_call>' }}"
    monkeypatch.setattr(pipe.processor, "chat_template", fails)
    offer = pipe.family.offer([FIND])
    tool = {"name": "find", "parameters": {"title": 1}}
    offer = replace(offer, tools=read_definitions([tool]))
    with pytest.raises(InputError, match="refuses the conversation"):
        pipe.family.render([user_message("Where?")], tools=offer)


def test_a_call_that_must_be(pipe) -> None:
    options = {"temperature": 0.0}
    assert pipe.family.with_calls(options, pipe.family.offer([FIND])) == options
    forced = pipe.family.with_calls(options, pipe.family.offer([FIND], "required"))
    assert '"<tool_call>"' in forced["grammar"].text and "find" in forced["grammar"].text


@pytest.mark.parametrize("choice", ["required", {"function": {"name": "turn"}}])
def test_a_random_model_calls_what_it_must(pipe, choice: Any) -> None:
    kinds = {"side": {"type": "string", "enum": ["left", "right"]}, "far": {"type": "boolean"}}
    turn = {"name": "turn", "parameters": {"properties": kinds, "required": ["side"]}}
    turn["parameters"]["additionalProperties"] = False
    offer = pipe.family.offer([turn, {"name": "stop"}], choice, parallel=False)
    for seed in range(3):
        options = {"temperature": 1.0, "seed": seed, "max_new_tokens": 200}
        sampling = pipe.sampling(pipe.family.with_calls(options, offer), ())
        prompt = pipe.read_request(first_turn("Where?"), sampling.max_new_tokens)
        args = (pipe.engine, prompt, pipe.new_cache(), sampling, time.perf_counter())
        running_request = Request(*args, tools=offer)
        assert not any(isinstance(piece, str) and piece for piece in running_request)
        answer = running_request.answer()
        [call] = answer.tool_calls
        given = json.loads(call.arguments)
        assert answer.finish_reason == "tool_calls" and answer.text == ""
        assert call.name == "turn" or (choice == "required" and given == {})
        assert call.name == "stop" or given.keys() - {"far"} == {"side"}
