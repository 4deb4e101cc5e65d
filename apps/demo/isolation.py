"""Nothing leaves the machine, and nothing but uploads is read: what gradio is told not to do."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import gradio as gr
from gradio_client.utils import is_file_obj_with_meta, is_http_url_like, traverse
from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oscar_mm.apps.demo import uploads

_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'"
)
"""The browser fetches from nowhere else, whatever an answer says."""
_FETCHES = ("/file=http:", "/file=https:", "/proxy=")
"""Addresses at which gradio would fetch from elsewhere."""


class LocalBlocks(gr.Blocks):
    """Blocks that take uploaded files only; gradio would download an address in a request."""

    async def preprocess_data(
        self, block_fn: Any, inputs: list[Any], state: Any, explicit_call: bool = False
    ) -> list[Any]:
        """See ``gradio.Blocks``; an address in place of a file is an error."""
        traverse(inputs, _check_file, is_file_obj_with_meta)
        return await super().preprocess_data(block_fn, inputs, state, explicit_call)


def _check_file(file: dict[str, Any]) -> dict[str, Any]:
    if is_http_url_like(str(file.get("path"))):
        raise gr.Error("addresses are not fetched: upload the file", print_exception=False)
    return file


class LocalOnly:
    """Middleware: headers that keep the browser here, no fetching for others, a bound on uploads.

    Args:
        app: what it stands before.
        folder: of uploads.
    """

    def __init__(self, app: ASGIApp, folder: Path) -> None:
        self.app, self.folder = app, folder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = unquote(scope["path"]).lower()
        if any(part in path for part in _FETCHES):
            await PlainTextResponse("addresses are not fetched", 403)(scope, receive, send)
            return

        if path.endswith("/upload") and stored_bytes(self.folder) > uploads.MAX_STORED_BYTES:
            refusal = PlainTextResponse("the server has no room for more files now", 507)
            await refusal(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        await self.app(scope, receive, with_headers)


def stored_bytes(folder: Path) -> int:
    """Of all files below a folder; those that go meanwhile do not count."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total
