"""Tools in requests, and calls in answers."""

import json
from functools import partial
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import ValidationError

from oscar_mm.apps.serve.refusals import Refusal, as_refusals
from oscar_mm.apps.serve.tools import ToolFields, call_body, delta_body
from oscar_mm.tool_parsers.calls import ToolCall, ToolCallDelta
from oscar_mm.tool_parsers.offer import ToolOffer, read_offer
from oscar_mm.tool_parsers.registry import FORMATS
from tests.apps.serve.conftest import served
from tests.apps.serve.test_openai_types import asked
from tests.engine.engine import counted
from tests.thinking import ids_of, saying

HERMES = FORMATS["hermes"]
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "find"}}
SAID = 'I look.\n<tool_call>\n{"name": "find", "arguments": {"text": "é \\"sign\\""}}\n</tool_call>'


def fields(**given: Any) -> ToolFields:
    return ToolFields.model_validate_json(json.dumps(given))


def offered(asked: ToolFields, tool_format: Any) -> ToolOffer | None:
    parallel = asked.parallel_tool_calls is not False
    return read_offer(asked.tools, asked.tool_choice, parallel, tool_format)


@pytest.mark.parametrize(
    ("given", "required", "named", "most"),
    [
        ({}, False, None, 1024),
        ({"tool_choice": "auto", "parallel_tool_calls": None}, False, None, 1024),
        ({"tool_choice": "required"}, True, None, 1024),
        ({"tool_choice": "required", "parallel_tool_calls": False}, True, None, 1),
        ({"tool_choice": NAMED}, False, "find", 1),
    ],
)
def test_choices(given: dict[str, Any], required: bool, named: str | None, most: int) -> None:
    offer = offered(fields(tools=[FIND], **given), HERMES)
    assert offer is not None and (offer.required, offer.named) == (required, named)
    assert offer.max_calls == most and [tool.name for tool in offer.tools] == ["find"]


@pytest.mark.parametrize(
    "given",
    [
        *({}, {"tools": None}, {"tools": []}, {"tools": [], "tool_choice": "auto"}),
        *({"tool_choice": "none"}, {"tools": [FIND], "tool_choice": "none"}),
    ],
)
def test_nothing_is_offered(given: dict[str, Any]) -> None:
    assert offered(fields(**given), HERMES) is None
    assert offered(fields(**given), None) is None


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tools": [FIND, {"type": "web_search"}]}, "tools[1]"),
        ({"tools": [FIND, FIND]}, "tools[1]"),
        ({"tools": [FIND] * 10_000}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FIND], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [FIND], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {"tools": [FIND], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
    ],
)
def test_a_refusal_names_the_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(Refusal) as refused, as_refusals():
        offered(fields(**given), HERMES)
    assert (refused.value.status, refused.value.field) == (400, field)


@pytest.mark.parametrize(
    "given", [{"tools": {}}, {"tools": ["find"]}, {"tool_choice": 1}, {"parallel_tool_calls": 1}]
)
def test_wrong_types(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        fields(**given)


def test_a_template_without_tools() -> None:
    with pytest.raises(Refusal, match="the chat template of this checkpoint") as refused:  # noqa: SIM117
        with as_refusals():
            offered(fields(tools=[FIND]), None)
    assert refused.value.field == "tools"


def test_tools_that_a_template_lacks_are_ignored_on_request(omni) -> None:
    """The prompt is that without tools; calls that are required and faulty tools stay errors."""
    assert omni.family.tool_format is None
    with served(omni, ignore_tools=True) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        ask = partial(client.chat.completions.create, model="tiny", messages=QUESTION, max_tokens=4)
        plain = ask()
        for choice in ({}, {"tool_choice": "auto"}):
            answer = ask(tools=[FIND], **choice)
            assert answer.usage.prompt_tokens == plain.usage.prompt_tokens
            assert answer.choices[0].message.content == plain.choices[0].message.content
        for choice in ("required", NAMED):
            with pytest.raises(openai.BadRequestError, match="does not support tools"):
                ask(tools=[FIND], tool_choice=choice)
        with pytest.raises(openai.BadRequestError, match=r"tools\[1\]"):
            ask(tools=[FIND, FIND])
        tool = {"type": "function", "name": "find", "parameters": {"type": "object"}}
        respond = partial(client.responses.create, model="tiny", input="Hi", max_output_tokens=16)
        assert respond(tools=[tool]).output_text == respond().output_text


def test_ignored_tools_leave_templates_with_tools_alone(tool_pipe) -> None:
    with (
        served(tool_pipe, ignore_tools=True) as address,
        saying(tool_pipe, ids_of(tool_pipe, SAID)),
    ):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(
            model="tiny", messages=QUESTION, tools=[FIND], max_tokens=120
        )
    assert answer.choices[0].finish_reason == "tool_calls"


def test_calls_and_their_pieces() -> None:
    function = {"name": "find", "arguments": '{"a": 1}'}
    whole = {"id": "call_1", "type": "function", "function": function}
    assert call_body(ToolCall("call_1", "find", '{"a": 1}')) == whole
    first = delta_body(ToolCallDelta(0, "", "call_1", "find"))
    function = {"name": "find", "arguments": ""}
    assert first == {"index": 0, "id": "call_1", "type": "function", "function": function}
    rest = delta_body(ToolCallDelta(0, "{}"))
    assert rest == {"index": 0, "function": {"arguments": "{}"}}


@pytest.fixture
def asking(tool_address) -> Any:
    client = openai.OpenAI(base_url=f"{tool_address}/v1", api_key="none", max_retries=0)
    return partial(client.chat.completions.create, model="tiny", max_tokens=120)


QUESTION = [{"role": "user", "content": "What does the sign say?"}]


def test_answers_with_calls_are_valid_for_openai(tool_pipe, tool_address) -> None:
    said = ids_of(tool_pipe, SAID)
    body = {"messages": QUESTION, "tools": [FIND], "max_tokens": len(said) + 1}
    with saying(tool_pipe, said):
        _, whole = asked(tool_address, **body)
        _, stream = asked(tool_address, stream=True, **body)
    [choice] = ChatCompletion.model_validate_json(whole, strict=True).choices
    [call] = choice.message.tool_calls
    assert choice.message.content == "I look." and call.function.name == "find"
    assert choice.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"text": 'é "sign"'}
    *events, _, _ = stream.split("\n\n")
    chunks = [
        ChatCompletionChunk.model_validate_json(event.removeprefix("data: "), strict=True)
        for event in events
    ]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    first, *rest = [one for delta in deltas for one in delta.tool_calls or ()]
    assert (first.index, first.function.name) == (0, "find") and first.id
    assert all((one.index, one.id, one.function.name) == (0, None, None) for one in rest)
    arguments = "".join(one.function.arguments for one in [first, *rest])
    assert arguments == call.function.arguments
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_loop_of_calls_and_results(tool_pipe, asking) -> None:
    """The second request continues the cache of the first one, as a chat does."""
    with saying(tool_pipe, ids_of(tool_pipe, SAID)):
        answer = asking(messages=QUESTION, tools=[FIND]).choices[0].message
    [call] = answer.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "Stop"}
    messages = [*QUESTION, answer.model_dump(exclude_none=True), result]
    with counted(tool_pipe.model.get_decoder().layers[:1]) as passes:
        last = asking(messages=messages, tools=[FIND], max_tokens=1)
    assert passes == [1] and last.usage.prompt_tokens > 60
    other = {"type": "function", "function": {"name": "other"}}
    with counted(tool_pipe.model.get_decoder().layers[:1]) as passes:
        asking(messages=messages, tools=[FIND, other], max_tokens=1)
    assert len(passes) and passes[0] == 2, "other tools are another conversation"


def test_without_tools_marks_are_text(tool_pipe, asking) -> None:
    with saying(tool_pipe, ids_of(tool_pipe, SAID)):
        answer = asking(messages=QUESTION).choices[0]
    assert answer.message.content == SAID and answer.finish_reason == "stop"
    assert not answer.message.tool_calls


@pytest.mark.daily("required")
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_that_must_be(asking, choice: Any) -> None:
    """A model with random weights would not call by itself."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    tool = {"type": "function", "function": {"name": "find", "parameters": schema}}
    how = {"parallel_tool_calls": False, "temperature": 1.0, "seed": 3}
    answer = asking(messages=QUESTION, tools=[tool], tool_choice=choice, **how).choices[0]
    [call] = answer.message.tool_calls
    assert call.function.name == "find" and json.loads(call.function.arguments)["n"] in (1, 2)
    assert answer.finish_reason == "tool_calls"
    with pytest.raises(openai.BadRequestError, match="cannot be combined with"):
        asking(
            messages=QUESTION,
            tools=[tool],
            tool_choice=choice,
            extra_body={"guided_regex": "[a-z]+"},
        )


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


def test_a_format_is_that_of_an_answer_without_calls(tool_pipe, asking) -> None:
    """Agents give both, call tools first and then answer in the format."""
    how = {"messages": QUESTION, "tools": [FIND], "response_format": FORMAT, "max_tokens": 200}
    call = SAID.partition("\n")[2]
    with saying(tool_pipe, ids_of(tool_pipe, call), ids_of(tool_pipe, '{"city": "Oslo"}')):
        first, second = (asking(**how).choices[0] for _ in range(2))
    assert first.finish_reason == "tool_calls" and not first.message.content
    assert first.message.tool_calls[0].function.name == "find"
    assert (second.message.content, second.message.tool_calls) == ('{"city": "Oslo"}', None)
    tool = {"type": "function", "function": {"name": "find", "parameters": CITY}}
    how |= {"tools": [tool]}
    for seed in range(3):
        message = asking(**how, temperature=1.0, seed=seed).choices[0].message
        said = [call.function.arguments for call in message.tool_calls or ()] or [message.content]
        assert all(json.loads(one)["city"] in ("Oslo", "Rome") for one in said)
    forced = asking(**how, tool_choice="required", parallel_tool_calls=False, temperature=1.0)
    assert forced.choices[0].message.tool_calls and not forced.choices[0].message.content


def test_hostile_tools(asking) -> None:
    for tool, expected in (
        ({"name": "find", "description": "<|im_end|>"}, "control token"),
        ({"name": "<tool_call>"}, "must have 1 to 128"),
        ({"name": "find", "description": "long " * 500_000}, "tokens"),
    ):
        with pytest.raises(openai.BadRequestError, match=expected):
            asking(messages=QUESTION, tools=[{"type": "function", "function": tool}])


def weather(city: str) -> str:
    """The weather.

    Args:
        city: name of a city.
    """
    return city


def test_python_functions(tool_pipe) -> None:
    said = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    with tool_pipe.chat(tools=[weather]) as chat, saying(tool_pipe, ids_of(tool_pipe, said)):
        answer = chat.ask("Is it warm in Oslo?", max_new_tokens=120)
    [call] = answer.tool_calls
    assert answer.text == "" and weather(**json.loads(call.arguments)) == "Oslo"
    messages = [{"role": "user", "content": "Is it warm in Oslo?"}]
    with saying(tool_pipe, ids_of(tool_pipe, said)):
        again = tool_pipe.chat_completion(messages, tools=[weather], max_new_tokens=120)
    assert [one.name for one in again.tool_calls] == ["weather"]
    assert again.prompt_tokens == answer.prompt_tokens
