"""MessageWriter: formats an answer for Anthropic's Messages API, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from pydantic_core import from_json

from oscar_mm.apps.serve.answer_set import Choice
from oscar_mm.apps.serve.messages_body import error_body
from oscar_mm.apps.serve.refusals import Refusal
from oscar_mm.engine.answer import Answer, Reasoning
from oscar_mm.tool_parsers.calls import ToolCallDelta
from oscar_mm.tool_parsers.parser import Piece

_JSON = json.JSONEncoder(ensure_ascii=False)
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Delta type and field of a ``content_block_delta`` event, by block type."""


class MessageWriter:
    """Formats the answer to one Messages API request; see ``AnswerFormat``.

    The content blocks are the reasoning, the text and the tool calls, in this order. A block is
    open from its first piece until the first piece of another block or the end of the answer.

    Args:
        model: model name to show to clients.
    """

    def __init__(self, model: str) -> None:
        self._model, self._id = model, f"msg_{uuid4().hex}"
        self._open: str | None = None
        self._index = -1

    def whole(self, choices: Sequence[Choice], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the full message as the body of a response that is not streamed."""
        answer = choices[0].completed.answer
        message = self._message(_blocks(answer), _usage(usage))
        return message | _ending(answer)

    def begin(self, _: int) -> Iterator[str]:
        """Yield the events before the first piece; ``message_delta`` counts the prompt's tokens."""
        message = self._message([], {"input_tokens": 0, "output_tokens": 0})
        yield _event("message_start", message=message)
        yield _event("ping")

    def piece(self, _: int, piece: Piece, __: object) -> Iterator[str]:
        """Yield the events for a piece of text, of reasoning or of a tool call."""
        kind = "tool_use" if isinstance(piece, ToolCallDelta) else "text"
        kind = "thinking" if isinstance(piece, Reasoning) else kind
        if self._open != kind or (isinstance(piece, ToolCallDelta) and piece.id is not None):
            yield from self._close_block()
            self._open, self._index = kind, self._index + 1
            block = _new_block(kind, piece)
            yield _event("content_block_start", index=self._index, content_block=block)
        if text := piece.arguments if isinstance(piece, ToolCallDelta) else str(piece):
            name, field = _DELTAS[kind]
            delta = {"type": name, field: text}
            yield _event("content_block_delta", index=self._index, delta=delta)

    def end(self, _: int, choice: Choice) -> Iterator[str]:
        """Yield the events after the last piece."""
        yield from self._close_block()
        completed = choice.completed
        delta, usage = _ending(completed.answer), _usage(completed.usage)
        yield _event("message_delta", delta=delta, usage=usage)
        yield _event("message_stop")

    def close(self, _: Mapping[str, Any]) -> Iterator[str]:
        """Yield nothing: the answer's own events contain the usage."""
        return iter(())

    def failed(self, refusal: Refusal) -> Iterator[str]:
        """Yield the event for an answer that cannot be completed."""
        yield _event("error", error=error_body(refusal.status, str(refusal))["error"])

    def last(self) -> Iterator[str]:
        """Yield nothing: the stream ends with the answer."""
        return iter(())

    def _close_block(self) -> Iterator[str]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
        self._open = None

    def _message(self, content: list[dict[str, Any]], usage: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    """Return a complete answer's blocks; a truncated call has the input generated so far."""
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    for call in answer.tool_calls:
        try:
            given = from_json(call.arguments, allow_partial=True)
        except ValueError:
            given = None
        given = given if isinstance(given, dict) else {}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


def _new_block(kind: str, piece: Piece) -> dict[str, Any]:
    if isinstance(piece, ToolCallDelta):
        return {"type": kind, "id": piece.id, "name": piece.name, "input": {}}
    return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})


def _ending(answer: Answer) -> dict[str, Any]:
    """Return the response fields that say why an answer ended."""
    if answer.stop_text is not None and answer.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_text}
    return {"stop_reason": _REASONS[answer.finish_reason], "stop_sequence": None}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usage in Anthropic's format, where input tokens exclude cached tokens."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {_JSON.encode({'type': kind, **fields})}\n\n"
