"""Tools that a request offers, checked."""

import json

import pytest

from oscar_mm.errors import InputError
from oscar_mm.tool_parsers.definitions import MAX_DEPTH, MAX_TOOLS, read_definitions
from oscar_mm.tool_parsers.offer import ToolOffer
from oscar_mm.tool_parsers.parser import MAX_CALLS
from oscar_mm.tool_parsers.registry import FORMATS

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
FIND = {"name": "find", "description": "Finds text.", "parameters": PARAMETERS}


def find(text: str, most: int = 3) -> str:
    """Finds text.

    Args:
        text: What to find.
        most: How many places.
    """
    return text * most


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_a_function_may_come_as_openai_has_it_alone_or_from_python() -> None:
    whole = {"type": "function", "function": {**FIND, "strict": True}}
    for given in (whole, FIND, {"type": "function", **FIND}):
        [one] = read_definitions([given])
        assert one.for_template() == {"type": "function", "function": FIND}
    [one] = read_definitions([find])
    assert one.name == "find" and one.parameters["required"] == ["text"]
    assert one.parameters["properties"]["most"]["type"] == "integer"
    [one] = read_definitions([{"name": "stop", "description": None}])
    assert (one.description, one.parameters) == ("", {"type": "object", "properties": {}})


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("find", "must be a list"),
        ([FIND, "find"], r"tools\[1\]: must be"),
        ([{"type": "web_search"}], r"tools\[0\]: must be"),
        ([{"type": "function"}], r"tools\[0\]: the name None"),
        ([{"name": "<|im_end|>"}], "the name '<|im_end|>' must be"),
        ([{"name": "a b"}], "the name 'a b' must have"),
        ([{"name": "a" * 129}], "must have 1 to 128"),
        ([FIND, FIND], r"tools\[1\]: an earlier tool is also named 'find'"),
        ([{**FIND, "description": 1}], "description must be a string"),
        ([{**FIND, "parameters": []}], "must be a JSON schema"),
        ([{**FIND, "parameters": {"type": "array"}}], 'must have "type": "object"'),
        ([{**FIND, "parameters": {"a": {1: 2}}}], "keys of parameters must be strings"),
        ([{**FIND, "parameters": {"a": {"b"}}}], "which is not JSON"),
        ([{**FIND, "parameters": nested(MAX_DEPTH + 1)}], "nested more than"),
        ([{**FIND, "parameters": nested(100_000)}], "nested more than"),
        ([{**FIND, "name": f"f{one}"} for one in range(10_000)], "has 10,000 entries"),
        ([lambda x: x], r"tools\[0\]: "),
    ],
)
def test_others_are_refused(tools: list, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_definitions(tools)


def test_as_many_and_as_deep_as_allowed() -> None:
    deep = {**FIND, "parameters": nested(MAX_DEPTH)}
    assert len(read_definitions([{**deep, "name": f"f{one}"} for one in range(MAX_TOOLS)])) == 1024


def test_a_schema_that_holds_itself_is_refused() -> None:
    schema: dict = {"type": "object"}
    schema["properties"] = schema
    with pytest.raises(InputError, match="nested more than"):
        read_definitions([{**FIND, "parameters": schema}])


def test_characters_and_texts() -> None:
    [one] = read_definitions([{**FIND, "parameters": {"properties": {"é": {"enum": ["x", 1]}}}}])
    written = json.dumps(one.for_template(), ensure_ascii=False)
    assert one.characters == len(written)
    texts = list(one.texts())
    assert {"find", "Finds text.", "é", "x", "enum", "<é>"} <= set(texts)


def test_calls_that_an_offer_allows() -> None:
    tools, hermes = read_definitions([FIND]), FORMATS["hermes"]
    assert ToolOffer(tools, hermes).max_calls == MAX_CALLS
    assert ToolOffer(tools, hermes, parallel=False).max_calls == 1
    assert ToolOffer(tools, hermes, named="find").max_calls == 1
    with pytest.raises(InputError, match="no tool is named 'fimd'; did you mean find"):
        ToolOffer(tools, hermes, named="fimd")
