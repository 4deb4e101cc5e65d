"""Llama 3 JSON: calls as bare JSON objects, as written by Llama 3.1 and 3.2.

{"name": "find", "parameters": {"text": "sign"}}; {"name": "find", "parameters": {"text": "door"}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oscar_mm.tool_parsers.call_objects import read_call
from oscar_mm.tool_parsers.definitions import ToolDefinition
from oscar_mm.tool_parsers.grammar import (
    grammar_of,
    json_of,
    literal,
    repeated,
    rules_of_calls,
    schema_of_arguments,
)
from oscar_mm.tool_parsers.parser import CallWriter, ToolFormat
from oscar_mm.tool_parsers.reader import Reader, Reading

_TAG = "<|python_tag|>"


class Llama3Json(ToolFormat):
    """Format with bare JSON objects, of which only those that name an offered tool are calls."""

    name = "llama3_json"
    begins = (_TAG, "{")

    @classmethod
    def written_by(cls, template: str) -> bool:
        """Whether the template asks for a JSON object with parameters."""
        return '{"name": function name, "parameters"' in template

    @classmethod
    def grammar(
        cls, tools: Sequence[ToolDefinition], many: bool, mark_tokens: Mapping[str, int]
    ) -> str:
        """Return a grammar for JSON objects separated by semicolons.

        Calls are ``%json`` rules, not literals: llguidance takes the longest matching literal, so a
        literal that begins with a bracket would hide a JSON answer.
        """
        rules = rules_of_calls(tools, lambda tool, rule: {rule: json_of(_call_schema(tool))})
        return grammar_of(repeated("call", literal("; "), many), rules)

    @classmethod
    def read(cls, reader: Reader, calls: CallWriter) -> Reading[None]:
        """Read an object and the separator after it."""
        yield from reader.literal(_TAG)
        yield from reader.space()
        yield from read_call(reader, calls, bare=True)
        yield from reader.space()
        if (yield from reader.literal(";")):
            yield from reader.space()
            reader.keep()
        else:
            reader.rewind()


def _call_schema(tool: ToolDefinition) -> dict[str, Any]:
    """Return the JSON schema of a call, with definitions moved to its root so that references
    resolve."""
    arguments = schema_of_arguments(tool)
    shared = {key: arguments[key] for key in ("$defs", "definitions") if key in arguments}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": arguments},
        "required": ["name", "parameters"],
        "additionalProperties": False,
        **shared,
    }
