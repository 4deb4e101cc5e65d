"""The server: loads the model, builds the page and serves it on this machine."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oscar_mm.apps.demo.examples import FOLDER
from oscar_mm.apps.demo.session import Settings
from oscar_mm.apps.demo.sessions import Hall
from oscar_mm.apps.demo.uploads import LIMITS, MAX_CHAT_BYTES
from oscar_mm.apps.server_process import bound, sigterm_as_ctrl_c
from oscar_mm.errors import InputError
from oscar_mm.pipelines import pipeline_for
from oscar_mm.policy import KVPolicy

_STYLE = Path(__file__).with_name("style.css")
_FONTS = ["ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "monospace"]
_CLEANED_EVERY_S, _KEPT_S = 600, 6 * 3600
GRACE_S = 10.0
"""So long answers that are being written have to end when the page is closed."""


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
) -> None:
    """Load the model and serve the page until Ctrl-C or SIGTERM; then nothing of it is left.

    Raises:
        InputError: no such model, or the port or the host cannot be used.
    """
    with sigterm_as_ctrl_c():
        # gradio binds its own, when the model is loaded.
        for one in bound(host, port):
            one.close()
        pipe = pipeline_for(model)(
            model,
            policy=policy,
            dtype=dtype or _dtype(device),
            device=device,
            limits=LIMITS,
            kv_budget=kv_budget,
            max_context=max_context,
        )
        settings = Settings(KVPolicy.preset(policy), policy, compare=compare)
        try:
            with running(pipe, settings, port=port, host=host) as served:
                print(f"oscar-mm: {served.address} (Ctrl-C ends it)", file=sys.stderr)
                wait_for_ctrl_c()
        finally:
            if pipe.budget is not None:
                pipe.budget.close()
    print(file=sys.stderr)
    if not served.hall.is_empty:
        # The model still reads for someone, in a thread that the process would wait for.
        sys.stderr.flush()
        os._exit(0)


def _dtype(device: str | None) -> str | None:
    """On a CPU too, tokens that are not packed take 16 bit; on a GPU the checkpoint says it."""
    on_cpu = device == "cpu" or (device is None and not torch.cuda.is_available())
    return "bfloat16" if on_cpu else None


@dataclass(frozen=True)
class Served:
    """A page that is being served.

    Attributes:
        address: of the page.
        hall: its visitors.
        page: gradio's blocks.
    """

    address: str
    hall: Hall
    page: Any


@contextmanager
def running(
    pipe: Any, settings: Settings, *, port: int, host: str = "127.0.0.1"
) -> Iterator[Served]:
    """The page while it is served; then visitors leave, those with an answer in ``GRACE_S``.

    Raises:
        InputError: the port is taken.
    """
    # Answers that go on may still open files in it.
    with tempfile.TemporaryDirectory(prefix="oscar-mm-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        # Read when a page is built; uploads go there, and nothing outlives the server.
        os.environ["GRADIO_TEMP_DIR"] = str(folder)
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        from gradio.themes import Base
        from starlette.middleware import Middleware

        from oscar_mm.apps.demo.handlers import Handlers
        from oscar_mm.apps.demo.isolation import LocalOnly
        from oscar_mm.apps.demo.page import build
        from oscar_mm.apps.guard import Guard

        hall = Hall(pipe, settings, (folder, FOLDER))
        page = build(Handlers(hall, folder / "made"))
        page.delete_cache = (_CLEANED_EVERY_S, _KEPT_S)
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
                        Middleware(Guard, host=host, uploads=("/upload",)),
                        Middleware(LocalOnly, folder=folder),
                    ],
                    "docs_url": None,
                    "redoc_url": None,
                },
                theme=Base(font=_FONTS, font_mono=_MONO, primary_hue="teal", neutral_hue="slate"),
                head=f"<style>{_STYLE.read_text()}</style>",
            )
        except OSError:
            # gradio's own words are about what this program has not.
            raise InputError(f"--host {host} --port {port}: cannot be used: give another") from None
        try:
            yield Served(str(page.local_url), hall, page)
        finally:
            leaving = threading.Thread(target=hall.close, daemon=True)
            leaving.start()
            page.close(verbose=False)
            leaving.join(GRACE_S)


def wait_for_ctrl_c() -> None:
    """Other threads serve meanwhile."""
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return
