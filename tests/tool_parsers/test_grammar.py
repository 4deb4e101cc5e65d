"""Grammars of answers that must be calls: what they allow is read as calls that the tools allow."""

import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken

from oscar_mm.engine.grammar import Grammar
from oscar_mm.errors import InputError
from oscar_mm.tool_parsers.calls import ToolCallDelta, joined_calls
from oscar_mm.tool_parsers.definitions import read_definitions
from oscar_mm.tool_parsers.grammar import json_of
from oscar_mm.tool_parsers.marks import mark_tokens
from oscar_mm.tool_parsers.offer import ToolOffer
from oscar_mm.tool_parsers.registry import FORMATS
from tests.tiny import qwen_tokenizer

llguidance: Any = pytest.importorskip("llguidance")

FIND = {
    "name": "find",
    "parameters": {
        "properties": {
            "most": {"type": "integer", "minimum": 1, "maximum": 9},
            "place": {"$ref": "#/$defs/Place"},
            "text": {"type": "string", "maxLength": 5},
            "exact": {"type": "boolean"},
            "order": {"type": "string", "enum": ["up", "down"]},
        },
        "required": ["text"],
        "additionalProperties": False,
        "$defs": {
            "Place": {
                "type": "object",
                "properties": {"x": {"enum": [1, 2]}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
}
MARKS = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"
"""Tokens of Qwen's and of Mistral's tokenizers."""
END = b"\n</parameter>"
"""Ends a value that may be any text."""
TOOLS = read_definitions([FIND, {"name": "stop"}])


def matcher(grammar: str) -> Any:
    tokenizer = llguidance.LLTokenizer("byte")
    made = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("lark", grammar))
    assert not made.is_error(), made.get_error()
    return made


def said(grammar: str, seed: int, most: int = 4000) -> str:
    """A random text that the grammar allows, which ends where it may."""
    chosen, one = random.Random(seed), matcher(grammar)
    text: list[int] = []
    while not one.is_stopped() and len(text) < most:
        mask = one.compute_logit_bias()
        allowed = [token for token, bias in enumerate(mask) if bias and token < 128]
        if one.is_accepting() and chosen.random() < 0.6:
            break
        if chosen.random() < 0.1 and one.validate_tokens(list(END)) == len(END):
            text += END
            assert one.try_consume_tokens(list(END)) == len(END)
            continue
        # Closing things ends strings, which would go on for long.
        closing = [token for token in allowed if chr(token) in "\"'}]>)<"]
        text.append(chosen.choice(closing if closing and chosen.random() < 0.5 else allowed))
        assert one.try_consume_tokens(text[-1:]) == 1
    return bytes(text).decode()


def is_allowed(name: str, given: dict[str, Any]) -> bool:
    if name == "stop":
        return given == {}
    kinds = {
        "most": lambda value: type(value) is int and 1 <= value <= 9,
        "place": lambda value: value in ({"x": 1}, {"x": 2}),
        "text": lambda value: isinstance(value, str),
        "exact": lambda value: isinstance(value, bool),
        "order": lambda value: value in ("up", "down"),
    }
    known = all(key in kinds and kinds[key](value) for key, value in given.items())
    return name == "find" and known and "text" in given


@pytest.mark.parametrize("tool_format", FORMATS.values())
def test_what_a_grammar_allows_is_read_as_calls(tool_format: Any) -> None:
    offer = ToolOffer(TOOLS, tool_format, required=True)
    seen: set[str] = set()
    for seed in range(12):
        text = said(offer.grammar({}), seed)
        parser = offer.parser()
        pieces = parser.feed(text) + parser.finish()
        assert not any(isinstance(piece, str) for piece in pieces), text
        calls = joined_calls(pieces)
        assert calls, text
        for call in calls:
            assert is_allowed(call.name, json.loads(call.arguments)), text
        seen |= {call.name for call in calls}
    assert seen == {"find", "stop"}


@pytest.mark.parametrize("tool_format", FORMATS.values())
def test_one_call_of_a_named_tool(tool_format: Any) -> None:
    offer = ToolOffer(TOOLS, tool_format, named="stop")
    for seed in range(4):
        parser = offer.parser()
        calls = joined_calls(parser.feed(said(offer.grammar({}), seed)) + parser.finish())
        assert [(call.name, call.arguments) for call in calls] == [("stop", "{}")]


def test_an_answer_that_need_be_no_call_has_no_grammar() -> None:
    assert ToolOffer(TOOLS, FORMATS["hermes"]).grammar({}) is None


@pytest.mark.parametrize("tool_format", FORMATS.values())
def test_an_answer_is_calls_or_a_text_of_the_rule(tool_format: Any) -> None:
    """Also where both begin with a bracket."""
    schema = {"type": "object", "properties": {"name": {"enum": ["Oslo"]}}, "required": ["name"]}
    offer = ToolOffer(TOOLS, tool_format)
    grammar = offer.grammar({}, json_of(schema | {"additionalProperties": False}))
    kinds: set[str] = set()
    for seed in range(30):
        parser = offer.parser()
        pieces = parser.feed(said(grammar, seed)) + parser.finish()
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        assert bool(text) is not any(isinstance(piece, ToolCallDelta) for piece in pieces)
        assert not text or json.loads(text) == {"name": "Oslo"}
        kinds.add("text" if text else "calls")
    assert kinds == {"text", "calls"}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hermes", '<tool_call>\n{"name": "find", "arguments": {"text": "a"}}\n</tool_call>'),
        (
            "qwen3_coder",
            "<tool_call>\n<function=find>\n<parameter=text>\na\n</parameter>\n</function>\n"
            "</tool_call>",
        ),
        ("mistral_named", '[TOOL_CALLS]find[ARGS]{"text": "a"}'),
    ],
)
def test_a_model_may_write_marks_as_tokens(name: str, said: str, special: bool) -> None:
    tokenizer, tool_format = qwen_tokenizer(400), FORMATS[name]
    added = [AddedToken(mark, special=special) for mark in MARKS]
    tokenizer.add_tokens(added, special_tokens=special)
    grammar = ToolOffer(TOOLS, tool_format, required=True).grammar(
        mark_tokens(tokenizer, tool_format)
    )
    ends = frozenset([tokenizer.eos_token_id])
    one = Grammar.cfg(grammar).compiled(tokenizer, len(tokenizer), ends).prototype.deep_copy()
    ids = tokenizer(said)["input_ids"]
    assert one.validate_tokens(ids) == len(ids)
    assert one.try_consume_tokens(ids) == len(ids) and one.is_accepting()


def test_special_tokens_stand_for_marks() -> None:
    named = ToolOffer(TOOLS, FORMATS["mistral_named"], named="stop")
    grammar = named.grammar({"[TOOL_CALLS]": 9, "[ARGS]": 32})
    assert "[TOOL_CALLS]" not in grammar
    assert grammar.index("<[9]>") < grammar.index('"stop"') < grammar.index("<[32]>")
    matcher(grammar)


def test_parameters_that_are_not_listed_cannot_be_required() -> None:
    tools = read_definitions([{"name": "any", "parameters": {"$ref": "#/$defs/A", "$defs": {}}}])
    with pytest.raises(InputError, match="any cannot be required"):
        ToolOffer(tools, FORMATS["pythonic"], required=True).grammar({})
