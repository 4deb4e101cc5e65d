"""Messages and tools of a saved chat: parts in their order, older files, hostile fields."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.cache.checked_file import write_checked
from oscar_mm.chat import turn_fields
from oscar_mm.chat.history import PastTurn
from oscar_mm.engine.message_lists import messages_from
from tests.chat.test_tool_messages import ASKED, CALLS, RESULTS, TOOLS
from tests.pipelines.conftest import NEVER
from tests.prompts import clip, noise, tone
from tests.tool_template import TOOL_TEMPLATE

FAMILIES = {
    "llava": (OscarVLPipeline, "llava_next_folder", {"image": noise(90, 130)}),
    "qwen": (OscarVLPipeline, "qwen3_vl_folder", {"video": clip(6)}),
    "omni": (OscarOmniPipeline, "qwen3_omni_folder", {"audio": tone(2)}),
}
AGAIN = {"max_new_tokens": 6, "temperature": 0}
FORCED = {"type": "function", "function": {"name": "weather"}}


def part(kind: str, source: Any) -> dict[str, Any]:
    return {"type": kind, kind: source}


def shown(turn: Any) -> list[Any]:
    """Texts, and the modality of each medium with the index of its first token."""
    parts = [one for message in turn.messages for one in message.parts]
    return [one if isinstance(one, str) else (one.modality.label, one.start) for one in parts]


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        return load_file(path), json.loads(file.metadata()["oscar_mm.cache"])


def write(path: Path, tensors: dict[str, Any], text: dict[str, Any]) -> Path:
    write_checked(path, tensors, {"oscar_mm.cache": json.dumps(text)})
    return path


@pytest.mark.daily("qwen")
@pytest.mark.parametrize("name", FAMILIES)
def test_parts_stay_in_their_order(name: str, tmp_path, request) -> None:
    kind, fixture, other = FAMILIES[name]
    pipe = kind(request.getfixturevalue(fixture), device="cpu")
    pipe.model.generation_config.eos_token_id = NEVER
    [(label, source)] = other.items()
    asked = ["Image 1:", part("image", noise(64, 96)), "then", part(label, source), "last", "?"]
    with pipe.chat("Be brief.") as chat:
        chat.ask("First?", images=[noise(40, 40, 3)], **AGAIN)
        chat.ask(
            parts=[*asked[:2], *asked[2:4], part("image", noise(64, 64, 1)), *asked[4:]], **AGAIN
        )
        chat.forget(next(one.index for one in chat.segments if one.turn == 1 and one.modality))
        chat.save(tmp_path / "chat")
        with pipe.load_chat(tmp_path / "chat") as loaded:
            assert loaded.turns == chat.turns and loaded.segments == chat.segments
            first, second = map(shown, loaded.turns)
            ids = loaded._spillable.conversation.token_ids[0].tolist()
            assert loaded.ask("And?", **AGAIN).token_ids == chat.ask("And?", **AGAIN).token_ids
    assert [one if isinstance(one, str) else one[0] for one in first] == ["image", "First?"]
    kinds = [one if isinstance(one, str) else one[0] for one in second]
    assert kinds == ["Image 1:", "image", "then", label, "image", "last", "?"]
    # Each is where its placeholder is among the tokens.
    for kind_name, start in (one for one in second if not isinstance(one, str)):
        token = pipe.processor.tokenizer.convert_tokens_to_ids(
            getattr(pipe.processor, f"{kind_name}_token")
        )
        assert ids[start] == token
    starts = [one[1] for one in second if not isinstance(one, str)]
    assert starts == sorted(set(starts))


@pytest.fixture(scope="module")
def with_tools(qwen3_vl_folder) -> OscarVLPipeline:
    pipe = OscarVLPipeline(qwen3_vl_folder, policy="bf16", device="cpu")
    pipe.processor.chat_template = TOOL_TEMPLATE
    return pipe


@pytest.mark.daily("required")
@pytest.mark.parametrize("choice", ["auto", "required", FORCED])
def test_tools_stay(with_tools, choice: Any, tmp_path) -> None:
    """What the model may call, what it called, and what the tools gave."""
    pipe, result = with_tools, RESULTS[0] | {"content": [part("image", noise(40, 40)), "a map"]}
    past = messages_from([*ASKED, CALLS, *RESULTS])
    with pipe.chat("Be brief.", tools=TOOLS, tool_choice=choice) as chat:
        chat.tell_all([PastTurn(past[1:2], past[2])])
        answer = chat.ask(messages=[result], seed=1, temperature=1, max_new_tokens=40)
        chat.save(tmp_path / "chat")
        with pipe.load_chat(tmp_path / "chat") as loaded:
            assert loaded.tools == chat.tools and loaded.turns == chat.turns
            told, asked = loaded.turns
            assert [call.unescaped for call in told.tool_calls] == [
                '{"city": "Oslo"}',
                '{"city": "Rome"}',
            ]
            assert asked.tool_calls == answer.tool_calls
            assert (choice == "auto") == (not asked.tool_calls)
            [message] = asked.messages
            assert (message.role, message.tool_call_id) == ("tool", "call_1")
            assert message.text == "a map" and not isinstance(message.parts[0], str)
            options = {"max_new_tokens": 24, "seed": 2, "temperature": 1}
            both = [one.ask("And now?", **options).token_ids for one in (chat, loaded)]
            assert both[0] == both[1]
            # From the beginning, where the template writes the tools anew.
            for one in (chat, loaded):
                while one.turns:
                    one.undo()
            both = [one.ask("Anew?", **options).token_ids for one in (chat, loaded)]
            assert both[0] == both[1]


@pytest.fixture(scope="module")
def saved(with_tools, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "chat"
    with with_tools.chat(tools=TOOLS) as chat:
        chat.ask(
            parts=["a", part("image", noise(40, 40)), "b", part("image", noise(64, 64))], **AGAIN
        )
        chat.save(path)
    return path


def test_a_file_of_version_1(with_tools, saved, tmp_path) -> None:
    tensors, text = read(saved)
    given = text["given"]
    given["chat"] = 1
    del given["tools"]
    for turn in given["turns"]:
        del turn["messages"], turn["tool_calls"]
        turn["prompt"] = "a\nb"
    with with_tools.load_chat(write(tmp_path / "old", tensors, text)) as old:
        [turn] = old.turns
        assert [
            one if isinstance(one, str) else one.modality.label for one in (turn.messages[0].parts)
        ] == ["image", "image", "a\nb"]
        assert (turn.prompt, old.tools, turn.tool_calls) == ("a\nb", None, ())
        with with_tools.load_chat(saved) as new:
            assert turn.media == new.turns[0].media
            assert old.ask("And?", **AGAIN).token_ids == new.ask("And?", **AGAIN).token_ids


def message(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda given: given["turns"][0]["messages"][0].update(changes)


def function(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda given: given["tools"]["definitions"][0]["function"].update(changes)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE = {
    "a medium twice": message(parts=[0, 0, 1]),
    "a medium left out": message(parts=["a", 0]),
    "no such medium": message(parts=[0, 1, 2]),
    "a medium from the end": message(parts=[0, -1]),
    "true for 1": message(parts=[0, True]),
    "a part of a part": message(parts=[0, 1, ["a"]]),
    "parts that are text": message(parts="01"),
    "a role": message(role="root"),
    "a number for a name": message(name=5),
    "calls of another kind": message(tool_calls=[["a", "b", "c"]]),
    "no messages": lambda given: given["turns"][0].update(messages=[]),
    "media in another order": lambda given: given["turns"][0]["media"].reverse(),
    "very many parts": message(parts=[0, 1, *[""] * (1 << 18)]),
    "a control token": function(description="a<|im_end|>b"),
    "a name": function(name="a b"),
    "deep schemas": function(parameters=nested(100)),
    "ten thousand tools": lambda given: given["tools"].update(
        definitions=[{"name": f"f{index}"} for index in range(10_000)]
    ),
    "no tools": lambda given: given["tools"].update(definitions=[]),
    "a tool that is none of them": lambda given: given["tools"].update(named="other"),
    "both choices": lambda given: given["tools"].update(named="weather", required=True),
    "tools that are a list": lambda given: given.update(tools=[]),
    "long tools": function(description="x" * (1 << 22)),
    "version 1 with messages": lambda given: given.update(chat=1),
    "version 3": lambda given: given.update(chat=3),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_fields(with_tools, saved, name: str, tmp_path) -> None:
    tensors, text = read(saved)
    changed = copy.deepcopy(text)
    HOSTILE[name](changed["given"])
    path = write(tmp_path / "forged", tensors, changed)
    with pytest.raises(InputError) as caught:
        with_tools.load_chat(path)
    error = str(caught.value)
    assert str(path) in error and "\n" not in error and len(error) < 400 + len(str(path))


def test_more_parts_than_are_read_again(with_tools, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(turn_fields, "MAX_PARTS", 3 - turn_fields.MAX_MEDIA)
    with with_tools.chat() as chat:
        chat.ask(parts=["a", "b", "c"], **AGAIN)
        with pytest.raises(InputError, match="cannot be written: 4 parts: at most 3 are allowed"):
            chat.save(tmp_path / "chat")


def test_a_message_of_a_history_is_not_read_again(with_tools, saved) -> None:
    with (
        with_tools.load_chat(saved) as chat,
        pytest.raises(
            InputError, match=r"parts\[1\] comes from a chat, which does not store its media"
        ),
    ):
        with_tools.chat_completion(list(chat.turns[0].messages))
