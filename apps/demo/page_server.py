"""PageServer: serves the page with connection limits, which gradio's own server lacks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
import uvicorn
from fastapi import FastAPI
from gradio.themes import Base
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from oscar_mm.apps.connections import STREAM_HEADERS, Connection, ConnectionBounds
from oscar_mm.apps.demo.changes import WORKER_SCRIPT
from oscar_mm.apps.demo.examples import FOLDER
from oscar_mm.apps.demo.page import Isolation, icon_style
from oscar_mm.apps.demo.sessions import Sessions
from oscar_mm.apps.demo.visitor_input import MAX_CHAT_BYTES
from oscar_mm.apps.guard import Guard, OneLength
from oscar_mm.errors import InputError

_STYLE = Path(__file__).with_name("style.css")
_FONTS = ["ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "monospace"]
_OFF: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
_CLOSING_S = 5
"""Maximum seconds to let open HTTP responses finish at shutdown."""


class PageServer(uvicorn.Server):
    """Web server that runs in its own thread within a ``with`` block.

    Args:
        page: gradio ``Blocks`` to serve; closing them closes this server.
        sessions: the visitors' sessions.
        sockets: sockets to listen on; they are closed when the block ends.
        host: address of the sockets.
        folder: folder for uploads.
        bounds: limits on the connections.
    """

    def __init__(
        self,
        page: Any,
        sessions: Sessions,
        sockets: Sequence[socket.socket],
        host: str,
        folder: Path,
        bounds: ConnectionBounds,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                _mounted(page, sessions, host, folder),
                http=partial(Connection, bounds),  # pyright: ignore[reportArgumentType] is called
                ws="none",
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=_CLOSING_S,
            )
        )
        self._page = page
        self._thread = threading.Thread(target=self.run, args=[[*sockets]], daemon=True)

    def __enter__(self) -> PageServer:
        """Start the server.

        Raises:
            InputError: if the page cannot be served.
        """
        self._thread.start()
        while not self.started:
            if not self._thread.is_alive():
                raise InputError("the page cannot be served: see the log for the reason")
            time.sleep(0.001)
        self._page.is_running, self._page.server = True, self
        return self

    def __exit__(self, *_: object) -> None:
        """End all streams and stop the server."""
        self._page.close(verbose=False)

    def close(self) -> None:
        """Stop the server."""
        self.should_exit = True
        self._thread.join(_CLOSING_S)


def _mounted(page: Any, sessions: Sessions, host: str, folder: Path) -> FastAPI:
    """Return an application that serves only this page."""
    app = gr.mount_gradio_app(
        FastAPI(**_OFF),
        page,
        path="/",
        footer_links=[],
        run_history=False,
        app_kwargs={
            "middleware": [
                Middleware(OneLength),
                Middleware(Guard, host=host, uploads=("/upload",)),
                Middleware(Isolation, folder=folder),
            ],
            **_OFF,
        },
        allowed_paths=[str(FOLDER)] if FOLDER.is_dir() else [],
        show_error=False,
        max_file_size=MAX_CHAT_BYTES,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=Base(font=_FONTS, font_mono=_MONO, primary_hue="teal", neutral_hue="slate"),
        head=f"<style>{_STYLE.read_text('utf-8')}\n{icon_style()}</style>",
    )
    # Closing the page ends the streams of ``page.app``.
    [page.app] = [route.app for route in app.routes if isinstance(route, Mount)]
    served: Any = page.app
    served.routes.insert(0, Route("/speech/{key}", partial(_speech, sessions)))
    served.routes.insert(0, Route("/changes", partial(_changes, sessions)))
    served.routes.insert(0, Route("/changes.js", _changes_worker))
    return app


async def _speech(sessions: Sessions, request: Request) -> Response:
    """Stream the speech of an answer while it is made."""
    if (found := sessions.speech(request.path_params["key"])) is None:
        return PlainTextResponse("this speech is gone: ask again to hear an answer", 404)
    return StreamingResponse(found.lines(), media_type="application/x-ndjson")


async def _changes(sessions: Sessions, request: Request) -> Response:
    """Stream events to a browser, one whenever another page has changed a page's conversation."""
    events = sessions.changes.stream(request.query_params.getlist("visitor"))
    return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)


def _changes_worker(_: Request) -> Response:
    return Response(WORKER_SCRIPT, media_type="text/javascript")
