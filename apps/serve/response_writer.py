"""ResponseWriter: formats an answer for OpenAI's Responses API, streamed or not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from oscar_mm.apps.serve.answer_set import Choice
from oscar_mm.apps.serve.completed import CompletedAnswer
from oscar_mm.apps.serve.logprobs import after_reasoning, logprob_entries
from oscar_mm.apps.serve.refusals import Refusal
from oscar_mm.apps.serve.responses_body import ResponsesBody
from oscar_mm.apps.serve.tools import call_body
from oscar_mm.engine.answer import Answer, Reasoning
from oscar_mm.engine.logprobs import TokenLogprob
from oscar_mm.engine.think_tokens import ThinkTokens
from oscar_mm.tool_parsers.calls import ToolCallDelta
from oscar_mm.tool_parsers.parser import Piece

_JSON = json.JSONEncoder(ensure_ascii=False)
_ECHOED = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls"),
    *("previous_response_id", "reasoning", "store", "temperature", "text", "tool_choice"),
    *("tools", "top_logprobs", "top_p", "user"),
)
"""Request fields that the response repeats."""


class ResponseWriter:
    """Formats the answer to one Responses API request; see ``AnswerFormat``.

    The output items are the reasoning, the text and the tool calls, in this order. An item is open
    from its first piece until the first piece of another item or the end of the answer.

    Args:
        request: the request to answer.
        model: model name to show to clients.
        tokenizer: tokenizer of the model.
        thinks: tokens that delimit the model's reasoning; see ``Family.think_tokens``.
        keep: function that stores the complete response, and its answer as a chat message.
    """

    def __init__(
        self,
        request: ResponsesBody,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        thinks: ThinkTokens | None,
        keep: Callable[[dict[str, Any], dict[str, Any]], None] | None = None,
    ) -> None:
        fields = request.model_dump(by_alias=True, exclude={"input"}, exclude_none=True)
        self._request = {name: fields.get(name) for name in _ECHOED}
        self._model, self._keep, self._created = model, keep, int(time.time())
        self._tokenizer, self._thinks = tokenizer, thinks
        self.id = f"resp_{uuid4().hex}"
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []
        self._untold: list[TokenLogprob] = []
        self._logprobs: list[dict[str, Any]] = []
        self._number = 0

    def whole(self, choices: Sequence[Choice], _: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        answer = choices[0].completed.answer
        self._untold += choices[0].logprobs or ()
        pieces: list[Piece] = [Reasoning(answer.reasoning)] if answer.reasoning else []
        pieces += [answer.text] if answer.text else []
        pieces += [
            ToolCallDelta(index, call.arguments, call.id, call.name)
            for index, call in enumerate(answer.tool_calls)
        ]
        for piece in pieces:
            for _event in self.piece(0, piece, None):
                pass
        for _event in self._close_item():
            pass
        return self._completed(choices[0].completed)

    def begin(self, _: int) -> Iterator[str]:
        """Yield the events before the first piece."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def piece(self, _: int, piece: Piece, found: Sequence[TokenLogprob] | None) -> Iterator[str]:
        """Yield the events for a piece of text, of reasoning or of a tool call."""
        kind = "function_call" if isinstance(piece, ToolCallDelta) else "message"
        kind = "reasoning" if isinstance(piece, Reasoning) else kind
        # Log-probabilities that arrive with reasoning may belong to the text after it.
        self._untold = [] if kind == "function_call" else [*self._untold, *(found or ())]
        begins = self._open is None or self._open["type"] != kind
        if begins or (isinstance(piece, ToolCallDelta) and piece.id is not None):
            yield from self._close_item()
            yield from self._begin_item(kind, piece)
        if text := piece.arguments if isinstance(piece, ToolCallDelta) else str(piece):
            self._text.append(text)
            more = {"logprobs": self._new_logprobs()} if kind == "message" else {}
            yield self._event(_DELTAS[kind], **self._place(kind), delta=text, **more)

    def end(self, _: int, choice: Choice) -> Iterator[str]:
        """Yield the events after the last piece."""
        self._untold += choice.logprobs or ()
        self._new_logprobs()
        yield from self._close_item()
        response = self._completed(choice.completed)
        yield self._event(f"response.{response['status']}", response=response)

    def close(self, _: Mapping[str, Any]) -> Iterator[str]:
        """Yield nothing: the last event of the answer contains the usage."""
        return iter(())

    def failed(self, refusal: Refusal) -> Iterator[str]:
        """Yield the events for an answer that cannot be completed."""
        error = {"code": "server_error", "message": str(refusal)}
        yield self._event("response.failed", response=self._response("failed", error=error))

    def last(self) -> Iterator[str]:
        """Yield nothing: the stream ends with the answer."""
        return iter(())

    def _new_logprobs(self) -> list[dict[str, Any]]:
        """Add the log-probabilities received so far to the message, and return their entries."""
        if not self._untold:
            return []
        found, self._untold = after_reasoning(self._tokenizer, self._thinks, self._untold), []
        told = logprob_entries(self._tokenizer, found)
        self._logprobs += told
        return told

    def _begin_item(self, kind: str, piece: Piece) -> Iterator[str]:
        item: dict[str, Any] = {"id": f"{_PREFIXES[kind]}_{uuid4().hex}", "type": kind}
        item["status"] = "in_progress"
        if isinstance(piece, ToolCallDelta):
            item |= {"call_id": piece.id, "name": piece.name, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._open = item
        self._items.append(item)
        index = len(self._items) - 1
        yield self._event("response.output_item.added", output_index=index, item=dict(item))
        if kind != "function_call":
            part = _content_part(kind, "", [])
            yield self._event("response.content_part.added", **self._place(kind), part=part)

    def _close_item(self) -> Iterator[str]:
        """Yield the events that close the open item, if any."""
        if (item := self._open) is None:
            return
        kind, text = item["type"], "".join(self._text)
        self._open, self._text = None, []
        logprobs, self._logprobs = self._logprobs, []
        item["status"] = "completed"
        place = self._place(kind, item)
        if kind == "function_call":
            item["arguments"] = text
            done = {"arguments": text, "name": item["name"]}
        else:
            item["content"] = [_content_part(kind, text, logprobs)]
            done = {"text": text} | ({"logprobs": logprobs} if kind == "message" else {})
        yield self._event(_DONE[kind], **place, **done)
        if kind != "function_call":
            part = item["content"][0]
            yield self._event("response.content_part.done", **place, part=part)
        index = place["output_index"]
        yield self._event("response.output_item.done", output_index=index, item=dict(item))

    def _place(self, kind: str, item: dict[str, Any] | None = None) -> dict[str, Any]:
        item = self._open if item is None else item
        assert item is not None
        place = {"item_id": item["id"], "output_index": self._items.index(item)}
        return place if kind == "function_call" else place | {"content_index": 0}

    def _completed(self, completed: CompletedAnswer) -> dict[str, Any]:
        answer, usage = completed.answer, completed.usage
        cut = answer.finish_reason == "length"
        if cut and self._items:
            self._items[-1]["status"] = "incomplete"
        response = self._response("incomplete" if cut else "completed")
        response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }
        if self._keep is not None:
            self._keep(response, _message(answer))
        return response

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        asked = self._request
        return {
            **asked,
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": None,
            "model": self._model,
            "output": [dict(item) for item in self._items],
            "usage": None,
            "text": asked["text"] or {"format": {"type": "text"}},
            "reasoning": asked["reasoning"] or {"effort": None, "summary": None},
            "tool_choice": asked["tool_choice"] or "auto",
            "tools": [{"strict": None, **tool} for tool in asked["tools"] or ()],
            "parallel_tool_calls": asked["parallel_tool_calls"] is not False,
            "store": asked["store"] is not False,
            "metadata": asked["metadata"] or {},
            "truncation": "disabled",
        }

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {_JSON.encode(event)}\n\n"


def _message(answer: Answer) -> dict[str, Any]:
    """Return an answer as a message of the chat-completions API."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.tool_calls:
        message["tool_calls"] = [call_body(call) for call in answer.tool_calls]
    return message


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}
_DONE = {kind: f"{name.removesuffix('.delta')}.done" for kind, name in _DELTAS.items()}


def _content_part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
