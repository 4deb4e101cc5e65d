"""Tool calls: complete, in pieces as they are streamed, and as a chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from oscar_mm.tool_parsers.values import json_text


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the model asks for.

    Attributes:
        id: names the call; the tool's result refers to it.
        name: of the tool; one that the client has not offered is possible.
        arguments: JSON text of an object. Where the model wrote no valid JSON, or was cut short,
            what it wrote.
    """

    id: str
    name: str
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """The call as a chat template takes it: arguments are an object where they are valid."""
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
        """The arguments as a chat template may write them: with characters for their escapes."""
        arguments = self.for_template()["function"]["arguments"]
        return arguments if isinstance(arguments, str) else json_text(arguments)


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a tool call.

    Attributes:
        index: of the call in the answer, from 0.
        arguments: the next characters of its arguments.
        id, name: of the call, in its first piece only.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Tools = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters of each tool, by the tool's name."""


def joined_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls whose pieces these are."""
    heads: list[tuple[str, str]] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            heads.append((delta.id, delta.name))
            arguments.append([])
        arguments[delta.index].append(delta.arguments)
    pairs = zip(heads, arguments, strict=True)
    return tuple(ToolCall(*head, "".join(pieces)) for head, pieces in pairs)
