"""Requests of OpenAI's Responses API, converted to chat-completions requests.

This module converts the fields; ``protocol`` checks the values for both APIs. As in ``protocol``,
fields that are unknown or do not change the answer are ignored; other unsupported fields are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from oscar_mm.apps.serve.protocol import MAX_MESSAGES, FieldError, refuse_unsupported
from oscar_mm.apps.serve.refusals import Refusal

MAX_ID_CHARACTERS = 128
_MESSAGE = re.compile(r"\bmessages(?:\[(\d+)\]((?:\.content)?))?")
"""Pattern of the names of messages in errors of the chat-completions API."""
_LOGPROBS = "message.output_text.logprobs"
"""Value of ``include`` that requests log-probabilities; the others are for unsupported tools."""
_PART_TYPES = ("input_text", "output_text", "text")
_REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled", "auto"),
}
"""Unsupported fields, and the values (besides null) that do not change the answer."""
SAME = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "cache_salt"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "parallel_tool_calls"),
    *("chat_template_kwargs", "structured_outputs", "thinking_token_budget"),
    *("mm_processor_kwargs", "media_io_kwargs", "user", "safety_identifier"),
)
"""Fields that have the same meaning in both APIs."""


class TextFormat(BaseModel):
    """Format of the answer's text."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(BaseModel):
    """Options of the answer's text."""

    model_config = ConfigDict(strict=True)

    format: TextFormat | None = None


class ReasoningOptions(BaseModel):
    """Options of the answer's reasoning."""

    model_config = ConfigDict(strict=True)

    effort: str | None = None


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ResponsesBody(BaseModel):
    """JSON body of a request; each ``input`` item is checked when it is converted to a message."""

    model_config = ConfigDict(strict=True, extra="allow")

    input: Annotated[
        Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)],
        BeforeValidator(_as_items),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    previous_response_id: Annotated[str, Field(max_length=MAX_ID_CHARACTERS)] | None = None
    store: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the response includes the log-probabilities of its text."""
        return _LOGPROBS in (self.include or ())

    def chat_body(self, past: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Convert the request to a chat-completions body.

        Args:
            past: messages up to and including the response that this request continues, without
                instructions.

        Raises:
            FieldError: if an item, a tool or a field is not supported.
        """
        extra = self.model_extra or {}
        refuse_unsupported(extra, _REFUSED)
        body = {name: extra[name] for name in SAME if extra.get(name) is not None}
        instructions = self.instructions
        system = [{"role": "system", "content": instructions}] if instructions else []
        body["messages"] = [*system, *past, *messages_of(self.input)[0]]
        if self.max_output_tokens is not None:
            body["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            body["tools"] = [
                function_tool(tool, f"tools[{at}]") for at, tool in enumerate(self.tools)
            ]
        if self.tool_choice is not None:
            body["tool_choice"] = named_choice(self.tool_choice)
        if self.reasoning is not None and self.reasoning.effort is not None:
            body["reasoning_effort"] = self.reasoning.effort
        if self.has_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if (wanted := self.text and self.text.format) is not None:
            body["response_format"] = _response_format(wanted)
        return body

    def places(self, past: int) -> list[str]:
        """Return the Responses API's name for each message of ``chat_body``.

        Args:
            past: number of messages up to and including the response that this request continues.
        """
        first = ["instructions"] if self.instructions else []
        names = [f"input[{index}]" for index in messages_of(self.input)[1]]
        return [*first, *["previous_response_id"] * past, *names]


def renamed(refusal: Refusal, places: Sequence[str]) -> Refusal:
    """Return a refusal with the message and field names of the Responses API.

    Args:
        refusal: refusal with the names of the chat-completions API.
        places: the Responses API's name for each message.
    """

    def name(found: re.Match[str]) -> str:
        place = places[int(found[1])] if found[1] and int(found[1]) < len(places) else "input"
        return place + (found[2] or "" if place.startswith("input[") else "")

    def renamed_in(text: str) -> str:
        return _MESSAGE.sub(name, text).replace("reasoning_effort", "reasoning.effort")

    refusal.args = (renamed_in(str(refusal)),)
    refusal.field = refusal.field and renamed_in(refusal.field)
    return refusal


def unknown_response(key: str, field: str | None = None) -> Refusal:
    """Return the refusal for a response that is not stored."""
    key = key[:MAX_ID_CHARACTERS]
    message = f"Response with id {key!r} not found: send its full conversation again"
    return Refusal(404, message, code="not_found", field=field)


def with_referenced(
    items: Sequence[dict[str, Any]], find: Callable[[str], dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """Replace item references with the items of earlier answers.

    The AI SDK refers to earlier answers in this way.

    Args:
        items: items of a request's ``input``.
        find: function that returns the item with an id; None if it is not stored.

    Raises:
        FieldError: if two references refer to the same item.
        Refusal: if an item is not stored.
    """
    found: dict[str, dict[str, Any]] = {}
    named: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if item.get("type") == "item_reference":
            key, name = str(item.get("id"))[:MAX_ID_CHARACTERS], f"input[{index}]"
            if key in found:
                raise FieldError("is referenced twice: an item may occur only once", name)
            if (kept := find(key)) is None:
                message = f"Item with id {key!r} not found: send the item itself"
                raise Refusal(404, message, code="not_found", field=name)
            found[key] = item = kept
        named.append(item)
    return named


def messages_of(items: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """Convert the items of a request's ``input`` to messages of the chat-completions API.

    Consecutive tool calls and the assistant message before them become one message.

    Returns:
        the messages, and the index of each message's first item.

    Raises:
        FieldError: if an item is not supported; the error names the item.
    """
    messages: list[dict[str, Any]] = []
    places: list[int] = []
    for index, item in enumerate(items):
        name, kind = f"input[{index}]", item.get("type") or "message"
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item, name)})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_call(item, name))
        elif kind == "function_call_output":
            content = _content({"content": item.get("output")}, name)
            answers = {"role": "tool", "tool_call_id": item.get("call_id")}
            messages.append(answers | {"content": content})
        elif kind != "reasoning":  # Chat templates drop the reasoning of earlier turns.
            known = "message, function_call, function_call_output, reasoning or item_reference"
            raise FieldError(f"type {kind!r} is not supported: use {known}", name)
        places += [index] * (len(messages) - len(places))
    return messages, places


def _content(item: dict[str, Any], name: str) -> Any:
    content = item.get("content")
    if not isinstance(content, list):
        return content
    return [_part(part, f"{name}.content[{at}]") for at, part in enumerate(content)]


def _part(part: Any, name: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _PART_TYPES:
        return {"type": "text", "text": part.get("text")}
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    if kind == "input_image":
        if part.get("image_url") is None:
            raise FieldError(
                "requires image_url, because this server does not store uploaded files", name
            )
        url = part["image_url"]
        if isinstance(url, str):
            url = {"url": url, "detail": part.get("detail")}
        return {"type": "image_url", "image_url": url}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    if kind == "input_file":
        return {"type": "file", "file": {"file_data": part.get("file_data")}}
    if kind == "input_video":
        return {"type": "video_url", "video_url": part.get("video_url")}
    known = "input_text, output_text, input_image, input_audio, input_video, input_file or refusal"
    raise FieldError(f"type {kind!r} is not supported: use {known}", name)


def _call(item: dict[str, Any], name: str) -> dict[str, Any]:
    call = {"id": item.get("call_id"), "name": item.get("name"), "text": item.get("arguments")}
    if not all(isinstance(text, str) for text in call.values()):
        raise FieldError("call_id, name and arguments must be strings", name)
    function = {"name": call["name"], "arguments": call["text"]}
    return {"id": call["id"], "type": "function", "function": function}


def function_tool(tool: dict[str, Any], name: str) -> dict[str, Any]:
    """Convert a tool to one of the chat-completions API.

    Args:
        tool: tool of the Responses or Realtime API.
        name: field that the error names.

    Raises:
        FieldError: if it is not a function.
    """
    if tool.get("type") != "function":
        raise FieldError("only tools of type 'function' are supported: leave this tool out", name)
    function = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
    return {"type": "function", "function": function}


def named_choice(choice: str | dict[str, Any]) -> Any:
    """Convert a tool choice to one of the chat-completions API."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema = {"name": wanted.name or "answer", "schema": wanted.schema_}
    return {"type": "json_schema", "json_schema": schema}
