"""Tool calls: complete, as streamed pieces, and in the format for chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from oscar_mm.tool_parsers.values import json_text


@dataclass(frozen=True)
class ToolCall:
    """A tool call requested by the model.

    Attributes:
        id: id of the call, which the tool's result refers to.
        name: name of the tool, possibly one that was not offered.
        arguments: JSON text of an object, or, if the model wrote invalid JSON or was cut off, the
            text that it wrote.
    """

    id: str
    name: str
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """Return the call in the format for chat templates; valid arguments become an object."""
        arguments: Any = self.arguments
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            arguments = parsed
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}

    @property
    def unescaped(self) -> str:
        """Return the arguments with escapes decoded, as a chat template may write them."""
        arguments = self.for_template()["function"]["arguments"]
        return arguments if isinstance(arguments, str) else json_text(arguments)


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a tool call.

    Attributes:
        index: index of the call in the answer, from 0.
        arguments: next characters of the call's arguments.
        id, name: id and name of the call, only in its first piece.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Tools = Mapping[str, Mapping[str, Any]]
"""JSON schema of each tool's parameters, by tool name."""


def joined_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Assemble streamed pieces into complete calls."""
    heads: list[tuple[str, str]] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            heads.append((delta.id, delta.name))
            arguments.append([])
        arguments[delta.index].append(delta.arguments)
    pairs = zip(heads, arguments, strict=True)
    return tuple(ToolCall(*head, "".join(pieces)) for head, pieces in pairs)
