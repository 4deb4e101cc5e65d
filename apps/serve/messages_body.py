"""Requests of Anthropic's Messages API, converted to chat-completions requests.

This module converts the fields, and ``protocol`` checks the values, as for the Responses API.
Fields that are unknown or do not change the answer are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from oscar_mm.apps.serve.protocol import MAX_MESSAGES, FieldError
from oscar_mm.apps.serve.refusals import Refusal

PATH = "/v1/messages"
COUNT_TOKENS = f"{PATH}/count_tokens"
_MESSAGE = re.compile(r"\bmessages\[(\d+)\](\.content)?(?:\[(\d+)\])?")
"""Pattern of the names of messages in errors of the chat-completions API."""
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Anthropic's names for fields that have other names in the chat-completions API."""
_FIELD = re.compile(rf"^(?:{'|'.join(_NAMES)})\b")
_REFUSED = ("container", "mcp_servers", "context_management")
SAME = ("model", "stream", "temperature", "top_p", "top_k", "cache_salt")
"""Fields that have the same meaning in both APIs."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's error type by HTTP status; any other status is "invalid_request_error" below 500 and
"api_error" from 500 on."""
_THOUGHTS = ("thinking", "redacted_thinking")


class _Model(BaseModel):
    model_config = ConfigDict(strict=True)


class GivenMessage(_Model):
    """A message in a request; its blocks are checked when they are converted."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[dict[str, Any]], BeforeValidator(lambda given: _as_blocks(given))]


class GivenTool(_Model):
    """A tool that the client defines."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(_Model):
    """Choice of the tools that the model may or must call."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Model):
    """Options of the reasoning: whether the model reasons, and for how many tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class OutputFormat(_Model):
    """A JSON schema for the answer's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Model):
    """Format and effort of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(_Model):
    """Metadata of a request."""

    user_id: str | None = None


class Place(NamedTuple):
    """Origin of a converted message: a part of the client's request.

    Attributes:
        name: name of that part, such as ``messages[1]``.
        first: index of the message's first block within the part.
    """

    name: str
    first: int = 0


class MessagesBody(_Model):
    """JSON body of a request."""

    model_config = ConfigDict(strict=True, extra="allow")

    messages: Annotated[list[GivenMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    system: Annotated[
        list[dict[str, Any]] | None, BeforeValidator(lambda given: _as_blocks(given))
    ] = None
    stop_sequences: list[str] | None = None
    tools: list[GivenTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None

    def chat_body(self) -> tuple[dict[str, Any], list[Place]]:
        """Convert the request to a chat-completions body.

        Returns:
            the fields of the body, and the origin of each message.

        Raises:
            FieldError: if a block, a tool or a field is not supported.
        """
        extra = self.model_extra or {}
        for name in _REFUSED:
            if extra.get(name) is not None:
                raise FieldError("is not supported: leave it out", name)
        body = {name: extra[name] for name in SAME if extra.get(name) is not None}
        turned = list(self._messages())
        body["messages"] = [message for message, _ in turned]
        if body["messages"][-1]["role"] == "assistant":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if self.metadata is not None:
            body["user"] = self.metadata.user_id
        if self.stop_sequences:
            body["stop"] = self.stop_sequences
        return body | self._tool_fields() | self._answer_fields(), [place for _, place in turned]

    def _messages(self) -> Iterator[tuple[dict[str, Any], Place]]:
        if self.system:
            parts = [_part(block, f"system[{at}]") for at, block in enumerate(self.system)]
            yield {"role": "system", "content": parts}, Place("system")
        for index, message in enumerate(self.messages):
            turn = _assistant if message.role == "assistant" else _others
            yield from turn(message, f"messages[{index}]")

    def _tool_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.tools:
            fields["tools"] = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(self.tools)]
        if (choice := self.tool_choice) is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            fields["tool_choice"] = _CHOICES.get(choice.type, named)
            if choice.disable_parallel_tool_use:
                fields["parallel_tool_calls"] = False
        return fields

    def _answer_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if (thinking := self.thinking) is not None and thinking.type == "disabled":
            fields["chat_template_kwargs"] = {"enable_thinking": False}
        elif thinking is not None and thinking.budget_tokens is not None:
            fields["thinking_token_budget"] = thinking.budget_tokens
        if (wanted := self.output_config) is not None and wanted.format is not None:
            schema = {"name": "answer", "schema": wanted.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if wanted is not None and wanted.effort is not None:
            fields["reasoning_effort"] = wanted.effort
        return fields


def renamed(refusal: Refusal, places: Sequence[Place]) -> Refusal:
    """Rename the messages and fields in a refusal to Anthropic's names.

    Args:
        refusal: refusal with the names of the chat-completions API; modified in place.
        places: origin of each message.
    """

    def name(found: re.Match[str]) -> str:
        if int(found[1]) >= len(places):
            return found[0]
        place, content, part = places[int(found[1])], found[2] or "", found[3]
        content = "" if place.name == "system" else content
        return place.name + content + ("" if part is None else f"[{place.first + int(part)}]")

    def renamed_in(text: str) -> str:
        return _FIELD.sub(lambda found: _NAMES[found[0]], _MESSAGE.sub(name, text))

    refusal.args = (renamed_in(str(refusal)),)
    return refusal


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error response in Anthropic's format."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _as_blocks(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


def _assistant(message: GivenMessage, name: str) -> Iterator[tuple[dict[str, Any], Place]]:
    """Convert an earlier answer, dropping its reasoning as chat templates would."""
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        if block.get("type") == "tool_use":
            calls.append(_call(block, f"{name}.content[{index}]"))
        elif block.get("type") not in _THOUGHTS:
            parts.append(_part(block, f"{name}.content[{index}]"))
    turned: dict[str, Any] = {"role": "assistant", "content": parts}
    yield turned | ({"tool_calls": calls} if calls else {}), Place(name)


def _others(message: GivenMessage, name: str) -> Iterator[tuple[dict[str, Any], Place]]:
    """Convert a user or system message; each tool result becomes a separate message."""
    parts: list[dict[str, Any]] = []
    first = 0
    for index, block in enumerate(message.content):
        label = f"{name}.content[{index}]"
        if block.get("type") != "tool_result":
            parts.append(_part(block, label))
            continue
        if parts:
            yield {"role": message.role, "content": parts}, Place(name, first)
        parts, first = [], index + 1
        yield _result(block, label), Place(label)
    if parts or not message.content:
        yield {"role": message.role, "content": parts}, Place(name, first)


def _part(block: Mapping[str, Any], name: str) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": block.get("text")}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": _address(block.get("source"), name)}}
    known = "text, image, tool_use, tool_result or thinking"
    raise FieldError(f"blocks of type {kind!r} are not supported: use {known}", name)


def _address(source: Any, name: str) -> Any:
    source = source if isinstance(source, Mapping) else {}
    if source.get("type") == "url":
        return source.get("url")
    data, kind = source.get("data"), source.get("media_type")
    if source.get("type") != "base64" or not isinstance(data, str) or not isinstance(kind, str):
        raise FieldError(
            'source must be {"type": "base64", "media_type": ..., "data": ...} or '
            '{"type": "url", "url": ...}',
            name,
        )
    return f"data:{kind};base64,{data}"


def _call(block: Mapping[str, Any], name: str) -> dict[str, Any]:
    key, tool, given = block.get("id"), block.get("name"), block.get("input")
    if not (isinstance(key, str) and isinstance(tool, str) and isinstance(given, Mapping)):
        raise FieldError("id and name must be strings, and input must be an object", name)
    function = {"name": tool, "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": key, "type": "function", "function": function}


def _result(block: Mapping[str, Any], name: str) -> dict[str, Any]:
    content = _as_blocks(block.get("content") or [])
    if not isinstance(content, list) or not all(isinstance(one, Mapping) for one in content):
        raise FieldError("content must be a string or a list of blocks", name)
    parts = [_part(one, f"{name}.content[{at}]") for at, one in enumerate(content)]
    answers = block.get("tool_use_id")
    return {"role": "tool", "tool_call_id": answers, "content": parts}


def _tool(tool: GivenTool, name: str) -> dict[str, Any]:
    if tool.type not in (None, "custom") or tool.input_schema is None:
        raise FieldError("only tools with an input_schema are supported: leave this tool out", name)
    function = {"name": tool.name, "parameters": tool.input_schema}
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": function | described}
