"""A server over a tiny Qwen3-Omni, and the official client."""

import base64
import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from PIL import Image

from oscar_mm import OscarOmniPipeline, OscarVLPipeline
from tests.apps.serve.stalls import loop_of, show
from tests.pipelines.conftest import NEVER
from tests.prompts import noise, tone
from tests.tool_template import TOOL_TEMPLATE

openai = pytest.importorskip("openai", reason="needs the openai package")
pytest.importorskip("fastapi", reason="needs fastapi")
pytest.importorskip("prometheus_client", reason="needs prometheus-client")
pytest.importorskip("uvicorn", reason="needs uvicorn")

STOP_S = 20
"""Maximum seconds in which a server without answers stops."""


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def png(seed: int = 0) -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(64, 96, seed)).save(file, "png")
    return file.getvalue()


def wav(seconds: float = 1.0) -> bytes:
    import soundfile

    file = io.BytesIO()
    samples, rate = tone(seconds)
    soundfile.write(file, np.asarray(samples), rate, format="wav")
    return file.getvalue()


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(data)}"}}


def sound(data: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": encoded(data), "format": "wav"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": parts[0] if parts[1:] == () else list(parts)}


@contextmanager
def started(app: Any, kind: type | None = None) -> Iterator[tuple[Any, str]]:
    """A server (of a kind, by default ``Server``) that runs in a thread, and its address."""
    from oscar_mm.apps.serve.server import Server
    from oscar_mm.apps.server_process import bind

    server = (kind or Server)(app)
    sockets = bind("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    thread = threading.Thread(target=server.run, args=[sockets])
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        loop = loop_of(server) if server.servers else None
        server.should_exit = True
        thread.join(STOP_S)
        if thread.is_alive() and loop is not None:
            show(loop)
        assert not thread.is_alive()


@contextmanager
def served(pipe: Any, **limits: Any) -> Iterator[str]:
    """Address of a server over a pipeline."""
    from oscar_mm.apps.serve.server import create_app
    from oscar_mm.apps.serve.service import ServerLimits

    with started(create_app(pipe, "tiny", ServerLimits(**limits))) as (_, address):
        yield address


@pytest.fixture(scope="session")
def omni(qwen3_omni_folder) -> OscarOmniPipeline:
    pipe = OscarOmniPipeline(qwen3_omni_folder, policy="compact", device="cpu")
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


@pytest.fixture(scope="session")
def address(omni) -> Iterator[str]:
    with served(omni, api_key="secret", max_new_tokens=4000, max_request_bytes=200_000) as where:
        yield where


@pytest.fixture(scope="module")
def tool_pipe(qwen3_vl_folder) -> OscarVLPipeline:
    """A pipeline whose chat template has tools."""
    pipe = OscarVLPipeline(qwen3_vl_folder, policy="compact", device="cpu", prefix_cache="1MB")
    pipe.processor.chat_template = TOOL_TEMPLATE
    return pipe


@pytest.fixture(scope="module")
def tool_address(tool_pipe) -> Iterator[str]:
    with served(tool_pipe) as where:
        yield where


@pytest.fixture
def client(address) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0) as made:
        yield made


@pytest.fixture
def picture_address(tmp_path, monkeypatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "page.html").write_text("<html>")
    (tmp_path / "notes.bin").write_bytes(b"notes")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/a.png"
    server.shutdown()
    server.server_close()
