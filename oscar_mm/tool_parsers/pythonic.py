"""Pythonic: calls in a Python list, as written by Llama 3.2, Llama 4 and LFM2.

[find(text='sign', most=3), find(text="door", exact=True)]
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from oscar_mm.tool_parsers.definitions import ToolDefinition
from oscar_mm.tool_parsers.grammar import (
    grammar_of,
    json_of,
    literal,
    parameters_of,
    repeated,
    rules_of_calls,
    sequence,
)
from oscar_mm.tool_parsers.parser import CallWriter, ToolFormat
from oscar_mm.tool_parsers.reader import Broken, Reader, Reading, Write
from oscar_mm.tool_parsers.values import Syntax, json_text, read_value

_TAGS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
_NAME = re.compile(r"[\w.-]*")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_ESCAPE = re.compile(
    r"\\(?:(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3})|(.))", re.DOTALL
)
_ESCAPED = dict(zip("\\'\"/abfnrtv\n", [*"\\'\"/\a\b\f\n\r\t\v", ""], strict=True))
"""Meaning of characters after a backslash, in Python or in JSON."""
_WORDS = {"True": "true", "False": "false", "None": "null"}
_LONGEST_NUMBER = 64


class Pythonic(ToolFormat):
    """Format with calls in a Python list; a list without tags must name offered tools."""

    name = "pythonic"
    begins = (*_TAGS, "[")
    inner = tuple(_TAGS.values())

    @classmethod
    def written_by(cls, template: str) -> bool:
        """Whether the template asks for a list of calls, or writes tags around such a list."""
        return "[func_name1(" in template or "<|tool_call_start|>" in template

    @classmethod
    def grammar(
        cls, tools: Sequence[ToolDefinition], many: bool, mark_tokens: Mapping[str, int]
    ) -> str:
        """Return a grammar for a list of calls with JSON values."""
        listed = sequence(literal("["), repeated("call", literal(", "), many), literal("]"))
        return grammar_of(listed, rules_of_calls(tools, _rules_of))

    @classmethod
    def read(cls, reader: Reader, calls: CallWriter) -> Reading[None]:
        """Read a list of calls; each call is written once it is complete."""
        closing = ""
        for tag, end in _TAGS.items():
            if (yield from reader.literal(tag)):
                closing = end
        yield from reader.space()
        if not (yield from reader.literal("[")):
            raise Broken
        more = True
        while more:
            yield from reader.space()
            yield from _read_call(reader, calls, known=not closing)
            yield from reader.space()
            more = yield from reader.literal(",")
        if not (yield from reader.literal("]")):
            raise Broken
        reader.keep()
        if closing:
            yield from reader.space()
            yield from reader.literal(closing)


def _rules_of(tool: ToolDefinition, call: str) -> dict[str, str]:
    """Return the grammar rules for a call to a tool.

    The rule ``CALL_pN`` matches parameter N and all later parameters; optional parameters may be
    missing.
    """
    parameters, rules = parameters_of(tool), dict[str, str]()
    first = f"{call}_p0" if parameters else ""
    needed = bool(parameters) and parameters[0][2]
    optional = first if needed or not first else f"{first}?"
    rules[call] = sequence(literal(f"{tool.name}("), optional, literal(")"))
    for place, (key, schema, _) in enumerate(parameters):
        name, after = f"{call}_p{place}", f"{call}_p{place + 1}"
        rules[f"{name}_value"] = json_of(schema)
        one = sequence(literal(f"{key}="), f"{name}_value")
        if place + 1 == len(parameters):
            rules[name] = one
        elif parameters[place + 1][2]:
            rules[name] = sequence(one, literal(", "), after)
        else:
            rest = sequence(one, f"({sequence(literal(', '), after)})?")
            rules[name] = rest if parameters[place][2] else f"{rest} | {after}"
    return rules


def _read_call(reader: Reader, calls: CallWriter, known: bool) -> Reading[None]:
    name = yield from reader.word(_NAME)
    if not (yield from reader.literal("(")) or (known and name not in calls.tools):
        raise Broken
    pieces: list[str] = []
    yield from reader.space()
    more = (yield from reader.peek()) != ")"
    while more:
        yield from reader.space()
        key = yield from reader.word(_NAME)
        yield from reader.space()
        if not key or not (yield from reader.literal("=")):
            raise Broken
        pieces.append(f"{', ' if pieces else ''}{json_text(key)}: ")
        yield from read_value(reader, pieces.append, _PYTHON)
        yield from reader.space()
        more = yield from reader.literal(",")
    if not (yield from reader.literal(")")):
        raise Broken
    calls.begin(name)
    calls.write("".join(["{", *pieces, "}"]))
    calls.end()


def _read_string(reader: Reader, write: Write) -> Reading[None]:
    quote = reader.take(1)
    pieces: list[str] = []
    while True:
        yield from reader.run(_PLAIN[quote], pieces.append)
        if (yield from reader.peek()) != "\\":
            break
        yield from reader.peek(2)
        pieces.append(reader.take(2))
    if not (yield from reader.literal(quote)):
        raise Broken
    write(json_text(_ESCAPE.sub(_unescaped, "".join(pieces))))


def _unescaped(match: re.Match[str]) -> str:
    code, other = match[1], match[2]
    if code is None:
        return _ESCAPED.get(other, match[0])
    point = int(code, 8) if code[0] in "01234567" else int(code[1:], 16)
    return chr(point) if point <= sys.maxunicode else match[0]


def _scalar(word: str) -> str:
    if word in _WORDS or word in _WORDS.values():
        return _WORDS.get(word, word)
    value = _number(word) if len(word) <= _LONGEST_NUMBER else math.nan
    if not math.isfinite(value):
        raise Broken
    return json.dumps(value)


def _number(word: str) -> int | float:
    """Parse a number in Python's syntax; return NaN for any other text."""
    for kind in (partial(int, base=0), float):
        with suppress(ValueError):
            return kind(word)
    return math.nan


_PYTHON = Syntax(
    {"[": ("]", "[]"), "(": (")", "[]"), "{": ("}", "{}")}, "'\"", _read_string, _scalar, True
)
