"""Tools: request fields for tools, and tool calls in answers, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from oscar_mm.errors import ToolsUnsupported
from oscar_mm.tool_parsers.calls import ToolCall, ToolCallDelta

if TYPE_CHECKING:
    from oscar_mm.chat.conversation import ChatEngine
    from oscar_mm.tool_parsers.offer import ToolOffer


class ToolFields(BaseModel):
    """Request fields that describe the tools and restrict their use."""

    model_config = ConfigDict(strict=True)

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


def offer_of(
    pipe: ChatEngine,
    tools: Sequence[dict[str, Any]] | None,
    choice: Any,
    *,
    parallel: bool = True,
    ignore_tools: bool,
) -> ToolOffer | None:
    """Return the tools of a request as an offer; None if no tool may be called.

    Args:
        pipe: pipeline that answers.
        tools, choice, parallel: see ``Pipeline.offer``.
        ignore_tools: see ``ServerLimits``; tools are then left out if the chat template does not
            support them.

    Raises:
        InputError: see ``Pipeline.offer``.
    """
    try:
        return pipe.offer(tools, choice, parallel=parallel)
    except ToolsUnsupported:
        # An answer without the call that a client requires would be wrong.
        if ignore_tools and choice in (None, "auto"):
            return None
        raise


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
