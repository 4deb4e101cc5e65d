"""Refusals: error responses, and entries of the model list, in OpenAI's format."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from oscar_mm.apps.serve.protocol import FieldError
from oscar_mm.engine.sampling import Sampling
from oscar_mm.engine.template import TemplateFields
from oscar_mm.errors import InputError, MemoryBusy, RequestTooLarge

RETRY_S = 5
"""Seconds after which a client should retry."""
_FOR_OPERATORS = re.compile(r",? or raise MediaLimits\.\w+")
"""Advice that only the server's operator can follow."""
_OPTIONS = *(option.name for option in fields(Sampling)), *TemplateFields.__annotations__
_FIELD = re.compile(
    r"(messages\[\d+\](?:\.content(?:\[\d+\])?)?|tools(?:\[\d+\])?|tool_choice)[: ]"
    rf"|({'|'.join(_OPTIONS)})="
    r"|(response_format|structured_outputs|guided_[a-z]+|chat_template_kwargs|prompt"
    r"|continue_final_message)[: ]"
)
"""Pattern of the field name with which an error message of this package starts."""


class Refusal(Exception):
    """Error response to a request.

    Args:
        status: HTTP status.
        message: error message for the client.
        kind: OpenAI's error type.
        code: OpenAI's error code.
        field: the API's name for the faulty field, or None.
        retry_after: seconds after which to retry; None if retrying does not help.
        reason: name for metrics of why the server has no capacity; None if it has.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
        field: str | None = None,
        retry_after: int | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.field = status, kind, code, field
        self.reason = reason
        self.headers = None if retry_after is None else {"Retry-After": str(retry_after)}

    @property
    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        return error_body(str(self), self.kind, self.code, self.field)


class ClientGone(Refusal):
    """Refusal for a client that has disconnected; it appears only in the log."""

    def __init__(self) -> None:
        super().__init__(499, "the client has disconnected")


def busy(message: str, reason: str) -> Refusal:
    """Return a refusal with status 503, for a server that is temporarily out of capacity.

    Args:
        message: error message for the client.
        reason: see ``Refusal``.
    """
    message = f"{message}: try again"
    return Refusal(503, message, "server_error", retry_after=RETRY_S, reason=reason)


def stopping() -> Refusal:
    """Return the refusal for a server that stops."""
    return busy("the server is stopping", "stopping")


@contextmanager
def as_refusals() -> Iterator[None]:
    """Convert errors raised within the block to refusals in the API's terms."""
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        refusal = _refusal_of(error)
        _let_go(error)
        raise refusal from None


def _refusal_of(error: Exception) -> Refusal:
    if isinstance(error, MemoryBusy):
        return busy("other requests use the memory that this request needs", "memory")
    if isinstance(error, RequestTooLarge):
        return Refusal(
            400,
            f"the conversation and its answer need {error.asked:,} tokens, but only "
            f"{error.fits:,} fit: shorten messages, or send fewer or smaller media",
            code="context_length_exceeded",
            field="messages",
        )
    if isinstance(error, InputError):
        named = _FIELD.match(str(error))
        field = named and named[named.lastindex or 0]
        field = error.field if isinstance(error, FieldError) else field
        return Refusal(400, _FOR_OPERATORS.sub("", str(error)), field=field)
    traceback.print_exception(error, file=sys.stderr)
    return Refusal(500, "the server failed to answer this request", "server_error")


def _let_go(error: BaseException | None) -> None:
    """Drop the traceback frames of an error and of its causes.

    The refusal refers to the error, so its frames would keep the request's media in memory until
    the garbage collector runs.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.with_traceback(None).__context__


def error_body(
    message: str, kind: str, code: str | None = None, field: str | None = None
) -> dict[str, Any]:
    """Return the body of an error response in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def model_card(name: str, created: int, context: int, parent: str | None = None) -> dict[str, Any]:
    """Return a model's entry in the model list; its context length has the same name as in vLLM.

    Args:
        name: model name for clients.
        created: Unix time in seconds at which the server started.
        context: maximum total tokens of a prompt and its answer.
        parent: the model that an adapter belongs to; None for the model itself.
    """
    card = {"id": name, "object": "model", "created": created, "owned_by": "oscar_mm"}
    return {**card, "root": name, "parent": parent, "max_model_len": context}
