"""Answers of a random model at temperature 1 match their grammar whenever they end."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oscar_mm import Grammar, InputError
from oscar_mm.engine.sampling import SamplerGroup, Sampling, SamplingState
from oscar_mm.pipelines.pipeline import Pipeline
from tests.engine.engine import empty, loaded, made, run
from tests.thinking import ids_of, saying

LEAF = {"type": "object", "properties": {"v": {"type": "integer"}}, "additionalProperties": False}
NAMES = {"enum": ["red", "green", "bl\u00fce", "\U0001f469"]}


def is_int(value: Any, least: float = -1e300, most: float = 1e300) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_object(value: Any, required: set[str], allowed: set[str]) -> bool:
    return isinstance(value, dict) and required <= value.keys() <= allowed


def is_tree(value: Any) -> bool:
    return (
        is_object(value, {"v"}, {"v", "next"})
        and is_int(value["v"], 0, 9)
        and ("next" not in value or is_tree(value["next"]))
    )


SCHEMAS: list[tuple[dict[str, Any], Callable[[Any], bool]]] = [
    ({"type": "boolean"}, lambda x: isinstance(x, bool)),
    ({"type": "null"}, lambda x: x is None),
    ({"type": "integer", "minimum": -3, "maximum": 17}, lambda x: is_int(x, -3, 17)),
    ({"type": "integer", "exclusiveMinimum": 99, "maximum": 120}, lambda x: is_int(x, 100, 120)),
    (
        {"type": "number", "minimum": 0, "maximum": 1},
        lambda x: isinstance(x, int | float) and 0 <= x <= 1,
    ),
    ({"type": "string", "maxLength": 5}, lambda x: isinstance(x, str) and len(x) <= 5),
    (
        {"type": "string", "minLength": 2, "maxLength": 3},
        lambda x: isinstance(x, str) and 2 <= len(x) <= 3,
    ),
    (
        {"type": "string", "pattern": "^[A-C]{2}-[0-9]+$", "maxLength": 8},
        lambda x: bool(re.fullmatch(r"[A-C]{2}-[0-9]+", x)) and len(x) <= 8,
    ),
    ({"type": "string", "format": "date"}, lambda x: bool(re.fullmatch(r"\d{4}-\d\d-\d\d", x))),
    # A format that is not checked does not restrict valid values.
    (
        {"type": "string", "format": "color", "pattern": "^#[0-9]{3}$"},
        lambda x: bool(re.fullmatch(r"#[0-9]{3}", x)),
    ),
    (
        {
            "type": "object",
            "properties": {"format": {"type": "string", "format": "regex", "maxLength": 3}},
            "required": ["format"],
            "additionalProperties": False,
        },
        lambda x: is_object(x, {"format"}, {"format"}) and len(x["format"]) <= 3,
    ),
    ({"const": {"format": "color"}}, lambda x: x == {"format": "color"}),
    ({"const": {"a": [1, "b"]}}, lambda x: x == {"a": [1, "b"]}),
    (NAMES, lambda x: x in NAMES["enum"]),
    ({"anyOf": [{"const": 5}, {"enum": ["x"]}]}, lambda x: x in (5, "x")),
    ({"oneOf": [{"type": "null"}, {"type": "boolean"}]}, lambda x: x in (None, True, False)),
    ({"type": ["boolean", "null"]}, lambda x: x in (None, True, False)),
    (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        lambda x: 1 <= len(x) <= 3 and all(isinstance(y, bool) for y in x),
    ),
    (
        {"type": "array", "prefixItems": [NAMES, {"const": 1}], "items": False, "minItems": 2},
        lambda x: len(x) == 2 and x[0] in NAMES["enum"] and x[1] == 1,
    ),
    (
        {
            "type": "object",
            "properties": {"b": {"type": "boolean"}, "a": NAMES, "c": {"type": "null"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        lambda x: is_object(x, {"a", "b"}, {"a", "b", "c"}) and x["a"] in NAMES["enum"],
    ),
    (
        {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 0},
        lambda x: x == {},
    ),
    (
        {
            "$defs": {"leaf": LEAF},
            "type": "array",
            "items": {"$ref": "#/$defs/leaf"},
            "maxItems": 2,
        },
        lambda x: len(x) <= 2 and all(is_object(y, set(), {"v"}) for y in x),
    ),
    (
        {
            "type": "object",
            "properties": {
                "v": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"$ref": "#"},
            },
            "required": ["v"],
            "additionalProperties": False,
        },
        is_tree,
    ),
    (
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]},
        lambda x: is_int(x, 3, 6),
    ),
]


@pytest.fixture(scope="module")
def pipe(qwen3_vl_folder: Path) -> Pipeline:
    """Pipeline whose answers may end by themselves."""
    made = loaded(qwen3_vl_folder)
    made.model.generation_config.eos_token_id = made.processor.tokenizer.eos_token_id
    return made


def answers(pipe: Pipeline, grammars: list[Grammar | None], **options: Any) -> list[Any]:
    """Return answers with these grammars, decoded in one batch."""
    options = {"temperature": 1.0, "max_new_tokens": 80} | options
    begun = [
        made(pipe, "Why?", grammar=grammar, seed=place, **options)
        for place, grammar in enumerate(grammars)
    ]
    for one in begun:
        pipe.engine.submit(one)
    run(pipe, begun)
    return [one.complete() for one in begun]


def test_schemas(pipe) -> None:
    """Answers with different grammars, and without one, decode in one batch."""
    several = [pair for pair in SCHEMAS for _ in range(3)]
    grammars = [Grammar.json_schema(schema) for schema, _ in several]
    found = answers(pipe, [*grammars, None, None], max_new_tokens=240)
    ended = dict.fromkeys(range(len(SCHEMAS)), 0)
    for place, (answer, (schema, is_valid)) in enumerate(zip(found, several, strict=False)):
        if answer.finish_reason == "stop":
            assert is_valid(json.loads(answer.text)), (schema, answer.text)
            ended[place // 3] += 1
    assert all(ended.values()), ended
    free = answers(pipe, [None] * (len(several) + 2), max_new_tokens=20)
    assert [x.token_ids[:20] for x in found[-2:]] == [x.token_ids for x in free[-2:]]


def test_an_object_of_any_kind(pipe) -> None:
    [found] = answers(pipe, [Grammar.json_object()], max_new_tokens=12)
    assert found.text.startswith("{")
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    text = json.dumps(schema | {"additionalProperties": False})
    [found] = answers(pipe, [Grammar.json_schema(text)], max_new_tokens=400)
    assert json.loads(found.text) == {"a": 1} and found.finish_reason == "stop"


@pytest.mark.parametrize(
    ("grammar", "expression"),
    [
        (Grammar.regex("(yes|no), [0-9]{2,4}\\."), "(yes|no), [0-9]{2,4}\\."),
        (Grammar.regex("[ab]{3}(c|d\u00e9)"), "[ab]{3}(c|d\u00e9)"),
        (Grammar.choice(["a dog", 'a "cat"\n', "a \u732b"]), 'a dog|a "cat"\n|a \u732b'),
        (Grammar.cfg('start: "(" start ")" | "x"'), r"\(*x\)*"),
        (Grammar.cfg('root ::= "<" [0-9]+ ">" "!"?'), "<[0-9]+>!?"),
    ],
)
def test_other_forms(pipe, grammar: Grammar, expression: str) -> None:
    found = answers(pipe, [grammar] * 8)
    ended = [one.text for one in found if one.finish_reason == "stop"]
    assert len(set(ended)) > 1
    for text in ended:
        assert re.fullmatch(expression, text)
        assert text.count("(") == text.count(")") or grammar.kind == "regex"


def test_the_grammar_wins(pipe) -> None:
    """A grammar overrides bans that leave no token; if other tokens are left, the bans hold."""
    tokenizer = pipe.processor.tokenizer
    grammar = Grammar.choice(["yes", "no"])
    words = {"bad_words": ["y", "n", "ye", "yes", "no", "e", "o", "s", "es"], "min_tokens": 30}
    for one in answers(pipe, [grammar] * 4, **words):
        assert one.text in ("yes", "no") and one.finish_reason == "stop"
    first = {ids[0] for text in ("yes", "y", "ye") if (ids := tokenizer.encode(text))}
    for one in answers(pipe, [grammar] * 6, logit_bias=dict.fromkeys(first, -100)):
        assert one.text == "no"


def test_an_answer_without_an_end_token(qwen3_vl_folder) -> None:
    """A complete answer ends, although the model could continue."""
    pipe = loaded(qwen3_vl_folder)
    tokenizer = pipe.processor.tokenizer
    grammar = Grammar.choice(["yes", "no"])
    for options in ({}, {"ignore_eos": True}):
        [one] = answers(pipe, [grammar], **options)
        assert one.text in ("yes", "no") and one.finish_reason == "stop"
        pipe.model.generation_config.eos_token_id = tokenizer.eos_token_id


def test_a_chat_and_a_stream(pipe) -> None:
    grammar = Grammar.json_schema({"enum": [1234, "a b c"]})
    with pipe.chat() as chat:
        first = chat.ask("Why?", grammar=grammar, max_new_tokens=40)
        stream = chat.stream("And?", grammar=grammar, max_new_tokens=40)
        assert "".join(stream) == stream.result.text
        for one in (first, stream.result):
            assert json.loads(one.text) in (1234, "a b c")
        assert chat.ask("Now?", max_new_tokens=5).token_ids


def test_reasoning_is_free(qwen3_vl_thinking_folder) -> None:
    """The grammar applies after the reasoning; a token that it forbids would end the answer."""
    from oscar_mm import OscarVLPipeline

    pipe = OscarVLPipeline(qwen3_vl_thinking_folder, policy="bf16", device="cpu")
    grammar = Grammar.choice(["yes", "no"])
    said = "Is it {? Or [?\n</think>\n\nIt is a sign."
    with saying(pipe, ids_of(pipe, said)):
        answer = pipe(None, "Why?", grammar=grammar, temperature=0, max_new_tokens=60)
    assert answer.reasoning == "Is it {? Or [?" and answer.text in ("yes", "no")
    assert answer.finish_reason == "stop"
    free = pipe(None, "Why?", grammar=grammar, temperature=0, max_new_tokens=8)
    assert free.text == "" and free.finish_reason == "length"
    assert free.token_ids == pipe(None, "Why?", temperature=0, max_new_tokens=8).token_ids


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Grammar.json_schema({"not": {"type": "string"}}), r'cannot be used .*"not"'),
        (lambda: Grammar.json_schema({"uniqueItems": True}), "uniqueItems"),
        (lambda: Grammar.json_schema({"type": "banana"}), "banana"),
        (lambda: Grammar.json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (lambda: Grammar.json_schema({"$ref": "http://a.b/c"}), r"http://a\.b/c"),
        (lambda: Grammar.json_schema({"$ref": "#"}), "no text matches"),
        (lambda: Grammar.json_schema({"minimum": 5, "maximum": 3, "type": "integer"}), "minimum"),
        (lambda: Grammar.json_schema("["), "must be a JSON schema"),
        (lambda: Grammar.json_schema("[]"), "must be a JSON schema"),
        (lambda: Grammar.json_schema({"a": {1}}), "must be a JSON schema"),
        (lambda: Grammar.json_schema("[" * 100_000), "must be a JSON schema"),
        (lambda: Grammar.json_schema({"enum": ["a" * 70_000]}), "65,536"),
        (lambda: Grammar.regex("("), "regex"),
        (lambda: Grammar.regex(r"(a)\1"), "backreferences"),
        (lambda: Grammar.regex("a" * 10_000_000), "65,536"),
        (lambda: Grammar.regex(""), "non-empty"),
        (lambda: Grammar.choice([]), "1 to 1,024 non-empty texts"),
        (lambda: Grammar.choice(["a", ""]), "non-empty texts"),
        (lambda: Grammar.choice(["a"] * 1025), "1 to 1,024"),
        (lambda: Grammar.choice("ab"), "must be a list"),
        (lambda: Grammar.choice(["\ud800"]), "cannot be used"),
        (lambda: Grammar.cfg("start: undefined"), "undefined"),
        (lambda: Grammar.cfg(" "), "non-empty"),
        (lambda: "yes|no", "must be a Grammar"),
    ],
)
def test_what_cannot_be_served(pipe, make: Callable[[], Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected) as refused:
        pipe(None, "Why?", grammar=make(), max_new_tokens=4)
    message = str(refused.value)
    assert len(message) < 500 and "\n" not in message and message.startswith("grammar")


def nested(depth: int, schema: Any) -> dict[str, Any]:
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def exploding() -> dict[str, Any]:
    steps = {
        f"a{n + 1}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/a{n}"} for name in "abcdefghij"},
        }
        for n in range(20)
    }
    return {"$defs": {"a0": {"type": "string"}} | steps, "$ref": "#/$defs/a20"}


HOSTILE = {
    "deep": lambda: Grammar.json_schema(nested(5000, {"type": "null"})),
    "deep but allowed": lambda: Grammar.json_schema(nested(60, {"type": "null"})),
    "references": lambda: Grammar.json_schema(exploding()),
    "circle": lambda: Grammar.json_schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "properties": lambda: Grammar.json_schema(
        {"type": "object", "properties": {f"p{n}": {} for n in range(4000)}}
    ),
    "alternatives": lambda: Grammar.json_schema(
        {"allOf": [{"anyOf": [{"minimum": n}, {"maximum": n}]} for n in range(40)]}
    ),
    "long arrays": lambda: Grammar.json_schema({"items": {"type": "null"}, "minItems": 10**9}),
    "counted": lambda: Grammar.regex("((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
    "backtracking": lambda: Grammar.regex("(a*)*(a|a)*(a*a*)*b"),
    "states": lambda: Grammar.regex("([ab]*a[ab]{300}c)|([ab]*b[ab]{301}d)"),
    "ambiguous": lambda: Grammar.cfg('start: s\ns: s s s | s s | "a" | "b" | ""'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_cost_little(pipe, name: str) -> None:
    """Such grammars are refused, end their own answer, or run as fast as others."""
    start = time.perf_counter()
    try:
        begun = made(pipe, "Why?", grammar=HOSTILE[name](), temperature=1.0, max_new_tokens=40)
    except InputError as error:
        assert len(str(error)) < 500
        assert time.perf_counter() - start < 5
        return
    other = made(pipe, "Why?", max_new_tokens=40)
    for one in (begun, other):
        pipe.engine.submit(one)
    run(pipe, [begun, other])
    assert len(other.complete().token_ids) > 0
    try:
        begun.complete()
    except InputError as error:
        assert "grammar: became too complex" in str(error)
    assert time.perf_counter() - start < 10


def test_an_answer_that_becomes_too_complex_ends_alone(pipe, monkeypatch) -> None:
    from oscar_mm.engine import grammar as grammars

    monkeypatch.setitem(grammars._MAX_ROWS, "grammar", 12)
    ambiguous = Grammar.cfg('start: s\ns: s s | "a" s | s "b" | "a" | "b"')
    options = {"max_new_tokens": 40, "temperature": 1.0, "min_tokens": 40, "seed": 1}
    begun = [made(pipe, "Why?", grammar=ambiguous, **options)]
    begun += [made(pipe, "Why?", max_new_tokens=40) for _ in range(2)]
    for one in begun:
        pipe.engine.submit(one)
    run(pipe, begun)
    with pytest.raises(InputError, match="grammar: became too complex during the answer"):
        begun[0].complete()
    others = [one.complete() for one in begun[1:]]
    assert others[0].token_ids == others[1].token_ids != []
    del begun
    assert empty(pipe)


def test_bits_of_tokens_at_word_boundaries(pipe) -> None:
    """A mask with a single token lets that token through and no other."""
    vocabulary = pipe.model.config.text_config.vocab_size
    tokenizer = pipe.processor.tokenizer
    texts = {}
    for token in (*range(30, 35), 63, 64, 95, 96, 97):
        text = tokenizer.decode([token])
        if tokenizer.encode(text) == [token] and text.strip():
            texts[token] = text
    assert len(texts) >= 5
    for token, text in texts.items():
        sampling = pipe.sampling({"grammar": Grammar.choice([text]), "temperature": 0}, ())
        logits = torch.zeros(1, vocabulary)
        logits[0, token] = -5.0
        found = SamplerGroup([SamplingState(sampling, torch.tensor([0]))], logits.device).choose(
            logits
        )
        prefix = tokenizer.decode(found.tolist())
        assert text.startswith(prefix) and prefix


def test_a_sampling_that_no_pipeline_has_checked() -> None:
    with pytest.raises(RuntimeError, match="not compiled"):
        SamplingState(Sampling(grammar=Grammar.regex("a")), torch.tensor([0]))
