"""Tool definitions: validate the functions that a request offers to the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oscar_mm.errors import InputError, shown
from oscar_mm.tool_parsers.values import texts_of

MAX_TOOLS = 1024
"""Maximum number of tools per request."""
MAX_DEPTH = 64
"""Maximum nesting depth of a parameter schema."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True)
class ToolDefinition:
    """A function that the model may call.

    Attributes:
        name: name of the function: letters, digits and ``_.:/-``.
        description: description for the model.
        parameters: JSON schema of the parameters.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]

    def for_template(self) -> dict[str, Any]:
        """Return the definition in the format that chat templates take."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}

    @property
    def characters(self) -> int:
        """Approximate number of characters that the definition takes in a prompt; a template may
        use other punctuation."""
        return len(json.dumps(self.for_template(), ensure_ascii=False))

    def texts(self) -> Iterator[str]:
        """Yield all strings that a chat template may write."""
        yield from (self.name, self.description)
        yield from texts_of(self.parameters)


def read_definitions(tools: Sequence[Any]) -> tuple[ToolDefinition, ...]:
    """Validate tools given in OpenAI's format or as Python functions.

    Args:
        tools: list of tools. Each is ``{"type": "function", "function": {"name": ...,
            "description": ..., "parameters": {...}}}``, only the inner object, or a Python function
            with type hints and a docstring for transformers' ``get_json_schema``.

    Raises:
        InputError: if a tool is invalid; the message names the tool, the error and the remedy.
    """
    if not isinstance(tools, list | tuple):
        raise InputError(f"tools={shown(tools)}: must be a list")
    if len(tools) > MAX_TOOLS:
        raise InputError(
            f"tools: has {len(tools):,} entries, but at most {MAX_TOOLS:,} are allowed"
        )
    read = tuple(_definition(tool, f"tools[{place}]") for place, tool in enumerate(tools))
    names: set[str] = set()
    for place, one in enumerate(read):
        if one.name in names:
            raise InputError(
                f"tools[{place}]: an earlier tool is also named {one.name!r}; rename one of them"
            )
        names.add(one.name)
    return read


def _definition(tool: Any, label: str) -> ToolDefinition:
    if callable(tool):
        tool = _schema_of(tool, label)
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise InputError(f'{label}: must be {{"type": "function", "function": {{...}}}}')
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            f"{label}: the name {shown(name)} must have 1 to 128 characters: letters, digits and "
            "any of _.:/-"
        )
    if description is not None and not isinstance(description, str):
        raise InputError(f"{label}: the description must be a string")
    return ToolDefinition(name, description or "", _parameters(function.get("parameters"), label))


def _parameters(parameters: Any, label: str) -> dict[str, Any]:
    if parameters is None or parameters == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise InputError(f"{label}: parameters must be a JSON schema (an object)")
    if parameters.get("type", "object") != "object":
        raise InputError(f'{label}: the schema of parameters must have "type": "object"')
    for value, depth in _nodes(parameters):
        if depth > MAX_DEPTH:
            raise InputError(
                f"{label}: parameters are nested more than {MAX_DEPTH} levels deep; simplify them"
            )
        if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
            raise InputError(f"{label}: keys of parameters must be strings")
        if not isinstance(value, Mapping | list | tuple | str | int | float | None):
            raise InputError(f"{label}: parameters contain {shown(value)}, which is not JSON")
    return {"type": "object", **parameters}


def _schema_of(function: Any, label: str) -> Any:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # The docstring or the type hints can cause any error.
        raise InputError(f"{label}: cannot be converted to a JSON schema: {error}") from error


def _nodes(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield a value and all values nested in it, with their depths, up to the maximum depth."""
    open_nodes = [(value, 0)]
    while open_nodes:
        node, depth = open_nodes.pop()
        yield node, depth
        if depth <= MAX_DEPTH:
            inner = node.values() if isinstance(node, Mapping) else node
            if isinstance(node, Mapping | list | tuple):
                open_nodes += ((one, depth + 1) for one in inner)
