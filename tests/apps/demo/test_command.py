"""oscar-mm demo: what it needs, what it refuses, and that it serves until Ctrl-C."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from oscar_mm.apps.demo import server
from oscar_mm.apps.demo.command import DEFAULT_MODEL
from oscar_mm.cli import run
from oscar_mm.extras import install_command
from oscar_mm.models import BUNDLED
from tests.apps.demo.test_server import WHERE, call, free_port, join, upload
from tests.processes import Forked, command


def test_the_default_is_a_bundled_model() -> None:
    assert DEFAULT_MODEL in BUNDLED


@pytest.mark.parametrize("module", ["gradio", "markdown_it", "wsproto"])
def test_without_its_packages_it_says_what_to_install(module, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert run(["demo"]) == 2
    said = capsys.readouterr().err
    assert f"demo requires the {module} package" in said and install_command("demo") in said


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--policy", "fine"], "unknown policy 'fine'"),
        (["--kv-budget", "much"], "--kv-budget='much'"),
        (["--port", "0"], "--port"),
        (["--model", "/nowhere", "--port", str(free_port())], "no such folder"),
    ],
)
def test_what_it_refuses(options, why, capsys) -> None:
    assert run(["demo", *options]) == 2
    captured = capsys.readouterr()
    assert why in captured.err and captured.err.count("\n") == 1


def test_a_port_that_is_taken(qwen3_omni_folder, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert run(["demo", "-m", str(qwen3_omni_folder), "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"--port {port}: cannot be used (Address already in use); pass another --port" in said
    assert said.count("\n") == 1 and "GRADIO" not in said


def test_it_serves_until_ctrl_c(qwen3_omni_folder, monkeypatch, capsys, tmp_path) -> None:
    port, seen = free_port(), []

    def look_and_end(_: object) -> None:
        seen.append(httpx.get(f"http://127.0.0.1:{port}/", timeout=30))

    monkeypatch.setattr(server, "wait_for_ctrl_c", look_and_end)
    options = ["-m", str(qwen3_omni_folder), "--port", str(port), "--device", "cpu", "--compare"]
    options += ["--keep", str(tmp_path / "kept")]
    assert run(["demo", *options]) == 0
    [page] = seen
    assert page.status_code == 200 and "oscar_mm" in page.text
    assert f"http://127.0.0.1:{port}/ (Ctrl-C stops it)" in capsys.readouterr().err
    assert (tmp_path / "kept").is_dir()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/")


def test_the_model_has_answered_before_the_first_visitor(qwen3_omni_folder, monkeypatch) -> None:
    load, steps, pipes = server.pipeline_for, [], []

    def made(*arguments: Any, **named: Any) -> Any:
        [pipe] = pipes[:] = [load(qwen3_omni_folder)(*arguments, **named)]
        pipe.model.lm_head.register_forward_hook(lambda *_: steps.append(len(steps)))
        return pipe

    def look(_: object) -> None:
        assert len(steps) == 2 and pipes[0].budget.used_bytes == 0

    monkeypatch.setattr(server, "pipeline_for", lambda model: made)
    monkeypatch.setattr(server, "wait_for_ctrl_c", look)
    options = ["-m", str(qwen3_omni_folder), "--port", str(free_port()), "--device", "cpu"]
    assert run(["demo", *options]) == 0 and steps


def serve_until_signalled(
    folder: Path, port: int, slow: Path, reading: Path, *options: str
) -> None:
    """The demo; once a file is there, a step of the model takes minutes, as another file tells."""
    load = server.pipeline_for

    def slowly(*_: object) -> None:
        if slow.exists():
            reading.touch()
            time.sleep(300)

    def made(*arguments: Any, **named: Any) -> Any:
        pipe = load(folder)(*arguments, **named)
        pipe.model.lm_head.register_forward_pre_hook(slowly)
        return pipe

    server.pipeline_for = lambda model: made
    server.GRACE_S = 1.0
    command("demo", "-m", str(folder), "--port", str(port), "--device", "cpu", *options)


def until(done: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if found := done():
                return found
        time.sleep(0.05)
    raise AssertionError(f"not in {seconds} s")


@pytest.mark.slow
def test_sigterm_leaves_nothing(qwen3_omni_folder, uploads, tmp_path) -> None:
    """Neither uploads nor conversations on disk, whoever is connected and waits for an answer."""
    port, left, slow, reading = free_port(), tmp_path / "tmp", tmp_path / "slow", tmp_path / "reads"
    left.mkdir()
    arguments = qwen3_omni_folder, port, slow, reading, "--kv-budget", "46kB"
    with (
        Forked(serve_until_signalled, *arguments, environment={"TMPDIR": str(left)}) as demo,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        until(lambda: client.get("/").status_code == 200)
        handlers = {
            one["id"]: SimpleNamespace(name=one["api_name"])
            for one in client.get("/config").json()["dependencies"]
        }
        page = SimpleNamespace(page=SimpleNamespace(fns=handlers))
        with ExitStack() as sessions:
            for session in ("first", "second", "third"):
                beats = client.stream("GET", f"gradio_api/heartbeat/{session}")
                next(sessions.enter_context(beats).iter_lines())
                message = {"text": "What?", "files": [upload(client, uploads / "0.png")]}
                if session == "third":
                    break
                assert call(client, page, "ask", [message, 0, 4, *WHERE], session)[-1]["success"]
            assert any(left.rglob("0.png")) and any(left.rglob("chat-*.safetensors"))
            slow.touch()
            join(client, page, "ask", [message, 0, 4, *WHERE], "third")
            until(reading.exists)
            start = time.monotonic()
            os.kill(demo.pid, signal.SIGTERM)
            assert demo.wait(30) == 0
            assert time.monotonic() - start < 20
    assert not list(left.iterdir())


def test_ctrl_c() -> None:
    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    server.wait_for_ctrl_c(Interrupted())
