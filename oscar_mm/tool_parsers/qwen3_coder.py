"""Qwen3 Coder: calls and their parameters in tags, with unquoted values.

<tool_call>
<function=find>
<parameter=text>
sign
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from oscar_mm.tool_parsers.definitions import ToolDefinition
from oscar_mm.tool_parsers.grammar import (
    choice,
    grammar_of,
    json_of,
    literal,
    mark,
    parameters_of,
    repeated,
    rules_of_calls,
    sequence,
)
from oscar_mm.tool_parsers.parser import CallWriter, ToolFormat
from oscar_mm.tool_parsers.reader import Broken, Reader, Reading
from oscar_mm.tool_parsers.values import json_text, normalized

_BEGIN, _FUNCTION, _PARAMETER = "<tool_call>", "<function=", "<parameter="
_ENDS = ("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>")
"""Strings that end a value; models sometimes forget a closing tag."""
_NAME = re.compile(r"[^<>\s]*")
_TYPES = {"[": "array", "{": "object", '"': "string", "n": "null", "t": "boolean", "f": "boolean"}
"""Type of a JSON value by its first character; "number" for all other characters."""
_KNOWN = {*_TYPES.values(), "number", "integer"}


class Qwen3Coder(ToolFormat):
    """Format with calls and their parameters in tags."""

    name = "qwen3_coder"
    begins = (_BEGIN, _FUNCTION)
    end = "</tool_call>"

    @classmethod
    def written_by(cls, template: str) -> bool:
        """Whether the template writes functions in tags."""
        return _FUNCTION in template and _PARAMETER in template

    @classmethod
    def grammar(
        cls, tools: Sequence[ToolDefinition], many: bool, mark_tokens: Mapping[str, int]
    ) -> str:
        """Return a grammar for blocks of one call each, with the parameters in schema order."""
        begin, end = mark(_BEGIN, mark_tokens), mark(cls.end, mark_tokens)
        block = sequence(begin, literal("\n"), "call", literal("\n"), end)
        start = repeated("block", literal("\n"), many)
        return grammar_of(start, {"block": block, **rules_of_calls(tools, _rules_of)})

    @classmethod
    def read(cls, reader: Reader, calls: CallWriter) -> Reading[None]:
        """Read all functions between two tags, or a function without such tags."""
        yield from reader.literal(_BEGIN)
        yield from reader.space()
        if not (yield from reader.literal(_FUNCTION)):
            raise Broken
        more = True
        while more:
            yield from _read_function(reader, calls)
            yield from reader.space()
            more = yield from reader.literal(_FUNCTION)
        yield from reader.literal(cls.end)
        reader.keep()


def _rules_of(tool: ToolDefinition, call: str) -> dict[str, str]:
    """Return the grammar rules for a call and its parameters."""
    rules = {call: literal(f"{_FUNCTION}{tool.name}>\n")}
    for place, (key, schema, required) in enumerate(parameters_of(tool)):
        name = f"{call}_p{place}"
        rules[call] += f" {name}" if required else f" {name}?"
        head, tail = literal(f"{_PARAMETER}{key}>\n"), literal("\n</parameter>\n")
        options = schema.get("enum")
        if _types(schema) <= {"string"} and isinstance(options, list) and options:
            values = choice(literal(str(option)) for option in options)
            rules[name] = sequence(head, f"({values})", tail)
        elif _types(schema) <= {"string"}:
            rules[name] = sequence(head, f"{name}_value", literal("\n"))
            rules[f'{name}_value[suffix="</parameter>"]'] = "/(?s:.*)/"
        else:
            rules[name] = sequence(head, f"{name}_value", tail)
            rules[f"{name}_value"] = json_of(schema)
    rules[call] += " " + literal("</function>")
    return rules


def _read_function(reader: Reader, calls: CallWriter) -> Reading[None]:
    name = yield from reader.word(_NAME)
    if not (yield from reader.literal(">")):
        raise Broken
    calls.begin(name)
    properties = calls.tools.get(name, {}).get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    before = "{"
    while True:
        yield from reader.space()
        if not (yield from reader.literal(_PARAMETER)):
            break
        key = yield from reader.word(_NAME)
        if not (yield from reader.literal(">")):
            calls.write(before + _PARAMETER + key)
            raise Broken
        calls.write(f"{before}{json_text(key)}: ")
        yield from _read_parameter(reader, calls, _types(schemas.get(key)))
        before = ", "
    calls.write("{}" if before == "{" else "}")
    calls.end()
    yield from reader.literal("</function>")


def _read_parameter(reader: Reader, calls: CallWriter, types: frozenset[str]) -> Reading[None]:
    """Read a value; a string is written as it arrives, any other value once it is complete."""
    yield from reader.literal("\n")
    pieces: list[str] = []
    if types <= {"string"}:
        calls.write('"')
        end = yield from reader.until(_ENDS, lambda text: calls.write(json_text(text)[1:-1]))
        if not end:
            raise Broken
        calls.write('"')
    else:
        end = yield from reader.until(_ENDS, pieces.append)
        text = "".join(pieces)
        if not end:
            calls.write(text)
            raise Broken
        calls.write(_value(text, types))
    if end.endswith("</parameter>"):
        reader.take(len(end))


def _value(text: str, types: frozenset[str]) -> str:
    """Convert an unquoted value to JSON of one of the given types; otherwise to a string."""
    bare = text.strip()
    if bare in ("True", "False", "None"):
        bare = {"True": "true", "False": "false", "None": "null"}[bare]
    value = normalized(bare)
    if value is None:
        return json_text(text)
    kind = _TYPES.get(value[0], "number")
    number = kind == "number" and "integer" in types
    fits = kind in types or number or "any" in types
    return value if fits and kind != "string" else json_text(text)


def _types(schema: Any) -> frozenset[str]:
    """Return the types that the first two levels of a schema mention; empty if there are none."""
    if not isinstance(schema, Mapping):
        return frozenset()
    found = set(_own_types(schema))
    for many in ("anyOf", "oneOf", "allOf"):
        options = schema.get(many)
        for option in options if isinstance(options, list) else ():
            found.update(_own_types(option) if isinstance(option, Mapping) else ())
    return frozenset(found)


def _own_types(schema: Mapping[str, Any]) -> list[str]:
    kind = schema.get("type", "any" if "$ref" in schema else None)
    kinds = kind if isinstance(kind, list) else [kind]
    return [one if one in _KNOWN else "any" for one in kinds if isinstance(one, str)]
