"""Access log, with a line for each request."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, MutableMapping
from time import perf_counter
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOGGER = logging.getLogger("oscar_mm.serve.access")
"""Logger: refused requests are at WARNING, server faults at ERROR, all other lines at INFO."""
REQUEST_ID = "X-Request-Id"
"""Header with the request id, which the client sends or the server generates."""
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_SHOWN = 200
"""Maximum number of characters of a path or a reason in a line."""


def note_answer(scope: MutableMapping[str, Any], usage: Mapping[str, Any]) -> None:
    """Record the token usage of a completed answer, for its request's access-log line."""
    scope["state"]["tokens"] = usage["prompt_tokens"], usage["completion_tokens"]


def note_refusal(scope: MutableMapping[str, Any], reason: str) -> None:
    """Record why a request gets no answer, or why its stream ends early."""
    scope.setdefault("state", {})["refusal"] = reason


class AccessLog:
    """Middleware that logs method, path, status, tokens, seconds, id, and the reason for a refusal.

    A line has no control characters, and no text from the bodies except what a refusal quotes::

        POST /v1/chat/completions 200 in=345 out=12 1.234s id=page-7
        POST /v1/chat/completions 400 0.001s id=7f3a "messages: must end with a message of ..."

    The response contains the id in its ``X-Request-Id`` header.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, then log it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, name = perf_counter(), 0, _request_id(scope)

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        scope.setdefault("state", {})
        try:
            await self.app(scope, receive, noted)
        finally:
            line = _line(scope, status, perf_counter() - start, name)
            LOGGER.log(_level(scope, status), line)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID, "")
    return given if _SANE_ID.fullmatch(given) else uuid4().hex


def _level(scope: Scope, status: int) -> int:
    if status >= 500:
        return logging.ERROR
    refused = "tokens" not in scope["state"] and "refusal" in scope["state"]
    return logging.WARNING if refused or status >= 400 else logging.INFO


def _line(scope: Scope, status: int, seconds: float, name: str) -> str:
    path = scope.get("raw_path", b"")[:_SHOWN].decode("ascii", errors="replace")
    about = [scope["method"][:_SHOWN], path, str(status)]
    took = [f"{seconds:.3f}s", f"id={name}"]
    if tokens := scope["state"].get("tokens"):
        return " ".join([*about, f"in={tokens[0]} out={tokens[1]}", *took])
    reason = scope["state"].get("refusal")
    return " ".join([*about, *took, *([json.dumps(reason[:_SHOWN])] if reason else [])])
