"""The server: loads the model, builds the page and serves it on this machine."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oscar_mm.apps.demo.examples import FOLDER
from oscar_mm.apps.demo.sessions import Sessions
from oscar_mm.apps.demo.visitor_input import LIMITS, MAX_CHAT_BYTES, SessionSettings
from oscar_mm.apps.server_process import bind, freeze_loaded, sigterm_as_ctrl_c
from oscar_mm.errors import InputError
from oscar_mm.pipelines import pipeline_for
from oscar_mm.policy import KVPolicy

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

_STYLE = Path(__file__).with_name("style.css")
_FONTS = ["ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "monospace"]
_CLEANUP_INTERVAL_S, _MOST_FILE_AGE_S = 600, 6 * 3600
GRACE_S = 10.0
"""Seconds in which answers end when the page is closed."""
_KEEP_GRACE_S = 120.0
"""Seconds in which conversations are written when the page is closed."""


def serve(
    model: str,
    *,
    policy: str,
    compare: bool,
    port: int,
    host: str,
    kv_budget: str,
    max_context: int | None,
    device: str | None,
    dtype: str | None,
    keep: Path | None,
) -> None:
    """Load the model and serve the page until Ctrl-C or SIGTERM, then remove all its files.

    Raises:
        InputError: there is no such model, or the port or the host cannot be used.
    """
    with sigterm_as_ctrl_c():
        # gradio binds its own socket when the model is loaded; a port in use is an error now.
        for sock in bind(host, port):
            sock.close()
        pipe = pipeline_for(model)(
            model,
            policy=policy,
            dtype=dtype or _dtype(device),
            device=device,
            limits=LIMITS,
            kv_budget=kv_budget,
            max_context=max_context,
            prefill_chunk="auto",
        )
        settings = SessionSettings(KVPolicy.preset(policy), policy, compare=compare)
        try:
            _warm_up(pipe)
            freeze_loaded()
            with serve_page(pipe, settings, port=port, host=host, keep=keep) as running:
                print(f"oscar-mm: {running.address} (Ctrl-C ends it)", file=sys.stderr)
                wait_for_ctrl_c()
        finally:
            if pipe.budget is not None:
                pipe.budget.close()
    print(file=sys.stderr)
    if not running.sessions.is_empty:
        # The process would wait for the thread in which the model still reads for a visitor.
        sys.stderr.flush()
        os._exit(0)


def _dtype(device: str | None) -> str | None:
    """Choose 16 bit for tokens that are not packed on a CPU too; on a GPU the checkpoint does."""
    on_cpu = device == "cpu" or (device is None and not torch.cuda.is_available())
    return "bfloat16" if on_cpu else None


def _warm_up(pipe: Pipeline) -> None:
    """Answer once, so that no visitor waits for what the first answer compiles and loads."""
    with suppress(InputError), pipe.chat() as chat:
        chat.ask("Hello", max_new_tokens=2)


@dataclass(frozen=True)
class RunningPage:
    """A page that is served now.

    Attributes:
        address: URL of the page.
        sessions: its visitors.
        page: gradio's blocks.
    """

    address: str
    sessions: Sessions
    page: Any


@contextmanager
def serve_page(
    pipe: Any,
    settings: SessionSettings,
    *,
    port: int,
    host: str = "127.0.0.1",
    keep: Path | None = None,
) -> Iterator[RunningPage]:
    """Serve the page inside; then end all sessions, running answers within ``GRACE_S``.

    Args:
        pipe: answers.
        settings: settings of conversations for which the visitor has chosen none.
        port: port of the page.
        host: address to listen on.
        keep: folder from which conversations go on when the page is served again.

    Raises:
        InputError: the port is taken, or the folder cannot be made.
    """
    # Answers that still run may open files in this folder.
    with tempfile.TemporaryDirectory(prefix="oscar-mm-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        # gradio reads this when it builds a page: uploads go there, and go with the server.
        os.environ["GRADIO_TEMP_DIR"] = str(folder)
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        from gradio.themes import Base
        from starlette.middleware import Middleware

        from oscar_mm.apps.demo.handlers import Handlers
        from oscar_mm.apps.demo.page import Isolation, build, icon_style
        from oscar_mm.apps.guard import Guard, OneLength

        sessions = Sessions(pipe, settings, (folder, FOLDER), keep)
        page = build(Handlers(sessions, folder / "made"))
        page.delete_cache = (_CLEANUP_INTERVAL_S, _MOST_FILE_AGE_S)
        try:
            page.launch(
                server_name=host,
                server_port=port,
                share=False,
                quiet=True,
                inbrowser=False,
                prevent_thread_lock=True,
                show_error=False,
                footer_links=[],
                run_history=False,
                enable_monitoring=False,
                ssr_mode=False,
                pwa=False,
                mcp_server=False,
                max_file_size=MAX_CHAT_BYTES,
                allowed_paths=[str(FOLDER)] if FOLDER.is_dir() else [],
                app_kwargs={
                    "middleware": [
                        Middleware(OneLength),
                        Middleware(Guard, host=host, uploads=("/upload",)),
                        Middleware(Isolation, folder=folder),
                    ],
                    "docs_url": None,
                    "redoc_url": None,
                    "openapi_url": None,
                },
                theme=Base(font=_FONTS, font_mono=_MONO, primary_hue="teal", neutral_hue="slate"),
                head=f"<style>{_STYLE.read_text()}\n{icon_style()}</style>",
            )
        except OSError:
            # gradio's own message names options that this program lacks.
            raise InputError(f"--host {host} --port {port}: cannot be used: give another") from None
        try:
            yield RunningPage(str(page.local_url), sessions, page)
        finally:
            closing = threading.Thread(target=sessions.close, daemon=True)
            closing.start()
            page.close(verbose=False)
            closing.join(GRACE_S if keep is None else _KEEP_GRACE_S)


def wait_for_ctrl_c() -> None:
    """Wait while other threads serve."""
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return
