"""Load the model, build the page and serve it."""

from __future__ import annotations

import gc
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oscar_mm.apps.connections import ConnectionBounds
from oscar_mm.apps.demo.examples import FOLDER
from oscar_mm.apps.demo.model_choice import ModelChoice, local_models
from oscar_mm.apps.demo.sessions import MAX_VISITS, Sessions
from oscar_mm.apps.demo.visitor_input import LIMITS, SessionSettings
from oscar_mm.apps.server_process import (
    bind,
    freeze_loaded,
    listen,
    short_thread_turns,
    sigterm_as_ctrl_c,
    url,
)
from oscar_mm.chat.warm_up import answer_in_advance
from oscar_mm.errors import InputError
from oscar_mm.pipelines import pipeline_for
from oscar_mm.policy import KVPolicy

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

_CLEANUP_INTERVAL_S, _MAX_FILE_AGE_S = 600, 6 * 3600
_CONNECTIONS = 3 * MAX_VISITS + 128
"""Maximum number of connections; a page keeps two open, its browser another, and uses more."""
_GRADIO_FOLDER = "GRADIO_TEMP_DIR"
_HEAD_S = 10.0
"""Maximum seconds to receive the head of a request."""
GRACE_S = 10.0
"""Maximum seconds to let running answers finish when the page is closed."""
_KEEP_GRACE_S = 120.0
"""Maximum seconds to write conversations to disk when the page is closed."""
_LAST_WORDS_S = 0.5
"""Seconds between the choice of a model and the end of the page of the earlier one."""


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
    """Load the model and serve the page until Ctrl-C or SIGTERM; then remove temporary files.

    Raises:
        InputError: if the model does not exist, or the host or port cannot be used.
    """
    with sigterm_as_ctrl_c():
        loading: dict[str, Any] = {
            "policy": policy,
            "dtype": dtype or _dtype(device),
            "device": device,
            "limits": LIMITS,
            "kv_budget": kv_budget,
            "max_context": max_context,
            "prefill_chunk": "auto",
        }
        settings = SessionSettings(KVPolicy.preset(policy), policy, compare=compare)
        choice, others = ModelChoice(model), local_models(host)
        sockets, pipe = bind(host, port), pipeline_for(model)(model, **loading)
        while True:
            choice = ModelChoice(choice.current, others, choice.failure)
            running = _serve_model(pipe, settings, sockets, host, keep, choice)
            if choice.chosen is None:
                break
            # Keep the port of the first page, also if the system chose it.
            port = int(running.address.rpartition(":")[2].strip("/"))
            running.sessions.release()
            del pipe, running  # Only one model is in memory at a time.
            _free_memory()
            sockets = bind(host, port)
            pipe, choice = _next_model(choice, loading)
    print(file=sys.stderr)
    if not running.sessions.is_empty:
        # A normal exit would wait for the thread in which the model is still processing a prompt.
        sys.stderr.flush()
        os._exit(0)


def _serve_model(
    pipe: Pipeline,
    settings: SessionSettings,
    sockets: Sequence[socket.socket],
    host: str,
    keep: Path | None,
    choice: ModelChoice,
) -> RunningPage:
    """Serve the page of a model until Ctrl-C, or until a visitor chooses another model."""
    try:
        answer_in_advance(pipe)
        freeze_loaded()
        page = serve_page(pipe, settings, sockets, host, keep, choice=choice)
        with short_thread_turns(), page as running:
            print(f"oscar-mm: {running.address} (Ctrl-C stops it)", file=sys.stderr)
            wait_for_ctrl_c(choice.made)
            if choice.chosen is not None:
                time.sleep(_LAST_WORDS_S)  # Let the page receive its last message.
        return running
    finally:
        if pipe.budget is not None:
            pipe.budget.close()


def _next_model(choice: ModelChoice, loading: dict[str, Any]) -> tuple[Pipeline, ModelChoice]:
    """Load the chosen model, or the earlier one again if that fails."""
    chosen = str(choice.chosen)
    print(f"oscar-mm: loading {chosen}", file=sys.stderr)
    try:
        return pipeline_for(chosen)(chosen, **loading), ModelChoice(chosen)
    except (InputError, torch.OutOfMemoryError) as error:
        print(f"oscar-mm: {error}", file=sys.stderr)
    _free_memory()
    failure = f"{chosen} could not be loaded; see the reason in the log of the server"
    earlier = choice.current
    return pipeline_for(earlier)(earlier, **loading), ModelChoice(earlier, failure=failure)


def _free_memory() -> None:
    """Free the memory of a model that is no longer used."""
    gc.unfreeze()  # ``freeze_loaded`` froze its modules, which refer to each other.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _dtype(device: str | None) -> str | None:
    """Return the name of a 16-bit dtype on a CPU; on a GPU, None for the checkpoint's dtype."""
    on_cpu = device == "cpu" or (device is None and not torch.cuda.is_available())
    return "bfloat16" if on_cpu else None


@dataclass(frozen=True)
class RunningPage:
    """A page that is being served.

    Attributes:
        address: URL of the page.
        sessions: the visitors' sessions.
        page: gradio ``Blocks``.
    """

    address: str
    sessions: Sessions
    page: Any


@contextmanager
def serve_page(
    pipe: Any,
    settings: SessionSettings,
    sockets: Sequence[socket.socket],
    host: str = "127.0.0.1",
    keep: Path | None = None,
    head_s: float = _HEAD_S,
    choice: ModelChoice | None = None,
) -> Iterator[RunningPage]:
    """Serve the page within the block, then end all sessions.

    Running answers have ``GRACE_S`` seconds to finish.

    Args:
        pipe: pipeline that generates the answers.
        settings: default settings of new conversations.
        sockets: sockets to listen on, from ``bind``; they are closed at the end.
        host: address of the sockets.
        keep: folder in which to store conversations, so that they survive a restart of the server;
            None to store none.
        head_s: maximum seconds to receive the head of a request.
        choice: choice of another model, for visitors; None for no choice.

    Raises:
        InputError: if the port is taken, or the folder cannot be created.
    """
    # Ignore cleanup errors, because running answers may have files open in this folder.
    with (
        tempfile.TemporaryDirectory(prefix="oscar-mm-demo-", ignore_cleanup_errors=True) as name,
        _gradio_folder(folder := Path(name).resolve()),
    ):
        from oscar_mm.apps.demo.handlers import Handlers
        from oscar_mm.apps.demo.page import build
        from oscar_mm.apps.demo.page_server import PageServer

        sessions = Sessions(pipe, settings, (folder, FOLDER), keep)
        page = build(Handlers(sessions, folder / "made", choice))
        page.delete_cache = (_CLEANUP_INTERVAL_S, _MAX_FILE_AGE_S)
        listen(sockets)
        bounds = ConnectionBounds(_CONNECTIONS, head_s)
        with PageServer(page, sessions, sockets, host, folder, bounds):
            try:
                yield RunningPage(f"{url(host, sockets[0].getsockname()[1])}/", sessions, page)
            finally:
                closing = threading.Thread(target=sessions.close, daemon=True)
                closing.start()
                page.close(verbose=False)
                closing.join(GRACE_S if keep is None else _KEEP_GRACE_S)


@contextmanager
def _gradio_folder(folder: Path) -> Iterator[None]:
    """Let gradio keep uploads in a folder within the block.

    Gradio looks for the folder in the environment whenever a page is built or a file is used, so an
    earlier page of this process can use its files again only after the block.
    """
    earlier = os.environ.get(_GRADIO_FOLDER)
    os.environ |= {_GRADIO_FOLDER: str(folder), "GRADIO_ANALYTICS_ENABLED": "False"}
    try:
        yield
    finally:
        if earlier is None:
            os.environ.pop(_GRADIO_FOLDER, None)
        else:
            os.environ[_GRADIO_FOLDER] = earlier


def wait_for_ctrl_c(until: threading.Event) -> None:
    """Block until Ctrl-C or the event, while other threads serve the page."""
    with suppress(KeyboardInterrupt):
        until.wait()
