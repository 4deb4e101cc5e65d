"""Functions that realtime sessions call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.serve.server import create_app
from oscar_mm.apps.serve.service import ServerLimits
from tests.apps.serve.conftest import started
from tests.apps.serve.realtime.client import KEY, Talk, ask, talked
from tests.pipelines.conftest import exact
from tests.thinking import ids_of, saying

FIND = {"type": "function", "name": "find", "parameters": {"type": "object"}}

CALL = '<tool_call>\n{"name": "find", "arguments": {"n": %d}}\n</tool_call>'


@pytest.fixture(scope="module")
def calling(qwen3_omni_calls_folder: Path) -> Iterator[tuple[Any, str]]:
    pipe = exact(OscarOmniPipeline, qwen3_omni_calls_folder)
    pipe.model.generation_config.eos_token_id = ids_of(pipe, "<|im_end|>")
    assert pipe.family.talker is not None
    pipe.family.talker.max_frames = 12
    with started(create_app(pipe, "tiny", ServerLimits(api_key=KEY))) as (_, address):
        yield pipe, address


@pytest.mark.daily("audio")
@pytest.mark.parametrize("modality", ["text", "audio"])
def test_functions_are_called_and_their_results_are_read(calling, modality: str) -> None:
    pipe, address = calling
    said = ids_of(pipe, "I look." + CALL % 1 + "\n" + CALL % 2)

    async def talk(one: Talk) -> None:
        with saying(pipe, said):
            await ask(one, "What is it?")
            done = (await one.until("response.done")).response
        assert done.status == "completed"
        spoken, *calls = done.output
        assert (spoken.content[0].text or spoken.content[0].transcript) == "I look."
        assert [json.loads(call.arguments) for call in calls] == [{"n": 1}, {"n": 2}]
        for index, call in enumerate(calls, 1):
            about = [x for x in one.seen if getattr(x, "item_id", None) == call.id]
            assert {x.output_index for x in about} == {index} and call.status == "completed"
            assert "".join(x.delta for x in about[:-1]) == about[-1].arguments == call.arguments
            assert {x.call_id for x in about} == {call.call_id} and about[-1].name == "find"
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "a tree"}
            await one.connection.conversation.item.create(item=output)
        with saying(pipe, ids_of(pipe, "A tree.")):
            await one.connection.response.create()
            answer = (await one.until("response.done")).response
        assert answer.usage.input_token_details.cached_tokens > done.usage.input_tokens
        assert (answer.usage.output_token_details.audio_tokens > 0) == (modality == "audio")
        if modality == "audio":
            end = {"item_id": spoken.id, "content_index": 0, "audio_end_ms": 0}
            await one.connection.conversation.item.truncate(**end)
            assert "last spoken answer" in (await one.until("error")).error.message

    talked(address, talk, tools=[FIND], output_modalities=[modality])


def test_calls_may_be_required_and_tools_cannot_change(calling) -> None:
    """The choice of a function forces the call: random weights would not call by themselves."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}

    async def talk(one: Talk) -> None:
        earlier = {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"}
        await one.connection.conversation.item.create(item=earlier)
        assert "must follow texts" in (await one.until("error")).error.message
        item = {"type": "message", "role": "user"}
        item["content"] = [{"type": "input_text", "text": "What is it?"}]
        await one.connection.conversation.item.create(item=item)
        choice = {"type": "function", "name": "find"}
        await one.connection.response.create(response={"tool_choice": choice})
        [call] = (await one.until("response.done")).response.output
        assert call.type == "function_call" and json.loads(call.arguments)["n"] in (1, 2)
        await one.connection.response.create(response={"tool_choice": "none"})
        assert "session.update" in (await one.until("error")).error.message
        await one.connection.session.update(session={"type": "realtime", "tools": []})
        assert "before the conversation begins" in (await one.until("error")).error.message
        output = {"type": "function_call_output", "call_id": "c", "output": "a tree"}
        for told in (item, earlier, output):
            await one.connection.conversation.item.create(item=told)
        with saying(calling[0], ids_of(calling[0], "Yes.")):
            await one.connection.response.create()
            assert (await one.until("response.done")).response.output[0].content[0].text == "Yes."

    tools = [FIND | {"parameters": schema}]
    talked(calling[1], talk, tools=tools, output_modalities=["text"])
