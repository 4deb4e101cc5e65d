"""Tools: request fields for tools, and tool calls in answers, in OpenAI's format."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from oscar_mm.tool_parsers.calls import ToolCall, ToolCallDelta


class ToolFields(BaseModel):
    """Request fields that describe the tools and restrict their use."""

    model_config = ConfigDict(strict=True)

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


def call_body(call: ToolCall) -> dict[str, Any]:
    """Return the JSON object of a tool call in a complete answer."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def delta_body(delta: ToolCallDelta) -> dict[str, Any]:
    """Return the JSON object of a streamed piece of a tool call."""
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}
