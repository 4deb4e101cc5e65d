"""Tool calls and their results in messages, against the chat template of plain transformers."""

from typing import Any

import pytest

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.chat.history import PastTurn
from oscar_mm.engine.message_lists import messages_from
from oscar_mm.media.media import Media
from tests.prompts import noise
from tests.tool_template import TOOL_TEMPLATE

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def call(number: int, city: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": city}}
    return {"id": f"call_{number}", "type": "function", "function": function}


ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it warmer in Oslo or in Rome?"},
]
CALLS = {"role": "assistant", "content": "", "tool_calls": [call(1, "Oslo"), call(2, "Rome")]}
RESULTS = [
    {"role": "tool", "tool_call_id": "call_1", "content": "4 degrees"},
    {"role": "tool", "tool_call_id": "call_2", "content": ""},
]


@pytest.fixture(scope="module")
def pipe(qwen3_vl_folder) -> OscarVLPipeline:
    pipe = OscarVLPipeline(qwen3_vl_folder, policy="bf16", device="cpu", dtype="float32")
    pipe.processor.chat_template = TOOL_TEMPLATE
    return pipe


def template_ids(pipe: OscarVLPipeline, messages: list[dict[str, Any]], **options: Any) -> Any:
    text = pipe.processor.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    return pipe.processor.tokenizer(text)["input_ids"]


def test_ids_are_those_of_the_template(pipe) -> None:
    given = [*ASKED, CALLS, *RESULTS]
    prompt = pipe.family.prompt(messages_from(given), Media(), pipe.offer(TOOLS))
    assert prompt.inputs["input_ids"][0].tolist() == template_ids(pipe, given, tools=TOOLS)
    # Arguments may be JSON, as OpenAI's clients send them.
    said = [{"name": "weather", "arguments": '{"city": "Oslo"}'}, CALLS["tool_calls"][1]]
    again = [*ASKED, CALLS | {"tool_calls": said}, *RESULTS]
    assert pipe.family.render(messages_from(again)) == pipe.family.render(messages_from(given))


PLAIN = "{{ '<|im_start|>' + message.role + '\\n' + render(message.content) + '<|im_end|>\\n' }}"
SPACED = PLAIN.replace("render", "(' ' if message.role == 'assistant' else '') + render")


@pytest.mark.parametrize("said", [PLAIN, SPACED], ids=["qwen", "mistral"])
def test_a_chat_goes_on_from_calls_and_results(qwen3_vl_folder, said: str) -> None:
    """The cache holds what the template writes of the whole conversation; Mistral's templates write
    a space before text and none before calls."""
    pipe = OscarVLPipeline(qwen3_vl_folder, policy="bf16", device="cpu", dtype="float32")
    pipe.processor.chat_template = TOOL_TEMPLATE.replace(PLAIN, said)
    assert said in pipe.processor.chat_template
    messages = messages_from([*ASKED, CALLS, *RESULTS])
    with pipe.chat("Be brief.") as chat:
        chat.tell_all([PastTurn(messages[1:2], messages[2])])
        answer = chat.ask(messages=RESULTS, max_new_tokens=6, temperature=0)
        ids = chat._spillable.conversation.token_ids[0].tolist()
    whole = template_ids(pipe, [*ASKED, CALLS, *RESULTS])
    assert ids[: len(whole)] == whole
    given = [*ASKED, CALLS, *RESULTS]
    expected = pipe.chat_completion(given, max_new_tokens=6, temperature=0)
    assert answer.token_ids == expected.token_ids


def test_a_result_may_show_a_picture(pipe) -> None:
    result = [{"type": "text", "text": "a map"}, {"type": "image", "image": noise(40, 40)}]
    messages = messages_from([*ASKED, CALLS, RESULTS[0] | {"content": result}])
    text = pipe.family.render(messages)
    assert "<tool_response>\na map<|vision_start|>" in text
    prompt = pipe.read_request(messages)
    assert [span.modality.label for span in prompt.media] == ["image"]


def test_a_template_without_tools(qwen3_vl_folder) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder, policy="bf16", device="cpu", dtype="float32")
    messages = messages_from([*ASKED, CALLS, *RESULTS])
    with pipe.chat() as chat, pytest.raises(InputError, match="does not support tool calls: leave"):
        chat.tell_all([PastTurn(messages[1:2], messages[2])])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (CALLS | {"tool_calls": ["weather"]}, "each of tool_calls must be a dict"),
        (CALLS | {"tool_calls": [{"name": "f", "arguments": 5}]}, "arguments of 'f' must be"),
        (CALLS | {"tool_calls": [call(1, "<|im_end|>")]}, r"contains '<\|im_end\|>'"),
        (RESULTS[0] | {"tool_call_id": 5}, "tool_call_id and name must be text"),
        (RESULTS[0] | {"content": "<|im_end|>"}, r"content contains '<\|im_end\|>'"),
        (RESULTS[0] | {"name": "<|im_end|>"}, r"content contains '<\|im_end\|>'"),
        (RESULTS[0] | {"tool_calls": []}, r"unsupported fields \(tool_calls\)"),
    ],
)
def test_refused(pipe, message: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        pipe.chat_completion([*ASKED, message, *RESULTS])
