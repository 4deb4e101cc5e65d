"""Mistral: calls after a control token, in a list or one by one.

[TOOL_CALLS] [{"name": "find", "arguments": {"text": "sign"}}]
[TOOL_CALLS]find[ARGS]{"text": "sign"}[TOOL_CALLS]find{"text": "door"}
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence

from oscar_mm.tool_parsers.call_objects import read_arguments, read_call
from oscar_mm.tool_parsers.definitions import ToolDefinition
from oscar_mm.tool_parsers.grammar import (
    arguments_of,
    call_rules,
    choice,
    grammar_of,
    literal,
    mark,
    repeated,
    sequence,
)
from oscar_mm.tool_parsers.parser import CallWriter, ToolFormat
from oscar_mm.tool_parsers.reader import Broken, Reader, Reading

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[^\s\[\]{}]*")
_ALPHABET = string.ascii_letters + string.digits


class Mistral(ToolFormat):
    """Format in which calls follow a control token."""

    name = "mistral"
    begins = (_BEGIN,)
    inner = (_ID, _ARGUMENTS)

    @classmethod
    def written_by(cls, template: str) -> bool:
        """Whether the template writes the control token."""
        return _BEGIN in template

    @classmethod
    def grammar(
        cls, tools: Sequence[ToolDefinition], many: bool, mark_tokens: Mapping[str, int]
    ) -> str:
        """Return a grammar for the control token followed by a list of objects."""
        rules = call_rules(tools, '{"name": "', '", "arguments": ', "}")
        calls = repeated("call", literal(", "), many)
        begin = mark(_BEGIN, mark_tokens)
        return grammar_of(sequence(begin, literal(" ["), calls, literal("]")), rules)

    @classmethod
    def new_id(cls) -> str:
        """Return an id of nine letters or digits; the templates reject other ids."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    @classmethod
    def read(cls, reader: Reader, calls: CallWriter) -> Reading[None]:
        """Read a list of calls, or a single call."""
        while (yield from reader.literal(_BEGIN)):  # Some models repeat the token.
            yield from reader.space()
        listed = yield from reader.literal("[")
        if not listed and (yield from reader.peek()) != "{":
            yield from _read_named(reader, calls)
            return
        more = True
        while more:
            yield from reader.space()
            yield from read_call(reader, calls)
            yield from reader.space()
            more = yield from reader.literal(",")
        if listed:
            yield from reader.literal("]")


class MistralNamed(Mistral):
    """Format of newer models: each call is a control token, the name and the arguments."""

    name = "mistral_named"

    @classmethod
    def written_by(cls, template: str) -> bool:
        """Whether the template writes the control token before arguments."""
        return _BEGIN in template and _ARGUMENTS in template

    @classmethod
    def grammar(
        cls, tools: Sequence[ToolDefinition], many: bool, mark_tokens: Mapping[str, int]
    ) -> str:
        """Return a grammar for consecutive calls."""
        rules: dict[str, str] = {}
        begin, middle = mark(_BEGIN, mark_tokens), mark(_ARGUMENTS, mark_tokens)
        for place, tool in enumerate(tools):
            rules[f"call_{place}"] = sequence(
                begin, literal(tool.name), middle, f"arguments_{place}"
            )
            rules[f"arguments_{place}"] = arguments_of(tool)
        calls = choice(name for name in rules if name.startswith("call_"))
        return grammar_of(repeated("call", "", many), {"call": calls, **rules})


def _read_named(reader: Reader, calls: CallWriter) -> Reading[None]:
    name = yield from reader.word(_NAME)
    if (yield from reader.literal(_ID)):
        yield from reader.word(_NAME)
    yield from reader.literal(_ARGUMENTS)
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        raise Broken
    calls.begin(name)
    yield from read_arguments(reader, calls)
    calls.end()
