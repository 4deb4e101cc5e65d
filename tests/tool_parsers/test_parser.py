"""Text and calls of answers in every format, whole and in pieces."""

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm.tool_parsers.calls import ToolCall, ToolCallDelta, Tools, joined_calls
from oscar_mm.tool_parsers.parser import MAX_CALLS, Piece, ToolCallParser, ToolFormat
from oscar_mm.tool_parsers.registry import FORMATS

TOOLS = {
    "find": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "most": {"type": "integer"},
            "exact": {"type": "boolean"},
            "rest": {"type": ["array", "object", "null"]},
        },
    },
    "stop": {},
}
Call = tuple[str, dict[str, Any]]


def hermes(calls: Sequence[Call]) -> str:
    texts = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(
        json.dumps({"name": name, "parameters": given}, ensure_ascii=False) for name, given in calls
    )


def mistral(calls: Sequence[Call]) -> str:
    texts = [json.dumps({"arguments": given, "name": name}) for name, given in calls]
    return f"[TOOL_CALLS] [{', '.join(texts)}]"


def mistral_named(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)


def pythonic(calls: Sequence[Call]) -> str:
    texts = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in calls
    ]
    return f"[{', '.join(texts)}]"


def qwen3_coder(calls: Sequence[Call]) -> str:
    def value(one: Any) -> str:
        return one if isinstance(one, str) else json.dumps(one)

    texts = [
        "".join(f"<parameter={key}>\n{value(one)}\n</parameter>\n" for key, one in given.items())
        for _, given in calls
    ]
    return "\n".join(
        f"<tool_call>\n<function={name}>\n{text}</function>\n</tool_call>"
        for (name, _), text in zip(calls, texts, strict=True)
    )


WRITERS = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "mistral_named": mistral_named,
    "pythonic": pythonic,
    "qwen3_coder": qwen3_coder,
}
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]))
        | st.sampled_from(["a </tool_call> b", "[TOOL_CALLS]", '"}}', "\\", "'", "it's\n"]),
        "most": st.integers(),
        "exact": st.booleans(),
        "rest": st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values),
    },
)
calls_of = st.lists(
    st.tuples(st.just("find"), arguments) | st.just(("stop", {})), min_size=1, max_size=3
)
plain = st.sampled_from(["", "Sure.", "I look <it> up: ", "Wait [a moment", "a {b} c"])
cuts = st.lists(st.integers(1, 9), min_size=1, max_size=40)


def streamed(name: str, text: str, sizes: Sequence[int], limit: int = MAX_CALLS) -> list[Piece]:
    """The pieces of a text that comes in pieces of these sizes, over and over."""
    parser = ToolCallParser(FORMATS[name], TOOLS, limit)
    pieces: list[Piece] = []
    start = count = 0
    while start < len(text):
        size = sizes[count % len(sizes)]
        pieces += parser.feed(text[start : start + size])
        start, count = start + size, count + 1
    return pieces + parser.finish()


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece for piece in pieces if isinstance(piece, str))


def calls_in(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    deltas = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
    return [(call.name, call.arguments) for call in joined_calls(deltas)]


def parse(
    text: str, tool_format: type[ToolFormat], tools: Tools, limit: int = MAX_CALLS
) -> tuple[str, tuple[ToolCall, ...]]:
    """The text and the calls of a whole answer."""
    parser = ToolCallParser(tool_format, tools, limit)
    pieces = parser.feed(text) + parser.finish()
    deltas = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
    return text_of(pieces), joined_calls(deltas)


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=30, deadline=None)
@given(before=plain, calls=calls_of, after=plain, sizes=cuts)
def test_what_was_written_is_read(
    writer: str, before: str, calls: list[Call], after: str, sizes: list[int]
) -> None:
    name = "mistral" if writer == "mistral_named" else writer
    text = f"{before}\n{WRITERS[writer](calls)}\n{after}"
    pieces = streamed(name, text, sizes)
    read = [(found, json.loads(given)) for found, given in calls_in(pieces)]
    assert read == calls
    assert text_of(pieces).split() == (before + " " + after).split()
    whole, found = parse(text, FORMATS[name], TOOLS)
    assert whole == text_of(pieces)
    assert [(call.name, call.arguments) for call in found] == calls_in(pieces)


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", '{"name": "find", "arguments": ', '{"arguments": '),
    *(
        '"name": "stop"',
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "find",
        "[find(",
        "most=",
        "), stop()",
    ),
    *("<|python_tag|>", '{"name": "stop", "parameters": {}};', "<|python_start|>", "[stop()]"),
    *(
        "<function=find>",
        "<parameter=most>",
        "\n</parameter>",
        "\n</function>",
        "<parameter=text>\n",
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        ",",
        ":",
        " ",
        "\n",
        "1",
        "true",
        '"x"',
        "\\",
        "é",
        "<",
        "\\u1",
    ),
]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=80, deadline=None)
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=25), sizes=cuts, one=st.booleans())
def test_any_text_is_read_the_same_in_pieces(
    name: str, fragments: list[str], sizes: list[int], one: bool
) -> None:
    text, limit = "".join(fragments), 1 if one else MAX_CALLS
    pieces = streamed(name, text, sizes, limit)
    whole, calls = parse(text, FORMATS[name], TOOLS, limit)
    assert all(pieces) and text_of(pieces) == whole
    assert calls_in(pieces) == [(call.name, call.arguments) for call in calls]
    assert len(calls) <= limit
    if not calls:
        assert whole == text


def test_names_come_first_and_arguments_in_pieces() -> None:
    text = 'So:\n<tool_call>\n{"name": "find", "arguments": {"text": "a sign"}}\n</tool_call>'
    pieces = streamed("hermes", text, [1])
    assert text_of(pieces) == "So:"
    deltas = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
    first, *rest = deltas
    assert (first.index, first.name) == (0, "find") and first.id and len(rest) > 10
    assert all((delta.index, delta.id, delta.name) == (0, None, None) for delta in rest)
    assert joined_calls(deltas) == (ToolCall(first.id, "find", '{"text": "a sign"}'),)


def test_the_beginning_of_a_mark_waits() -> None:
    parser = ToolCallParser(FORMATS["hermes"], TOOLS)
    assert parser.feed("a <tool") == ["a"]
    assert parser.feed("s> b <") == [" <tools> b"]
    assert parser.finish() == [" <"]


@pytest.mark.parametrize(
    ("name", "text", "read", "left"),
    [
        ("hermes", '<tool_call>\n{"name": "find", "argum', [], True),
        ("hermes", '<tool_call>{"name: 1}</tool_call> b', [], True),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', [], True),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', [], True),
        ("hermes", '<tool_call>{"name": "' + "f" * 300 + '"}</tool_call>', [], True),
        ("hermes", '<tool_call>{"name": "find"', [], True),
        ("hermes", '<tool_call>{"name": "stop"}', [("stop", "{}")], False),
        ("hermes", '<tool_call>{"name": "stop", "arguments": null}', [("stop", "{}")], False),
        ("hermes", '{"name": "find", "arguments": {}}', [], True),
        # Arguments that have begun stay what the model wrote.
        ("hermes", '<tool_call>{"name": "find", "arguments": {"a', [("find", '{"a')], False),
        (
            *("hermes", '<tool_call>{"name": "find", "arguments": {"a": 01}}</tool_call>'),
            *([("find", '{"a": 01}}')], False),
        ),
        ("hermes", '<tool_call>{"name": "find", "arguments": "a', [("find", '"a')], False),
        # A string that holds JSON is what it holds; line breaks in strings are escaped.
        (
            *("hermes", '<tool_call>{"name": "find", "arguments": "{\\"a\\":1}"}</tool_call>'),
            *([("find", '{"a": 1}')], False),
        ),
        (
            *("hermes", '<tool_call>{"name": "find", "arguments": {"a": "b\nc"}}</tool_call>'),
            *([("find", '{"a": "b\\nc"}')], False),
        ),
        ("llama3_json", '{"name": "Ann", "parameters": {}}', [], True),
        ("llama3_json", '{"name": "stop"}', [], True),
        ("llama3_json", '{"a": {"name": 1}} {', [], True),
        (
            "llama3_json",
            '<|python_tag|>{"name": "stop", "parameters": {}}',
            [("stop", "{}")],
            False,
        ),
        ("mistral", '[TOOL_CALLS] [{"name": 1}]', [], True),
        ("mistral", '[TOOL_CALLS]find{"a": 1}', [("find", '{"a": 1}')], False),
        ("mistral", '[TOOL_CALLS]find[CALL_ID]x9[ARGS]{"a": 1}', [("find", '{"a": 1}')], False),
        ("pythonic", "[a](b) and [find(x)] and [other(a=1)]", [], True),
        ("pythonic", "[find(a=1e999)]", [], True),
        ("pythonic", "[find(a=nan)]", [], True),
        ("pythonic", "[find(a=1or)]", [], True),
        (
            "pythonic",
            "[find(a=-1_0, b=0x1F, c=.5)]",
            [("find", '{"a": -10, "b": 31, "c": 0.5}')],
            False,
        ),
        ("pythonic", "[find(a='\\x41\\d\\n\\'')]", [("find", '{"a": "A\\\\d\\n\'"}')], False),
        ("pythonic", "[find(a=b'x')]", [], True),
        (
            "pythonic",
            "[find(a=(1, 2,), b={'c': None,})]",
            [("find", '{"a": [1, 2], "b": {"c": null}}')],
            False,
        ),
        ("pythonic", "<|tool_call_start|>[other()]<|tool_call_end|>", [("other", "{}")], False),
        ("qwen3_coder", "<tool_call>\n<function=", [], True),
        (
            *("qwen3_coder", "<function=find><parameter=most>many</parameter></function>"),
            *([("find", '{"most": "many"}')], False),
        ),
        (
            *(
                "qwen3_coder",
                "<function=find><parameter=text>\na\n<parameter=most>\n2\n</function>",
            ),
            *([("find", '{"text": "a", "most": 2}')], False),
        ),
        (
            *("qwen3_coder", "<function=find><parameter=most>1</parameter><parameter=te xt>b"),
            *([("find", '{"most": 1, <parameter=te xt>b')], False),
        ),
        # Cut short: the arguments are no JSON, so nobody takes them for complete.
        ("qwen3_coder", "<function=find><parameter=text>a", [("find", '{"text": "a')], False),
    ],
)
def test_unusual_calls(name: str, text: str, read: list[tuple[str, str]], left: bool) -> None:
    whole, calls = parse(text, FORMATS[name], TOOLS)
    assert [(call.name, call.arguments) for call in calls] == read
    assert whole == (text if left else "")


def test_a_broken_call_does_not_hide_the_next() -> None:
    good = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    for bad in (
        '<tool_call>{"name": "x, "arguments": {}}</tool_call>',
        "<tool_call>",
        "</tool_call>",
    ):
        text, calls = parse(f"{bad}\n{good}", FORMATS["hermes"], TOOLS)
        assert text == bad and [call.name for call in calls] == ["stop"]


def test_an_answer_ends_after_its_last_call() -> None:
    call = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    parser = ToolCallParser(FORMATS["hermes"], TOOLS, limit=1)
    assert calls_in(parser.feed(call)) == [("stop", "{}")]
    assert parser.complete and parser.feed("text" + call) == parser.finish() == []
    assert len(parse(call * 10_000, FORMATS["hermes"], TOOLS)[1]) == MAX_CALLS


def test_ids_differ_and_fit_the_template() -> None:
    for name in FORMATS:
        ids = {FORMATS[name].new_id() for _ in range(100)}
        assert len(ids) == 100
    assert len(FORMATS["mistral"].new_id()) == 9 and FORMATS["mistral"].new_id().isalnum()


HOSTILE = [
    ("hermes", '<tool_call>{"a":"'),
    ("hermes", "<tool_cal"),
    ("hermes", " \n"),
    ("llama3_json", '{"id":'),
    ("llama3_json", '{"name":"find","id":"{'),
    ("mistral", '[TOOL_CALLS][{"'),
    ("pythonic", "[find(a='[find(a="),
    ("pythonic", "[find(a=[{'x':1},"),
    ("qwen3_coder", "<function=find><parameter=rest>\n</param"),
]


@pytest.mark.parametrize(("name", "unit"), HOSTILE)
@pytest.mark.parametrize("size", [4, 1 << 30])
def test_time_grows_as_the_text_does(name: str, unit: str, size: int) -> None:
    def seconds(count: int) -> float:
        start = time.process_time()
        streamed(name, unit * count, [size])
        return time.process_time() - start

    # 16 times as long with a square.
    assert min(seconds(1600) for _ in range(2)) < 9 * max(seconds(400), 1e-3)


@pytest.mark.parametrize("opened", ["[", '{"a": '])
def test_arguments_may_be_nested_deeply_or_be_long(opened: str) -> None:
    head = '<tool_call>{"name": "find", "arguments": {"a": '
    _, [call] = parse(head + opened * 20_000, FORMATS["hermes"], TOOLS)
    assert call.arguments == '{"a": ' + opened * 20_000
    _, [call] = parse(f'{head}"{"x" * 1_000_000}"}}}}</tool_call>', FORMATS["hermes"], TOOLS)
    assert len(json.loads(call.arguments)["a"]) == 1_000_000


def test_a_call_for_a_template() -> None:
    call = ToolCall("call_1", "find", '{"text": "a"}')
    function = {"name": "find", "arguments": {"text": "a"}}
    assert call.for_template() == {"id": "call_1", "type": "function", "function": function}
    assert ToolCall("call_1", "find", '{"a": "\\u00e9"}').unescaped == '{"a": "é"}'
    for broken in ("{", "[1]", "[" * 100_000, "9" * 5000):
        assert ToolCall("call_1", "find", broken).unescaped == broken
        kept = ToolCall("call_1", "find", broken).for_template()["function"]["arguments"]
        assert kept == broken
