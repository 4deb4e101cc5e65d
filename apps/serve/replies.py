"""Replies: answers and errors as OpenAI's clients read them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oscar_mm.generation.answer import Answer


def failure(
    message: str, kind: str, code: str | int | None = None, field: str | None = None
) -> dict[str, Any]:
    """An error."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def completion(about: Mapping[str, Any], answer: Answer, usage: Any) -> dict[str, Any]:
    """A whole answer."""
    message = {"role": "assistant", "content": answer.text}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    reason = answer.finish_reason
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    return {**about, "object": "chat.completion", "choices": [choice], "usage": usage}


def chunk(
    about: Mapping[str, Any], delta: dict[str, Any] | None, reason: str | None = None, **more: Any
) -> dict[str, Any]:
    """A piece of an answer; without ``delta`` the one that has only the usage."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
    return {**about, "object": "chat.completion.chunk", "choices": choices, **more}


def heading(number: str, model: str) -> dict[str, Any]:
    """What all parts of an answer have in common."""
    return {"id": f"chatcmpl-{number}", "created": int(time.time()), "model": model}


def model_card(name: str) -> dict[str, Any]:
    """A model in the list of models."""
    return {"id": name, "object": "model", "owned_by": "oscar_mm"}
