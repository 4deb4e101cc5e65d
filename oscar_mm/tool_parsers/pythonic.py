"""Pythonic: calls as a Python list, as Llama 3.2 and 4 and LFM2 write them.

[find(text='sign', most=3), find(text="door", exact=True)]
"""

from __future__ import annotations

import ast
import json
import math
import re

from oscar_mm.tool_parsers.parser import CallWriter, ToolFormat
from oscar_mm.tool_parsers.reader import Broken, Reader, Reading, Write
from oscar_mm.tool_parsers.values import Syntax, json_text, read_value

_TAGS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
_NAME = re.compile(r"[\w.-]*")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_LONGEST_NUMBER = 64


class Pythonic(ToolFormat):
    """Calls of tools that are offered, wherever such a list stands."""

    name = "pythonic"
    begins = (*_TAGS, "[")

    @classmethod
    def written_by(cls, template: str) -> bool:
        """Whether the template asks for a list of calls, or writes tags around one."""
        return "[func_name1(" in template or "<|tool_call_start|>" in template

    @classmethod
    def read(cls, reader: Reader, calls: CallWriter) -> Reading[None]:
        """Read a list; each of its calls comes whole."""
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
    text = "".join(pieces).replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\0")
    try:
        write(json_text(ast.literal_eval(f"{quote}{text}{quote}")))
    except (SyntaxError, ValueError):
        raise Broken from None


def _scalar(word: str) -> str:
    if word in _WORDS or word in _WORDS.values():
        return _WORDS.get(word, word)
    try:
        value = ast.literal_eval(word) if len(word) <= _LONGEST_NUMBER else None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise Broken from None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise Broken
    return json.dumps(value)


_PYTHON = Syntax(
    {"[": ("]", "[]"), "(": (")", "[]"), "{": ("}", "{}")}, "'\"", _read_string, _scalar, True
)
