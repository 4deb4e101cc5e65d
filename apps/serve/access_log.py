"""Access log: a line for each request."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, MutableMapping
from time import perf_counter
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOGGER = logging.getLogger("oscar_mm.serve.access")
"""Writes the lines, at level INFO."""
_SHOWN = 200
"""Characters of a path or a reason that a line shows."""


def note_answer(scope: MutableMapping[str, Any], usage: Mapping[str, Any]) -> None:
    """Note the usage of a complete answer, whose tokens the line of its request tells."""
    scope["state"]["tokens"] = usage["prompt_tokens"], usage["completion_tokens"]


def note_refusal(scope: MutableMapping[str, Any], reason: str) -> None:
    """Note why a request gets no answer, or why its stream ends early."""
    scope.setdefault("state", {})["refusal"] = reason


class AccessLog:
    """Middleware that logs method, path, status, tokens, seconds and the reason of a refusal.

    A line has nothing of the bodies but what a refusal quotes, and no control characters::

        POST /v1/chat/completions 200 in=345 out=12 1.234s
        POST /v1/chat/completions 400 0.001s "messages: must end with a message of role 'user'"

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, then log."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        scope.setdefault("state", {})
        try:
            await self.app(scope, receive, noted)
        finally:
            LOGGER.info(_line(scope, status, perf_counter() - start))


def _line(scope: Scope, status: int, seconds: float) -> str:
    path = scope.get("raw_path", b"")[:_SHOWN].decode("ascii", errors="replace")
    about = [scope["method"][:_SHOWN], path, str(status)]
    if tokens := scope["state"].get("tokens"):
        return " ".join([*about, f"in={tokens[0]} out={tokens[1]} {seconds:.3f}s"])
    reason = scope["state"].get("refusal")
    return " ".join([*about, f"{seconds:.3f}s", *([json.dumps(reason[:_SHOWN])] if reason else [])])
