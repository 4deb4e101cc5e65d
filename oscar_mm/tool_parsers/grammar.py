"""Rules in llguidance's Lark syntax, from which tool formats build grammars for calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from oscar_mm.errors import InputError
from oscar_mm.tool_parsers.definitions import ToolDefinition
from oscar_mm.tool_parsers.schema import without_unknown_formats

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Options for JSON with fixed spacing, so that a model cannot write white space endlessly."""


def literal(text: str) -> str:
    """Return a rule that matches a string."""
    return json.dumps(text)


def mark(text: str, mark_tokens: Mapping[str, int]) -> str:
    """Return a rule that matches a marker: by token id if it is a single token, otherwise by
    text."""
    return f"<[{mark_tokens[text]}]>" if text in mark_tokens else literal(text)


def sequence(*parts: str) -> str:
    """Return a rule that matches the parts one after the other."""
    return " ".join(part for part in parts if part)


def choice(names: Iterable[str]) -> str:
    """Return a rule that matches any one of the given rules."""
    return " | ".join(names)


def rules_of_calls(
    tools: Sequence[ToolDefinition], rules_of: Callable[[ToolDefinition, str], dict[str, str]]
) -> dict[str, str]:
    """Return the rule ``call``, which matches a call to any tool, and the rules that it needs.

    Args:
        tools: tools that may be called.
        rules_of: function from a tool and a name to rules, one of which has this name.
    """
    rules: dict[str, str] = {}
    for place, tool in enumerate(tools):
        rules |= rules_of(tool, f"call_{place}")
    return {"call": choice(f"call_{place}" for place in range(len(tools))), **rules}


def json_of(schema: Mapping[str, Any]) -> str:
    """Return a rule that matches JSON text valid under a schema."""
    served = without_unknown_formats(schema)
    return f"%json {json.dumps({**served, 'x-guidance': _SPACING})}"


def schema_of_arguments(tool: ToolDefinition) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments; for a tool without parameters, it allows only
    an empty object."""
    schema = dict(tool.parameters)
    if schema == {"type": "object", "properties": {}}:
        schema["additionalProperties"] = False
    return schema


def arguments_of(tool: ToolDefinition) -> str:
    """Return the grammar rule for a tool's arguments as JSON."""
    return json_of(schema_of_arguments(tool))


def grammar_of(start: str, rules: Mapping[str, str]) -> str:
    """Return a grammar with a start rule and other rules by name."""
    return "".join(f"{name}: {rule}\n" for name, rule in {"start": start, **rules}.items())


def calls_or(text: str, calls: str) -> str:
    """Return a grammar for answers that are either calls or text.

    Args:
        text: rule for the text.
        calls: grammar for calls, see ``grammar_of``.
    """
    return f"start: calls | text\ntext: {text}\n{calls.replace('start:', 'calls:', 1)}"


def call_rules(
    tools: Iterable[ToolDefinition], before: str, between: str, after: str
) -> dict[str, str]:
    """Return a rule ``call`` for any of the tools, and the rules that it needs for each tool.

    A call is written as ``before``, name, ``between``, arguments, ``after``.
    """
    rules: dict[str, str] = {}
    for place, tool in enumerate(tools):
        head = literal(before + tool.name + between)
        rules[f"call_{place}"] = sequence(head, f"arguments_{place}", literal(after))
        rules[f"arguments_{place}"] = arguments_of(tool)
    calls = [name for name in rules if name.startswith("call_")]
    return {"call": choice(calls), **rules}


def repeated(rule: str, between: str, many: bool) -> str:
    """Return a rule that matches ``rule`` once or, if ``many``, repeatedly, separated by
    ``between``."""
    return f"{rule} ({sequence(between, rule)})*" if many else rule


def parameters_of(tool: ToolDefinition) -> list[tuple[str, dict[str, Any], bool]]:
    """Return a tool's parameters as (name, schema, whether it is required), required ones first.

    Raises:
        InputError: if the schema does not list the parameters.
    """
    properties = tool.parameters.get("properties")
    if not isinstance(properties, Mapping):
        raise InputError(
            f"tool_choice: {tool.name} cannot be required, because its schema lists no properties; "
            "add properties to its parameters"
        )
    shared = {
        key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters
    }
    given = tool.parameters.get("required")
    required = set(given) if isinstance(given, list) else set()
    schemas = [
        (key, {**schema, **shared} if isinstance(schema, Mapping) else shared, key in required)
        for key, schema in properties.items()
    ]
    return sorted(schemas, key=lambda one: not one[2])
