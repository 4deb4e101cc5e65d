"""Isolation: gradio sends nothing off the machine and reads no files but uploads."""

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

from oscar_mm.apps.demo import visitor_input

_CONTENT_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'"
)
"""Keeps the browser from fetching from elsewhere, whatever an answer says."""
_FETCHING_PATHS = ("/file=http:", "/file=https:", "/proxy=")
"""Paths at which gradio fetches from elsewhere."""


class LocalBlocks(gr.Blocks):
    """Blocks that take uploaded files only; gradio itself downloads addresses in a request."""

    async def preprocess_data(
        self, block_fn: Any, inputs: list[Any], state: Any, explicit_call: bool = False
    ) -> list[Any]:
        """Refuse an address in place of a file, then do as ``gradio.Blocks``."""
        traverse(inputs, _check_file, is_file_obj_with_meta)
        return await super().preprocess_data(block_fn, inputs, state, explicit_call)


def _check_file(file: dict[str, Any]) -> dict[str, Any]:
    if is_http_url_like(str(file.get("path"))):
        raise gr.Error("addresses are not fetched: upload the file", print_exception=False)
    return file


class Isolation:
    """Middleware that keeps the browser on this server, fetches nothing and bounds uploads.

    Args:
        app: the application that it protects.
        folder: folder of the uploads.
    """

    def __init__(self, app: ASGIApp, folder: Path) -> None:
        self.app, self.folder = app, folder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what is refused, and pass on the rest."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = unquote(scope["path"]).lower()
        if any(part in path for part in _FETCHING_PATHS):
            await PlainTextResponse("addresses are not fetched", 403)(scope, receive, send)
            return

        if path.endswith("/upload") and stored_bytes(self.folder) > visitor_input.MAX_STORED_BYTES:
            refusal = PlainTextResponse("the server has no room for more files now", 507)
            await refusal(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _CONTENT_POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        await self.app(scope, receive, with_headers)


def stored_bytes(folder: Path) -> int:
    """Add up the files below a folder; files that vanish meanwhile do not count."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total
